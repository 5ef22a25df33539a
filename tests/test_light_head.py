"""A light head: its file, and its compiled and torch forms against numpy."""

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import lookahead
from learned import random_head
from lookahead.core import Request, SettingsError, Start, TokenTree
from lookahead.cpu.compiled_head import MAX_ROWS, CompiledHead
from lookahead.cpu.target import CpuTarget
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive import heads, model_curves
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.adaptive.for_model import ForModel
from lookahead.drafters.adaptive.heads import head_of, make_head, own_head_file
from lookahead.drafters.adaptive.sources.head_file import QUANTIZE, HeadWeights, from_blocks, load_head
from lookahead.drafters.adaptive.sources.light_head import GREEDY_GUESSES, sampled_guess_kinds
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.drafters.prepare import Preparation
from lookahead.hf.batch_rows import BatchRowsTarget
from lookahead.hf.exact_mode import ExactTarget
from lookahead.hf.model import HFModel
from lookahead.hf.quantize import quantize_model
from lookahead.hf.target import PlainTarget, TransformersTarget
from lookahead.hf.testing import tiny_model
from lookahead.llamacpp.model import LlamaCppModel
from lookahead.llamacpp.target import LlamaCppTarget
from lookahead.model import Shape
from lookahead.testing import FakeTarget, run
from lookahead.threads import thread_count
from test_cli import refused

VOCABULARY, HIDDEN, WIDTH = 96, 64, 96
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers():
    """Each test draws the same numbers, whichever tests ran before it."""
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state


def numbers(*shape, scale=1.0):
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def weights(shortlist=None, width=WIDTH, **changed):
    return replace(random_head(VOCABULARY, HIDDEN, width, shortlist, RANDOM), **changed)


def reference(head, embeddings, output, states, tokens):
    """(next states, logits) in numpy."""

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    z = np.concatenate([norm(states, head.hidden_norm), norm(embeddings, head.embedding_norm)], -1)
    gate, up = z @ head.gate.T, z @ head.up.T
    after = states + (gate / (1 + np.exp(-gate)) * up) @ head.down.T
    return after, head.scale * after @ output.T


def log_probabilities(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def models():
    model = HFModel(tiny_model("llama"))
    return {"packed": quantize_model(model, "q8_0"), "module": model}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "head.safetensors"
    weights().save(path)
    return path


@pytest.mark.parametrize("size", [0, 5000, None])
def test_a_head_whose_file_is_changed_in_place_stays_as_it_was(file, size):
    """cp and rsync --inplace write into the file. A mapped file that becomes shorter would kill the process."""
    head = load_head(file)
    arrays = {
        name: array for name, array in vars(head).items() if isinstance(array, np.ndarray) and array.size
    }
    before = {name: array.copy() for name, array in arrays.items()}
    assert len(before) >= 4
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
        if size is not None:
            opened.truncate(size)
    assert all(np.array_equal(array, before[name]) for name, array in arrays.items())


@pytest.mark.parametrize(("bits", "steps"), [(8, 200), (4, 12)])
def test_a_saved_head_is_the_same_up_to_rounding(file, bits, steps):
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state
    made = weights(bits=bits)
    made.save(file)
    read = load_head(file)
    assert (read.vocabulary, read.hidden, read.width, read.levels, read.scale) == (96, 64, WIDTH, 2, 0.7)
    assert read.bits == bits
    assert read.about == {"tokens": 5}
    assert (read.shortlist == made.shortlist).all()
    for name, parts in made.counts.items():
        assert all((a == b).all() for a, b in zip(parts, read.counts[name], strict=True))
    for name in ("hidden_norm", "embedding_norm", "gate", "up", "down"):
        error = np.abs(getattr(read, name) - getattr(made, name))
        assert error.max() < np.abs(getattr(made, name)).max() / steps
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize(("bits", "steps"), [(8, 200), (4, 12)])
def test_blocks_of_zeros_and_of_large_numbers(bits, steps):
    rows = np.zeros((3, 64), np.float32)
    rows[1, 5], rows[2] = -3e4, np.linspace(-1, 1, 64)
    read = from_blocks(QUANTIZE[bits][1](rows), bits)
    assert np.abs(read - rows).max() < 3e4 / steps
    assert (read[0] == 0).all()
    assert (from_blocks(QUANTIZE[bits][1](read), bits) == read).all()  # rounding again changes nothing


def damage(file, **changes):
    tensors = load_file(file)
    tensors.update(changes.pop("tensors", {}))
    meta = {"format": "lookahead light head 1", "about": "{}"}
    sizes = {"vocabulary": VOCABULARY, "hidden": HIDDEN, "levels": 2, "scale": 1.0, "bits": 8}
    meta["numbers"] = json.dumps(sizes | changes.pop("numbers", {}))
    save_file(tensors, file, meta | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, "format"),
        ({"numbers": {"hidden": 96}}, "norm must be"),
        ({"numbers": {"hidden": 40}}, "multiples of 32"),
        ({"numbers": {"vocabulary": 50}}, "not ascending"),
        ({"numbers": {"levels": 99}}, "levels"),
        ({"numbers": {"scale": 0.0}}, "scale"),
        ({"numbers": {"scale": "x"}}, "scale"),
        ({"numbers": {"bits": 5}}, "4 or 8"),
        ({"numbers": {"bits": 4}}, "must be"),
        ({"about": "[]"}, "report"),
        ({"about": "[" * 100_000}, "recursion"),
        ({"tensors": {"down": np.zeros((3, 4), np.uint8)}}, "down must be"),
        ({"tensors": {"shortlist": np.array([5, 3], np.int32)}}, "not ascending"),
        ({"tensors": {"shortlist": np.zeros(0, np.int32)}}, "empty"),
        ({"tensors": {"hidden_norm": np.full(HIDDEN, np.nan, np.float32)}}, "finite"),
        ({"tensors": {"greedy_hits": np.full((2, GREEDY_GUESSES), 11.0, np.float32)}}, "hits and trials"),
        ({"tensors": {"sampled_trials": np.zeros((1, 3), np.float32)}}, "hits and trials"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(file, changes, words):
    damage(file, **changes)
    with pytest.raises(SettingsError, match=words) as error:
        load_head(file)
    assert "\n" not in str(error.value)
    assert file.name in str(error.value)


def test_files_that_are_no_safetensors(tmp_path):
    for content in (b"", b"not a head", b"\xff" * 4096):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="is not a light head"):
            load_head(path)
    with pytest.raises(SettingsError, match="must be a file"):
        load_head(tmp_path)


@pytest.mark.parametrize("kind", ["packed", "module"])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_the_compiled_head_computes_what_numpy_does(models, kind, rows):
    head, parts = weights(), models[kind].head_parts()
    compiled = make_head(models[kind], CpuTarget, head)
    states, tokens = numbers(rows, HIDDEN), RANDOM.integers(0, VOCABULARY, rows).tolist()
    guessed, ids, odds = compiled.guess(states, tokens, 5)
    after, logits = reference(head, parts.embed(tokens), parts.output(head.shortlist), states, tokens)
    assert np.abs(guessed - after).max() < 0.03 * np.abs(after).max()
    assert ids.shape == odds.shape == (rows, 5)
    places = np.searchsorted(head.shortlist, ids)
    assert (head.shortlist[places] == ids).all()
    expected = np.take_along_axis(log_probabilities(logits), places, -1)
    assert np.abs(odds - expected).max() < 0.05 * logits.std()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_rows_change_no_bit(models, threads):
    compiled = make_head(models["packed"], CpuTarget, weights(np.arange(VOCABULARY, dtype=np.int32)))
    states, tokens = numbers(4, HIDDEN), [5, 6, 7, 8]
    alone = [compiled.guess(states[i : i + 1], tokens[i : i + 1], 8) for i in range(4)]
    before = thread_count()
    torch.set_num_threads(threads)
    try:
        together = compiled.guess(states, tokens, 8)
    finally:
        torch.set_num_threads(before)
    for i, parts in enumerate(alone):
        for one, several in zip(parts, together, strict=True):
            assert (one[0] == several[i]).all()


def test_four_bits(models):
    head = weights()
    eight, four = (make_head(models["packed"], CpuTarget, replace(head, bits=bits)) for bits in (8, 4))
    states, tokens = numbers(8, HIDDEN), list(range(8))
    (a, *_), (b, *_) = eight.guess(states, tokens, 3), four.guess(states, tokens, 3)
    assert 0 < np.abs(a - b).max() < 0.5 * np.abs(a).max()


def test_the_torch_head_computes_what_numpy_does(models):
    head, parts = weights(), models["module"].head_parts()
    made = make_head(models["module"], TransformersTarget, head)
    states, tokens = numbers(3, HIDDEN), [9, 1, 95]
    guessed, ids, odds = made.guess(states, tokens, 4)
    after, logits = reference(head, parts.embed(tokens), parts.output(head.shortlist), states, tokens)
    assert np.abs(guessed - after).max() < 1e-5 * np.abs(after).max() + 1e-5
    order = np.argsort(-logits, axis=-1)[:, :4]
    assert (ids == head.shortlist[order]).all()
    assert np.allclose(odds, np.take_along_axis(log_probabilities(logits), order, -1), atol=1e-4)


def test_making_a_head_draws_no_random_numbers(models):
    """They would change the texts that are sampled with torch's generator."""
    before = torch.random.get_rng_state()
    for model, target in ((models["packed"], CpuTarget), (models["module"], TransformersTarget)):
        make_head(model, target, weights())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_short_shortlist_gives_fewer_tokens(models):
    head = weights(np.array([4, 9], np.int32))
    for model, target in ((models["packed"], CpuTarget), (models["module"], TransformersTarget)):
        _, ids, odds = make_head(model, target, head).guess(numbers(1, HIDDEN), [3], 8)
        assert sorted(ids[0].tolist()) == [4, 9]
        assert odds.shape == (1, 2)


def test_a_head_of_another_model_is_refused(models):
    for changed in ({"vocabulary": 97}, {"hidden": 96}):
        with pytest.raises(SettingsError, match=r"a vocabulary of 96 and a hidden size of 64.*train-head"):
            make_head(models["packed"], CpuTarget, weights(**changed))


def test_a_model_without_output_embeddings_is_refused(monkeypatch):
    model = HFModel(tiny_model("llama"))
    monkeypatch.setattr(model.module, "get_output_embeddings", lambda: None)
    for used in (lambda: make_head(model, TransformersTarget, weights()), model.head_parts):
        with pytest.raises(
            SettingsError, match="needs a model with output embeddings, and LlamaForCausalLM has none"
        ):
            used()


def test_embeddings_and_output_rows_of_other_sizes_are_refused(monkeypatch):
    model = HFModel(tiny_model("llama"))
    monkeypatch.setattr(model.module, "get_input_embeddings", lambda: torch.nn.Embedding(VOCABULARY, 32))
    with pytest.raises(SettingsError, match="and those of LlamaForCausalLM have 32 and 64 numbers"):
        make_head(model, TransformersTarget, weights())


#: Targets without hidden states.
NO_HIDDEN = [PlainTarget, BatchRowsTarget, ExactTarget, LlamaCppTarget]


@pytest.mark.parametrize("target", NO_HIDDEN, ids=lambda target: target.__name__)
def test_paths_without_hidden_states_are_refused_by_name(models, target):
    with pytest.raises(SettingsError, match=target.path):
        make_head(models["module"], target, weights())


def test_decoded_rows_are_those_of_the_model(models):
    parts = models["packed"].head_parts()
    module = models["module"].module
    both = (parts.embed, module.get_input_embeddings()), (parts.output, module.get_output_embeddings())
    for read, part in both:
        expected = part.weight.detach().numpy()[[0, 95, 31, 16]]
        assert np.abs(read([0, 95, 31, 16]) - expected).max() < 0.01 * np.abs(expected).max()
    assert models["packed"].make_target().path == "cpu"


class Oracle:
    """A head that is given the text: for each row, it guesses the next token and wrong ones."""

    hidden, levels, cost = 4, 3, 0.0

    def __init__(self, target, text, right=0):
        self.counts, self.text, self.right, self.calls = weights().counts, text, right, []

    def guess(self, states, tokens, k):
        position = round(float(states[0, 0])) + 1
        self.calls.append((position, list(tokens)))
        following = self.text[position + 1 : position + 2] or [0]
        wrong = [token for token in range(5, 5 + k) if token != following[0]][: k - 1]
        wrong.insert(self.right, following[0])
        logs = np.log(np.full((1, len(wrong)), 0.05, np.float32))
        logs[0, self.right] = np.log(0.6)
        return np.full((1, 4), position, np.float32), np.array([wrong], np.int32), logs


class StateScores:
    """Scores whose hidden state is the number of tokens before the row."""

    def __init__(self, scores, length, tree):
        self.scores, self.length, self.tree = scores, length, tree

    def __getattr__(self, name):
        return getattr(self.scores, name)

    def hidden(self, node):
        if not self.tree.needs_hidden:
            return None
        return np.full(4, self.length + self.tree.depths[node], np.float32)


class StateTarget(FakeTarget):
    """A fake target with hidden states."""

    def forward(self, trees):
        lengths = [len(self.committed[slot]) for slot, _ in trees]
        scores = super().forward(trees)
        return [StateScores(*each) for each in zip(scores, lengths, [tree for _, tree in trees], strict=True)]


def hard_text(prefix):
    """A next token that no n-gram source can guess."""
    return int(hashlib.sha256(bytes(prefix)).digest()[0]) % 97 + 3


PROMPT = [7, 8, 9]


def decoded(drafter, head=None, target=None, new=40, **fields):
    target = target or StateTarget(100, hard_text)
    if head is not None:
        drafter = replace(drafter, for_model=ForModel(head=head))
    (sequence,) = run(target, [Request(PROMPT, drafter, new, **fields)])
    if sequence.result.error is not None:
        raise sequence.result.error
    return sequence.result


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("right", [0, 3])
def test_guesses_are_verified_and_change_no_token(chain, right):
    plain = decoded(Plain(), new=100)  # until a head that is always right is trusted
    head = Oracle(None, PROMPT + plain.tokens, right)
    drafter = Adaptive(rows=8, chain=chain)
    result = decoded(drafter, head, new=100)
    assert result.tokens == plain.tokens
    assert decoded(drafter).stats.compression_ratio < 1.1
    assert result.stats.drafter["head_calls"] == len(head.calls)
    assert result.stats.drafter["accepted_by_head"] > 10
    # The first step has no hidden state; then the head is called for each root, at its position.
    roots = {position for position, _ in head.calls}
    assert min(roots) == len(PROMPT) + 1
    if not chain:
        assert result.stats.compression_ratio > (2.3 if not right else 1.5)


def test_a_head_that_is_always_wrong_changes_no_token():
    plain = decoded(Plain())
    result = decoded(Adaptive(rows=8), Oracle(None, [0] * 100))
    assert result.tokens == plain.tokens


def test_guesses_whose_logits_are_nan_are_not_proposed():
    class Overflown(Oracle):
        def guess(self, states, tokens, k):
            states, ids, logs = super().guess(states, tokens, k)
            return states, np.full_like(ids, 2**31 - 1), np.full_like(logs, np.nan)

    plain = decoded(Plain())
    head = Overflown(None, PROMPT + plain.tokens)
    result = decoded(Adaptive(rows=8), head)
    assert head.calls
    assert result.tokens == plain.tokens


def test_broken_verification_is_noticed(accept_a_wrong_node):
    text = list(PROMPT)
    for _ in range(40):
        text.append(hard_text(text))
    drafted = decoded(Adaptive(rows=8), Oracle(None, [0] * 100))
    assert len(drafted.tokens) == 40
    assert PROMPT + drafted.tokens != text
    assert PROMPT + decoded(Plain()).tokens == text  # nothing is drafted, so nothing is accepted unverified


def test_a_head_that_costs_too_much_is_asked_only_where_it_pays():
    plain = decoded(Plain())
    calls = []
    for cost in (0.0, 0.12, 0.5):
        head = Oracle(None, PROMPT + plain.tokens)
        head.cost = cost
        assert decoded(Adaptive(rows=8), head).tokens == plain.tokens
        calls.append(len(head.calls))
    assert calls[0] > calls[1] > calls[2] == 0


def test_a_target_without_hidden_states_is_said_once():
    plain = decoded(Plain())
    with pytest.warns(RuntimeWarning, match="does not provide hidden states") as said:
        result = decoded(Adaptive(rows=4), Oracle(None, []), FakeTarget(100, hard_text))
    assert len(said) == 1
    assert result.tokens == plain.tokens
    assert result.stats.drafter["accepted_by_head"] == 0


def test_without_a_head_nothing_asks_for_hidden_states():
    state = Adaptive(rows=4).start(Start(PROMPT, 5, vocabulary=100))
    assert not state.draft(5).needs_hidden
    with_head = Adaptive(rows=4, for_model=ForModel(head=Oracle(None, [])))
    assert with_head.start(Start(PROMPT, 5, vocabulary=100)).draft(5).needs_hidden


def test_sampled_guesses_are_ranked_with_the_noise():
    class Noise:
        temperature, start, key = 0.7, len(PROMPT), None

        def __call__(self, index):
            return np.random.default_rng((5, index)).gumbel(size=100).astype(np.float32)

    def choose(scores, node):
        path = scores.scores._context(node)
        logits = np.random.default_rng(list(path)).normal(size=100) * 3
        return int((logits / 0.7 + Noise()(len(path) - len(PROMPT))).argmax())

    class Knows(Oracle):
        def guess(self, states, tokens, k):
            position = round(float(states[0, 0])) + 1
            path = (*self.text[:position], *tokens)
            logits = np.random.default_rng(list(path)).normal(size=100) * 3
            best = np.argsort(-logits)[:k].astype(np.int32)
            logs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
            return np.full((1, 4), position, np.float32), best[None], logs[best][None]

    sampled = {"choose": choose, "noise": Noise(), "new": 100}
    plain = decoded(Plain(), target=Prefilled(100, hard_text), **sampled)
    head = Knows(None, PROMPT + plain.tokens)
    result = decoded(Adaptive(rows=6), head, Prefilled(100, hard_text), **sampled)
    assert result.tokens == plain.tokens
    assert result.stats.compression_ratio > 1.7


class Prefilled(StateTarget):
    """The scores of a prefill also provide their context."""

    def prefill(self, prompts):
        return [StateScores(scores, 0, TokenTree(0)) for scores in super().prefill(prompts)]


def test_kinds_of_sampled_guesses():
    scores = np.array([[2.0, 1.6, 0.1], [0.4, -5.0, -9.0]], np.float32)
    kinds = sampled_guess_kinds(scores)
    assert kinds.shape == (2, 3)
    assert (kinds[:, 0] < kinds[:, 1]).all()
    assert (kinds[:, 1] <= kinds[:, 2]).all()
    assert (sampled_guess_kinds(scores[:, :1]) % 24 == 6).all()


def test_the_counts_of_a_head_start_the_calibration():
    tables = AdaptiveState().tables(False)
    head = Oracle(None, [])
    tables.use_head(head)
    guesses = tables.buckets["head"]
    assert guesses["trials"].tolist() == np.full((3, GREEDY_GUESSES), 10.0).tolist()
    guesses["trials"][0, 0] = 12.0
    tables.use_head(head)  # the same head keeps what was learned
    assert guesses["trials"][0, 0] == 12.0
    tables.use_head(Oracle(None, []))
    assert guesses["trials"][0, 0] == 10.0


@pytest.fixture
def llm(models):
    return lookahead.LLM(models["packed"])


def test_texts_with_a_head_are_those_of_plain_decoding(llm, file, monkeypatch):
    monkeypatch.setattr(HeadWeights, "parameter_count", 0)  # for this model, it costs too much
    drafter = Adaptive(rows=8, head=str(file))
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        plain = llm.generate([5, 6, 7], drafter="plain", max_new_tokens=40, **options)
        result = llm.generate([5, 6, 7], drafter=drafter, max_new_tokens=40, **options)
        assert result.tokens == plain.tokens
        assert result.stats.drafter["head_calls"] > 0


def test_a_text_names_the_head(file):
    drafter = lookahead.as_drafter(f"adaptive:head={file}")
    assert drafter == Adaptive(head=str(file)) == Adaptive(head=file)
    assert lookahead.as_drafter(str(drafter)) == drafter
    for wrong in (3, ""):
        with pytest.raises(SettingsError, match="head must be"):
            Adaptive(head=wrong)


def test_rows_are_the_same_next_to_a_busy_process(llm, file, monkeypatch):
    """The cost of a call follows from the sizes, and no clock is read."""
    monkeypatch.setattr(model_curves, "load_curve", lambda *given: CostCurve({8: {1: 1.0, 64: 1.1}}))
    monkeypatch.setattr(HeadWeights, "parameter_count", 9)

    def rows():
        llm.model.state.clear()
        result = llm.generate([5, 6, 7], max_new_tokens=60, drafter=Adaptive(head=str(file)))
        return result.stats.rows_per_step, result.stats.drafter["head_calls"]

    quiet = rows()
    assert quiet[1] > 0
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    guess = CompiledHead.guess
    monkeypatch.setattr(CompiledHead, "guess", lambda *given: (time.sleep(0.003), guess(*given))[1])
    try:
        assert rows() == quiet
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("problem", ["missing", "damaged", "another model"])
def test_a_head_that_cannot_be_used_is_said_once_and_decoding_goes_on(llm, file, problem, capsys):
    if problem == "missing":
        file.unlink()
    elif problem == "damaged":
        file.write_bytes(b"x" * 50)
    else:
        weights(vocabulary=97).save(file)
    drafter = Adaptive(rows=4, head=str(file))
    texts = [llm.generate([5, 6, 7], drafter=drafter, max_new_tokens=10).tokens for _ in range(2)]
    assert texts[0] == texts[1] == llm.generate([5, 6, 7], drafter="plain", max_new_tokens=10).tokens
    lines = [line for line in capsys.readouterr().err.splitlines() if "light head" in line]
    assert len(lines) == 1
    assert "continuing without" in lines[0]


def test_auto_takes_the_head_of_this_model_if_there_is_one(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    model = quantize_model(models["module"], "q8_0")
    assert head_of(model, CpuTarget, "auto", said.append) is None
    model = quantize_model(models["module"], "q8_0")
    own_head_file(model.shape.name).parent.mkdir(parents=True)
    weights().save(own_head_file(model.shape.name))
    head = head_of(model, CpuTarget, "auto", said.append)
    assert head.cost == pytest.approx(weights().parameter_count / model.parameter_count)
    assert head is head_of(model, CpuTarget, "auto", said.append)
    assert own_head_file(model.shape.name) == own_head_file(models["module"].shape.name)
    assert not said


def test_a_damaged_head_is_replaced_by_the_included_one(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = quantize_model(models["module"], "q8_0")
    own = own_head_file(model.shape.name)
    included = tmp_path / "included" / own.name
    monkeypatch.setattr(heads, "INCLUDED", included.parent)
    for file in (own, included):
        file.parent.mkdir(parents=True)
    own.write_bytes(b"x" * 40)
    weights().save(included)
    said = []
    assert head_of(model, CpuTarget, "auto", said.append).cost > 0
    (line,) = said
    assert line.startswith(f"{own} is not a light head: ")
    assert line.endswith(
        f"train one with lookahead train-head, or give another path; continuing with {included}"
    )


@pytest.mark.parametrize("wanted", ["auto", "head.safetensors"])
@pytest.mark.parametrize("target", NO_HIDDEN, ids=lambda target: target.__name__)
def test_a_head_on_a_path_without_hidden_states_is_said_once(models, target, wanted):
    """Also "auto", because a head is off unless it is requested, and whether or not there is a file."""
    said = []
    model = quantize_model(models["module"], "q8_0")
    for _ in range(2):
        assert head_of(model, target, wanted, said.append) is None
    assert said == [
        f"head={wanted!r} needs hidden states, which the path {target.path!r} does not provide; "
        "continuing without a light head"
    ]


def llamacpp_model():
    """A model on llama.cpp's engine without llama.cpp."""
    model = object.__new__(LlamaCppModel)
    model.description = "llama, Q4_1 weights, llama.cpp on CPU, f16 keys and f16 values"
    model.shape = Shape("llama", VOCABULARY, HIDDEN, 2)
    model.state = {}
    return model


def test_auto_with_the_engine_of_llamacpp_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepare = Preparation(llamacpp_model(), True, lambda: LlamaCppTarget)
    for _ in range(2):
        assert prepare(Adaptive(rows=4, head="auto"), LlamaCppTarget).for_model.head is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "head='auto' needs hidden states, which the path 'llama.cpp' does not provide" in line
    assert line.endswith("continuing without a light head")


@pytest.mark.parametrize("path", ["exact", "plain"])
def test_auto_without_hidden_states_decodes_the_same_text(path, capsys):
    model = HFModel(tiny_model("llama"))
    target = model.make_target(path)
    prepare = Preparation(model, True, lambda: target)
    texts = []
    for drafter in (Plain(), *(Adaptive(rows=4, head="auto"),) * 2):
        (sequence,) = run(target, [Request([5, 6, 7], prepare(drafter, target), 10)])
        texts.append(sequence.tokens)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 10
    assert capsys.readouterr().err.count(f"the path {path!r} does not provide") == 1


def test_training_a_head_names_the_engine_that_cannot(monkeypatch):
    loaded = SimpleNamespace(model=llamacpp_model())
    command = import_module("lookahead.cli.train_head")
    monkeypatch.setattr(command, "load_model", lambda load, drafter: loaded)
    refused("needs hidden states, which engine='llama.cpp' does not provide; omit engine", "train-head", "x")

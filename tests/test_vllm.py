"""The proposer for vLLM with a stand-in for vLLM's step; tests/test_vllm_engine.py uses vLLM itself."""

import random
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lookahead.integrations.vllm
from learned import save_table
from lookahead.core import SettingsError
from lookahead.drafters.adaptive.base_files import table_file, tokenizer_key
from lookahead.integrations.vllm import Proposer, known_tokens
from lookahead.integrations.vllm_costs import DISCARDED, ROUNDS
from lookahead.testing import repetitive_text
from toy import tokenizer
from wrong_proposer import Wrong

VOCABULARY = 64
LONGEST = 400
DRAFTED = 5


def config(
    settings="adaptive:rows=64:sources=suffix+logits+jacobi+corpus", stages=1, device="cpu", hf_config=None
):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTED),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY, hf_config=hf_config
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        device_config=SimpleNamespace(device_type=device),
        additional_config={} if settings is None else {"lookahead": settings},
    )


@pytest.fixture(autouse=True)
def a_version_in_range(monkeypatch, tmp_path):
    monkeypatch.setattr(lookahead.integrations.vllm, "vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # for the cost curves


@pytest.fixture
def clock(monkeypatch):
    """The proposer's clock, which the engine advances by ``cost(rows, requests)`` per step."""
    mine = SimpleNamespace(now=0.0, cost=lambda rows, requests: 1.0)
    monkeypatch.setattr(lookahead.integrations.vllm, "perf_counter", lambda: mine.now)
    return mine


class LogitsProcessor(torch.nn.Module):
    """Stands in for vLLM's: a hook passes its output to the proposer."""

    def forward(self, logits):
        return logits


class Request:
    def __init__(self, prompt, new):
        self.tokens, self.end = list(prompt), len(prompt) + new
        self.prompt, self.draft, self.evaluated = list(prompt), [], 0

    @property
    def output(self):
        return self.tokens[len(self.prompt) :]


class Engine:
    """One step of vLLM as a proposer sees it: table rows that move, and prompts evaluated in chunks.

    Attributes:
        drafted, accepted: tokens so far, as vLLM's metrics count them.
        rows, emitted: rows and new tokens of the last step.
        steps: steps in which a request emitted a token, over all requests.
        cut: drafts are truncated to this many tokens, as when the token budget is used up.
    """

    def __init__(self, proposer, model, has_logits=True, clock=None):
        self.proposer, self.model, self.running = proposer, model, []
        self.clock = clock
        self.table = np.zeros((8, LONGEST), np.int32)
        self.lengths = np.zeros(8, np.int32)
        self.drafted = self.accepted = self.steps = self.rows = self.emitted = 0
        self.cut = DRAFTED
        self.processor = torch.nn.Sequential(LogitsProcessor() if has_logits else torch.nn.Identity())
        proposer.load_model(self.processor)

    def step(self, pieces=(), waiting=()):
        """Run one pass: only a prompt chunk for requests in ``pieces``, nothing for those in ``waiting``."""
        rows, sampled, batch = [], [], [request for request in self.running if request not in waiting]
        self.emitted = 0
        for request in batch:
            if request in pieces:
                rows.append(self.logits(request.tokens[:-1]))
                sampled.append([])
                continue
            draft, request.draft = request.draft[: self.cut], []
            new = []
            for place in range(len(draft) + 1):
                rows.append(self.logits([*request.tokens, *draft[:place]]))
                if new == draft[:place]:
                    new.append(self.model([*request.tokens, *new]))
            new = new[: request.end - len(request.tokens)]
            self.steps += 1
            self.emitted += len(new)
            self.drafted += len(draft)
            self.accepted += len(new) - 1
            request.tokens += new
            sampled.append(new)
        for row, request in enumerate(batch):
            self.table[row] = 0
            self.table[row, : len(request.tokens)] = request.tokens
            self.lengths[row] = len(request.tokens)
        self.rows = len(rows)
        if self.clock is not None:
            self.clock.now += self.clock.cost(len(rows), len(batch))
        if rows:
            self.processor(torch.stack(rows))
            for request, draft in zip(
                batch, self.proposer.propose(sampled, self.lengths, self.table), strict=True
            ):
                assert len(draft) <= DRAFTED
                request.draft = draft
        self.running = [request for request in self.running if len(request.tokens) < request.end]

    def logits(self, prefix):
        row = torch.sin(torch.arange(VOCABULARY) * 12.9898 + prefix[-1]).bfloat16()
        row[self.model(prefix)] = 2
        return row

    def finish(self):
        while self.running:
            self.step()

    @property
    def per_step(self):
        return 1 + self.accepted / self.steps


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def plain(model, prompt, new):
    text = list(prompt)
    for _ in range(new):
        text.append(model(text))
    return text[len(prompt) :]


MODEL = repetitive_text(VOCABULARY)


@pytest.mark.parametrize("settings", [None, "adaptive:rows=64", "adaptive:rows=64:sources=suffix+"])
@pytest.mark.parametrize("has_logits", [True, False])
def test_requests_that_come_pause_and_end_in_any_order(settings, has_logits):
    rng = random.Random(1)
    engine = Engine(Proposer(config(settings)), MODEL, has_logits)
    queue = [Request(prompt, rng.randrange(1, 60)) for prompt in prompts(12)]
    # Two requests with the same prompt, one ahead of the other.
    queue += [Request([1, 2, 3], 40), Request([1, 2, 3], 30)]
    every = list(queue)
    while queue or engine.running:
        while queue and len(engine.running) < 6 and rng.random() < 0.5:
            engine.running.append(queue.pop(0))
        if engine.running and rng.random() < 0.1:  # preempted: evaluated again from the start later
            request = engine.running.pop(rng.randrange(len(engine.running)))
            request.draft = []
            queue.append(request)
        if engine.running and rng.random() < 0.03:  # cancelled between proposal and verification
            engine.running.pop(rng.randrange(len(engine.running)))
        if rng.random() < 0.3:
            rng.shuffle(engine.running)
        engine.cut = rng.choice([DRAFTED, DRAFTED, 2])
        some = [request for request in engine.running if rng.random() < 0.1]
        for request in some:
            request.draft = []
        engine.step(pieces=some, waiting=[r for r in engine.running if rng.random() < 0.1])
    for request in every:
        assert request.output == plain(MODEL, request.prompt, len(request.output))
    assert sum(len(request.tokens) == request.end for request in every) > 8
    learnt_only_what_is_true(engine)


def learnt_only_what_is_true(engine):
    """Check that each row of logits was learnt for its own context: its best token is the model's."""
    state = engine.proposer._drafter.state
    if state is None:  # every request has its own
        return 0
    keys, ids, *_ = state.tables(False).logits.entries(2)
    for key, best in zip(keys.tolist(), ids[:, 0].tolist(), strict=True):
        context = [key // VOCABULARY**2, key // VOCABULARY % VOCABULARY, key % VOCABULARY]
        assert best == engine.model(context)
    return len(keys)


def acceptance(proposer, has_logits=True):
    engine = Engine(proposer, MODEL, has_logits)
    engine.running = [Request(prompt, 100) for prompt in prompts(4)]
    requests = list(engine.running)
    engine.finish()
    assert [r.output for r in requests] == [plain(MODEL, r.prompt, 100) for r in requests]
    return engine.per_step


def test_a_wrong_chain_keeps_the_text_and_shows_in_the_acceptance():
    assert acceptance(Proposer(config())) > 2
    assert acceptance(Wrong(config())) < 1.2


def test_rejected_rows_teach():
    learnt = []
    for has_logits in (True, False):
        engine = Engine(Proposer(config()), MODEL, has_logits)
        engine.running = [Request(prompt, 100) for prompt in prompts(4)]
        engine.finish()
        learnt.append(learnt_only_what_is_true(engine))
    assert learnt[0] > 1.2 * learnt[1]


def test_what_is_learnt_of_one_request_serves_the_next():
    def second(settings):
        engine = Engine(Proposer(config(settings)), MODEL)
        for _ in range(2):
            engine.steps = engine.accepted = 0
            engine.running = [Request([5, 6], 80)]
            engine.finish()
        return engine.per_step

    assert second("adaptive:rows=64:sources=suffix+corpus") > 4
    assert second("adaptive:rows=64:sources=suffix+") < 3


def test_a_learned_table_is_found(tmp_path):
    """Nothing else proposes tokens."""
    given = config("adaptive:rows=64:sources=base+")
    own = tokenizer()
    own.save_pretrained(tmp_path / "tokenizer")
    given.model_config.tokenizer = tmp_path / "tokenizer"
    proposer = Proposer(given)
    assert acceptance(proposer) == 1
    file = table_file(tokenizer_key(own))
    save_table(file, VOCABULARY, [prompt + plain(MODEL, prompt, 100) for prompt in prompts(4)])
    # The requests after that have it.
    assert acceptance(proposer) > 2
    assert proposer._drafter.for_model.base_table.path == file


@pytest.mark.parametrize("has_logits", [True, False])
def test_without_the_corpus_a_request_teaches_no_other(has_logits):
    engine = Engine(Proposer(config("adaptive:rows=64:sources=suffix+logits+jacobi")), MODEL, has_logits)
    found = []
    for _ in range(2):
        engine.steps = engine.accepted = 0
        engine.running = [Request([5, 6], 80)]
        engine.finish()
        found.append(engine.per_step)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "corpus"),
    [
        (None, True),
        ("adaptive:rows=9", True),
        ({"max_entries": 50_000}, True),
        ({"drafter": "adaptive:max_rows=3"}, True),
        ("adaptive:rows=9:sources=suffix+logits+base+jacobi", False),
        ({"drafter": "adaptive:sources=suffix+"}, False),
        ({"sources": ["suffix", "logits"]}, False),
    ],
)
def test_the_corpus_is_used_unless_the_settings_name_sources(settings, corpus):
    drafter = lookahead.integrations.vllm.drafter_of(config(settings))
    assert ("corpus" in drafter.sources) == corpus


def test_a_request_that_moved_is_known_by_its_text():
    engine = Engine(Proposer(config()), MODEL)
    engine.running = requests = [Request(prompt, 50) for prompt in prompts(3)]
    engine.step()
    before = [request.state for request in engine.proposer._known]
    engine.running = requests[::-1]
    engine.step()
    assert [request.state for request in engine.proposer._known] == before[::-1]


def test_drafts_end_at_the_longest_text():
    engine = Engine(Proposer(config()), lambda text: (text[-1] + 1) % 4)
    engine.running = [Request([0, 1, 2, 3] * 95, LONGEST - 380)]
    while engine.running:
        engine.step()
        for request in engine.running:
            assert len(request.tokens) + len(request.draft) < LONGEST
    assert engine.per_step > 2


@pytest.mark.parametrize(
    ("setting", "longest"),
    [("max_rows=1", 0), ("max_rows=3", 2), ("rows=3", 2), ("rows=8:max_rows=8", DRAFTED)],
)
def test_chains_have_at_most_the_rows_of_the_settings(clock, setting, longest):
    engine = Engine(Proposer(config(f"adaptive:{setting}")), lambda text: text[-1], clock=clock)
    engine.running = [Request([7] * 20, 100)]
    lengths = set()
    while engine.running:
        engine.step()
        lengths |= {len(request.draft) for request in engine.running}
    assert max(lengths) == longest


#: Measurement steps for one number of requests, with 6, 3, 2 and 1 rows per request.
MEASURED = 4 * (ROUNDS + DISCARDED)


def measure(clock, requests, new=MEASURED + 20, device="cpu"):
    """An engine whose proposer has measured steps with this number of requests."""
    engine = Engine(
        Proposer(config(None, device=device)),
        lambda text: text[-1] * 7 % VOCABULARY ^ len(text) % 5,
        clock=clock,
    )
    engine.running = [Request(prompt, 6 * new) for prompt in prompts(requests)]
    for _ in range(MEASURED + 1):
        assert engine.proposer._costs.curve(requests) is None
        engine.step()
    return engine


@pytest.mark.parametrize("requests", [1, 4])
def test_the_cost_curve_comes_from_the_steps_themselves(clock, requests):
    clock.cost = lambda rows, batch: 2.0 + 0.5 * (rows / batch - 1)
    curve = measure(clock, requests).proposer._costs.curve(requests)
    # Each row costs a quarter of a plain step.
    assert [curve.pass_cost(k) for k in (1, 2, 3, 6)] == pytest.approx([1 + 0.25 * k for k in (0, 1, 2, 5)])
    # The next process reads the curve.
    again = Proposer(config(None))._costs
    assert again.rows(requests) is None
    assert again.curve(requests) == curve
    assert again.rows(2 * requests) == 1


def test_steps_with_drafts_that_seem_ten_times_faster_are_noise(clock):
    clock.cost = lambda rows, batch: 1.0 if rows > batch else 10.0
    curve = measure(clock, 1).proposer._costs.curve(1)
    assert [curve.pass_cost(k) for k in (1, 2, 3, 6)] == [1, 1, 1, 1]


def test_disturbed_steps_do_not_count_and_are_not_kept(clock):
    """Joining requests, prompt chunks and steps with fewer rows than planned are no measurement of k rows."""
    clock.cost = lambda rows, batch: 1.0
    engine = Engine(Proposer(config(None)), MODEL, clock=clock)
    costs = engine.proposer._costs
    engine.running = [Request(prompt, 400) for prompt in prompts(2)]
    engine.step()
    counted = []
    for disturb in (None, "joins", "cut", "pieces", None):
        engine.cut = DRAFTED
        engine.step()
        while costs.rows(2) != 6:
            engine.step()
        if disturb == "joins":
            engine.running[1:] = [Request([9], 300)]
        engine.cut = 1 if disturb == "cut" else DRAFTED
        before = len(costs._seconds[2])
        engine.running[0].draft = [] if disturb == "pieces" else engine.running[0].draft
        engine.step(pieces=engine.running[:1] if disturb == "pieces" else ())
        counted.append(len(costs._seconds[2]) - before)
    assert counted == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("requests", [1, 4])
def test_a_curve_from_steps_that_take_different_times_is_not_kept(clock, requests):
    """Step times vary by a factor of up to 30."""
    rng = random.Random(1)
    clock.cost = lambda rows, batch: rng.random() ** 2 * 30 + 1
    curve = measure(clock, requests).proposer._costs.curve(requests)
    assert curve.pass_cost(1) == 1
    assert Proposer(config(None))._costs.curve(requests) is None


def test_rows_that_seem_expensive_stay_so_if_steps_take_different_times(clock):
    clock.cost = lambda rows, batch: (100 if rows > batch else 1) * random.uniform(1, 9)
    curve = measure(clock, 1).proposer._costs.curve(1)
    assert curve.pass_cost(DRAFTED + 1) > 10


def test_curves_that_cannot_be_saved_are_said_once(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    clock.cost = lambda rows, batch: 1.0
    engine = Engine(Proposer(config(None)), MODEL, clock=clock)
    said = []
    engine.proposer._costs._notice = said.append
    for requests in (1, 2):
        engine.running = [Request(prompt, 400) for prompt in prompts(requests)]
        while engine.proposer._costs.rows(requests) is not None:
            engine.step()
        assert engine.proposer._costs.curve(requests) is not None
    (line,) = said
    assert "the cost curve is not saved" in line


def test_a_damaged_curve_is_measured_again(clock, tmp_path):
    measure(clock, 1)
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")
    proposer = Proposer(config(None))
    with pytest.warns(UserWarning, match="must contain a cost curve.*measuring it again"):
        assert proposer._costs.rows(1) == 1


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(("row", "most"), [(1.0, 1.03), (0.01, 0.7)])
def test_drafts_only_where_they_pay(clock, requests, row, most):
    """Bounds step time relative to plain decoding; if rows cost as much as the first one, few are drafted."""
    clock.cost = lambda rows, batch: 1 + row * (rows - 1)
    measure(clock, requests)
    spent = once = 0.0
    proposer = Proposer(config(None))
    for number in range(4):
        engine = Engine(proposer, MODEL, clock=clock)
        engine.running = [Request(prompt, 100) for prompt in prompts(requests, number)]
        while engine.running:
            before = clock.now
            batch = len(engine.running)
            engine.step()
            # Batches of fewer requests are measured separately.
            if proposer._costs.curve(batch) is not None:
                spent += clock.now - before
                once += engine.emitted / batch * clock.cost(batch, batch)
    assert spent < most * once


def test_many_requests_are_decoded_plainly_where_any_draft_makes_the_step_slow(clock):
    """On a CPU without AMX, 16 plain rows of SmolLM2 took 64 ms, or 260 ms if one request had drafts."""
    clock.cost = lambda rows, batch: 1.0 if rows == batch or batch == 1 else 6.0
    for requests, drafts in ((1, True), (8, False)):
        engine = measure(clock, requests)
        engine.model = MODEL
        rows = 0
        for _ in range(40):
            engine.step()
            rows += engine.rows - requests
        assert (rows > 40) == drafts


def test_memory_is_bounded():
    proposer = Proposer(config("adaptive:rows=64:max_entries=1000:sources=suffix+logits+corpus"))
    engine = Engine(proposer, repetitive_text(VOCABULARY, order=8))
    sizes = []
    for number in range(60):
        engine.running = [Request(prompt, 60) for prompt in prompts(2, number)]
        engine.finish()
        engine.step()
        state = proposer._drafter.state
        sizes.append(
            (
                state.corpus.nodes.nbytes,
                sum(np.asarray(part).nbytes for part in state.tables(False).logits.arrays),
            )
        )
        assert len(proposer._known) <= 2  # those of the last step
    assert sizes[-1] == sizes[len(sizes) // 2]


def test_known_tokens_stand_for_logits():
    scores = known_tokens([4, 9])
    assert [scores.best(0), scores.best(1)] == [4, 9]
    ids, odds = scores.top(range(2), 3)
    assert ids[:, :3].tolist() == [[4, -1, -1], [9, -1, -1]]
    assert odds[:, 0].tolist() == [0, 0]
    assert np.isnan(odds[:, 1:]).all()


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ("0.27.1", False),
        ("0.28.0", True),
        ("0.28.1+cpu", True),
        ("0.32.1.dev7+g1a2b3c4", True),
        ("0.33.0rc1", False),
        ("0.33.0", False),
        ("1.0", False),
    ],
)
def test_versions(monkeypatch, found, right):
    monkeypatch.setattr(lookahead.integrations.vllm, "vllm_version", lambda: found)
    if right:
        Proposer(config())
    else:
        with pytest.raises(
            SettingsError,
            match=rf"^lookahead.integrations.vllm supports vLLM >=.*, and {found} is installed; pip",
        ):
            Proposer(config())


def test_without_vllm(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(lookahead.integrations.vllm, "version", missing)  # vLLM may be installed here
    with pytest.raises(SettingsError, match="vLLM must be installed, and it is not; pip install"):
        real_version()


real_version = lookahead.integrations.vllm.vllm_version


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(stages=2), "needs pipeline_parallel_size=1, got 2"),
        (config("15,5,15"), "must be settings of adaptive, .* got '15,5,15'"),
        (config("adaptive:sources=crystal"), "unknown sources crystal"),
        (
            config("adaptive:head=auto"),
            "must not set head, because vLLM passes no hidden states .*head='auto'",
        ),
    ],
)
def test_what_it_was_not_built_for_is_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        Proposer(given)

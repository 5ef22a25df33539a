"""Drafters used only for comparison (``benchmarks/drafters``): none of them changes the output."""

import numpy as np
import pytest
import torch

import lookahead
from benchmarks.chain_s import variants
from benchmarks.drafters.eagle import Eagle, EagleDrafter, EagleState, Layer
from benchmarks.drafters.medusa import RANKS, Heads, Medusa, MedusaDrafter
from benchmarks.drafters.rest import AHEAD, END, Datastore, Rest
from benchmarks.drafters.static_tree import SHAPES, StaticTree
from lookahead.drafters import Plain
from lookahead.targets import light_head
from lookahead.targets.light_head import row_readers
from lookahead.testing import tiny_model
from test_light_head import weights

PROMPTS = ([5, 6, 7], [9, 1, 44, 9, 1])
#: Vocabulary size and hidden size of the tiny model.
VOCABULARY, HIDDEN = 96, 64


@pytest.fixture(scope="module")
def llm():
    return lookahead.LLM(tiny_model("llama"))


@pytest.fixture(scope="module")
def medusa(tmp_path_factory):
    torch.manual_seed(0)
    heads = Heads(torch.randn(VOCABULARY - 3, HIDDEN), 3)
    accuracy = np.sort(np.random.default_rng(0).random((3, RANKS)))[:, ::-1] / 2
    file = tmp_path_factory.mktemp("medusa") / "heads"
    Medusa(heads, np.arange(3, VOCABULARY), accuracy.copy()).save(file)
    return Medusa.load(file)


def texts(llm, drafter, **options):
    return [llm.generate(prompt, drafter=drafter, max_new_tokens=40, **options) for prompt in PROMPTS]


def check(llm, drafter, rows):
    """Compare with plain decoding, greedy and sampled; return the greedy completions."""
    for options in ({"temperature": 0.8, "seed": 3}, {}):
        plain, drafted = texts(llm, Plain(), **options), texts(llm, drafter, **options)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        assert all(max(text.stats.rows_per_step) <= rows for text in drafted)
    return drafted


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_medusa_is_exact(llm, medusa, rows):
    drafted = check(llm, MedusaDrafter(rows, medusa), rows)
    assert all(max(text.stats.rows_per_step) == rows for text in drafted)


def test_the_tree_of_medusa_has_the_likeliest_nodes(medusa):
    nodes = medusa.tree(16)
    values = [np.prod([medusa.accuracy[depth][rank] for depth, rank in enumerate(node)]) for node in nodes]
    assert len(nodes) == 15
    assert values == sorted(values, reverse=True)
    assert all(node[:-1] in [(), *nodes[:place]] for place, node in enumerate(nodes))


@pytest.mark.parametrize("rows", list(SHAPES))
def test_a_static_tree_is_exact(llm, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(light_head, "measured_cost", lambda head, target: 0.0)
    weights().save(tmp_path / "head")
    drafted = check(llm, StaticTree(SHAPES[rows], str(tmp_path / "head")), rows)
    assert all(max(text.stats.rows_per_step) > rows - 2 for text in drafted)


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_rest_is_exact(llm, rows):
    stored = [text.tokens for text in texts(llm, Plain())]
    drafted = check(llm, Rest(rows, Datastore(stored)), rows)
    assert all(text.stats.compression_ratio > 1.5 for text in drafted)  # found in the datastore


def test_the_datastore_finds_the_longest_suffix():
    generator = np.random.default_rng(0)
    stored = [generator.integers(0, 6, 200).tolist() for _ in range(3)]
    datastore = Datastore(stored)
    text = generator.integers(0, 6, 30).tolist()
    for end in range(1, 30):
        found = datastore.continuations(text[:end])
        for length in range(min(16, end), 0, -1):
            suffix = text[end - length : end]
            expected = [
                (each + [END] * AHEAD)[at + length : at + length + AHEAD]
                for each in stored
                for at in range(len(each) - length + 1)
                if each[at : at + length] == suffix
            ]
            if expected:
                break
        until_end = [row[: row.index(END) if END in row else AHEAD] for row in found.tolist()]
        assert sorted(until_end) == sorted([t for t in row if t != END] for row in expected)
    assert datastore.continuations([7]).shape == (0, AHEAD)


@pytest.fixture(scope="module")
def eagle(llm, tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("eagle") / "layer"
    Eagle(Layer(HIDDEN), np.arange(3, VOCABULARY), *row_readers(llm.model)).save(file)
    return Eagle.load(file, llm.model)


@pytest.mark.parametrize("rows", list(SHAPES))
def test_eagle_is_exact(llm, eagle, rows):
    drafted = check(llm, EagleDrafter(rows, eagle), rows)
    assert all(max(text.stats.rows_per_step) > rows - 2 for text in drafted)


def test_rows_of_a_tree_read_what_they_read_in_a_text(eagle):
    """Chunked reads with cached keys and values match one pass over the whole text."""
    generator = torch.Generator().manual_seed(1)
    states, tokens = torch.randn(1, 6, HIDDEN, generator=generator), [7, 8, 9, 10, 11, 12]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    whole, _ = eagle.layer(states, eagle.embedded(tokens), torch.arange(6), None, mask)
    state = EagleState(eagle, (1,), 7)
    for begin, end in ((0, 4), (4, 6)):
        state._unread = list(zip(tokens[begin:end], states[0, begin:end].numpy(), strict=True))
        last = state._read()
    assert torch.allclose(last, whole[0, -1:], atol=1e-5)


def test_variants_for_vllm_have_the_rows_in_their_names():
    made = variants(5)
    assert {
        made[name].most_rows for name in ("trees of 64 rows, with the window", "chains of up to 63 tokens")
    } == {64}
    assert {made[name].most_rows for name in ("chains of up to 5 tokens", "the same, from text alone")} == {6}

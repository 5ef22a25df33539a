"""Exact mode: the logits, keys and values of any row are bit-identical to those of a one-row step."""

import functools
import gc
import random

import pytest
import torch
from torch import nn

from fake_cuda import TOTAL, FakeCuda
from families import FAMILIES, NO_TREES, tiny_model
from lookahead import LLM
from lookahead.core import OutOfMemory, SettingsError, TokenTree
from lookahead.hf.attention import exact as attention
from lookahead.hf.attention import get, pack_bits
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.exact_mode import ExactTarget
from lookahead.hf.graph_store import GraphStore
from lookahead.hf.paths import make_target
from lookahead.testing import assert_same_as_autoregressive

DTYPES = (torch.bfloat16, torch.float16)
PROMPTS = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9], [3, 4, 3, 4, 3]]
#: Their classes reject attention functions.
REFUSED = ("falcon", "gptj", "stablelm")
TREES = [family for family in FAMILIES if family not in (*REFUSED, *NO_TREES)]
QUICK = ("gemma3", "mixtral")


@functools.cache
def model_of(family, dtype):
    return tiny_model(family, initializer_range=0.1, max_position_embeddings=512).to(dtype)


def text(seed, length):
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(target, slot, tokens, start):
    """Logits of every token from ``start`` on in one-row steps, and all keys and values."""
    target.prefill([(slot, tokens[:start])])
    logits = []
    for token in tokens[start:]:
        logits.append(target.forward([(slot, TokenTree(token))])[0].row(0).clone())
        target.commit([(slot, [0])])
    states = target.cache.read(slot, len(tokens))
    target.release(slot)
    return logits, states


def tree_along(tokens, at, numbers):
    """A tree rooted at ``tokens[at]`` with the text's next tokens at random rows, and the path to them."""
    tree, path = TokenTree(tokens[at]), [0]
    follow = tokens[at + 1 : at + 1 + numbers.choice([0, 1, 3, 7, attention.DEPTH])]
    while len(path) <= len(follow):
        if numbers.random() < 0.5:
            path.append(tree.add(follow[len(path) - 1], path[-1], needs_logits=True))
        else:  # a row off the text
            tree.add(numbers.randrange(3, 96), numbers.randrange(len(tree)), needs_logits=True)
            if max(tree.depths) > attention.DEPTH:
                return tree_along(tokens, at, numbers)
    return tree, path


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_rows_have_the_bits_of_one_row_steps(family):
    """Across page ends and the boundary, in trees of several passes, batches of three, and a larger cache."""
    model, numbers = model_of(family, torch.bfloat16), random.Random(1)
    texts, starts, ends = [text(seed, 320) for seed in range(3)], (240, 10, 110), (320, 70, 150)
    plain = make_target(model, "exact")
    expected = [one_by_one(plain, 0, texts[i][: ends[i]], starts[i]) for i in range(3)]
    target = ExactTarget(model, plain.facts, plain.attention, 600)
    assert plain.cache.capacity == 512 < target.cache.capacity  # only one grew
    target.prefill([(slot, tokens[: starts[slot]]) for slot, tokens in enumerate(texts)])
    at = list(starts)
    passes, depths = 0, set()
    while active := [slot for slot in range(3) if at[slot] < ends[slot]]:
        trees = [tree_along(texts[slot][: ends[slot]], at[slot], numbers) for slot in active]
        found = target.forward([(slot, tree) for slot, (tree, _) in zip(active, trees, strict=True)])
        passes = max(passes, sum(len(tree) for tree, _ in trees) / target.rows)
        for slot, scores, (_, path) in zip(active, found, trees, strict=True):
            for depth, node in enumerate(path):
                assert torch.equal(scores.row(node), expected[slot][0][at[slot] + depth - starts[slot]])
            at[slot] += len(path)
            depths.add(len(path) - 1)
        target.commit([(slot, path) for slot, (_, path) in zip(active, trees, strict=True)])
    assert passes > 2
    assert {0, 1, 3, 7} < depths
    for slot, (_, states) in enumerate(expected):
        for one, other in zip(states, target.cache.read(slot, ends[slot]), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_one_flipped_ancestor_changes_bits():
    target = make_target(model_of("llama", torch.bfloat16), "exact")
    target.prefill([(0, text(0, 40))])
    tree = TokenTree(5)
    tree.add_candidate([6, 7, 8])
    tree.add_candidate([9, 10])
    (right,) = target.forward([(0, tree)])
    tree.ancestors[3] ^= 0b10010  # row 4 instead of row 1, at the same depth
    (wrong,) = target.forward([(0, tree)])
    for row in range(len(tree)):
        assert torch.equal(right.row(row), wrong.row(row)) == (row != 3)


@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "softcap": 5.0}, {"window": 300, "sinks": True}], ids=str
)
def test_it_is_the_attention_of_the_definition(options):
    generator = torch.Generator().manual_seed(0)
    length, rows, heads, kv_heads, size = 700, 5, 6, 2, 16
    query = torch.randn(1, heads, rows, size, generator=generator)
    key, value = torch.randn(2, 1, kv_heads, 1024, size, generator=generator)
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(heads, generator=generator)}
    tree = TokenTree(1)
    tree.add_candidate([2, 3])
    tree.add_candidate([4, 5])
    words, depths = pack_bits([tree.ancestors], rows), torch.tensor([tree.depths])
    expected = get("reference")(query, key, value, [length], words, depths, **options)
    positions = length + depths[0]
    columns = torch.zeros(rows, attention.WINDOW, dtype=torch.long)
    counts = torch.zeros(rows, dtype=torch.long)
    for row, bits in enumerate(tree.ancestors):
        own = [length + other for other in range(rows) if bits >> other & 1]
        seen = [*range(attention.boundary(int(positions[row])), length), *own]
        counts[row] = len(seen)
        columns[row, : len(seen)] = torch.tensor(seen)
    given = (torch.zeros(rows, dtype=torch.long), positions, counts, columns, [(0, 3)])
    found = attention.attend(query, key, value, *given, **options)
    assert (found - expected).abs().max() < 1e-5


def same_text(family, dtype):
    target = make_target(model_of(family, dtype), path="exact")
    assert isinstance(target, ExactTarget)
    prompts = PROMPTS[:1] if family == "llama-dynamic-ntk" else PROMPTS  # one rotary base for a whole pass
    sequences = assert_same_as_autoregressive(target, prompts, "5,4,7", 40)
    assert sum(sequence.stats.accepted for sequence in sequences) > 0


@pytest.mark.parametrize(("family", "dtype"), zip(QUICK, DTYPES, strict=True), ids=str)
def test_exact_mode_gives_the_text_of_plain_decoding(family, dtype):
    same_text(family, dtype)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TREES)
def test_same_text_of_every_family(family, dtype):
    same_text(family, dtype)


def test_the_comparison_fails_when_a_wrong_node_is_accepted(accept_a_wrong_node):
    with pytest.raises(AssertionError, match="differs from plain decoding"):
        same_text("llama", torch.bfloat16)


class DependsOnOthers(nn.Linear):
    """A product whose rows affect each other, as in split sums or routers."""

    def forward(self, rows):
        return super().forward(rows) + rows.float().mean(1, keepdim=True).sum().to(rows.dtype) * 1e-2


class DependsOnPlace(nn.Linear):
    """A product whose last row is computed differently, as in a kernel's remainder."""

    def forward(self, rows):
        out = super().forward(rows)
        return torch.cat([out[:, :-1], out[:, -1:] * 1.01], 1)


@pytest.mark.parametrize("kind", [DependsOnOthers, DependsOnPlace])
def test_a_model_whose_rows_are_not_independent_is_refused(kind):
    model = tiny_model("llama").to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.__class__ = kind
    with pytest.raises(SettingsError, match=r"the exact path is not available.*rows depend on their index"):
        make_target(model, path="exact")


def test_what_is_not_there_is_said():
    with pytest.raises(
        SettingsError, match=r"exact=True is not available.*does not accept attention functions"
    ):
        make_target(tiny_model("stablelm"), exact=True)
    with pytest.raises(SettingsError, match="exact=True is not available on the path 'cuda-graph'"):
        make_target(tiny_model("llama"), path="cuda-graph", exact=True)
    assert make_target(tiny_model("mamba"), exact=True).path == "plain"
    assert (
        make_target(tiny_model("llama"), exact=True).path == "cpu"
    )  # compiled passes are batch-invariant anyway


def test_trees_stay_within_the_depth_that_the_cut_allows():
    target = make_target(model_of("llama", torch.bfloat16), path="exact")
    target.prefill([(0, [3, 4, 5])])
    assert target.depth_limit(0) == attention.DEPTH


def test_the_option_exact_works_on_every_surface():
    import lookahead

    model = tiny_model("gpt-neox", initializer_range=0.1).to(torch.bfloat16)  # has no compiled path
    llm = LLM(model, exact=True)
    drafted = llm.generate(PROMPTS, max_new_tokens=30, drafter="lookahead", temperature=1.0, seed=3)
    plain = [
        llm.generate(p, max_new_tokens=30, drafter="off", temperature=1.0, seed=3 + i)
        for i, p in enumerate(PROMPTS)
    ]
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert {one.stats.path for one in drafted} == {"exact"}
    assert drafted[0].stats.guarantee == "bit-equal, as checked at load"
    ids, stats = torch.tensor(PROMPTS[:1]), []
    options = {"max_new_tokens": 30, "custom_generate": lookahead.generate, "exact": True, "stats": stats}
    ours = model.generate(ids, **options)
    as_dict = model.generate(ids, return_dict_in_generate=True, **options)
    assert ours.tolist() == as_dict.sequences.tolist()
    assert as_dict.past_key_values.get_seq_length() == ours.shape[1] - 1
    assert [one.path for one in stats] == ["exact", "exact"]
    with pytest.raises(SettingsError, match="exact=True is not available"):
        LLM(tiny_model("stablelm"), exact=True)


# ---- captured, on a simulated device


@pytest.fixture
def device(monkeypatch):
    return FakeCuda(monkeypatch)


def test_captured_passes_have_the_bits_of_one_row_steps_and_of_passes_that_are_not(device):
    """Across B(p) at page ends, for one slot and two, with graphs for all steps."""
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=600).to(torch.bfloat16)
    target, numbers = make_target(model, path="exact"), random.Random(2)
    assert target.attention.captured
    assert "in captured passes of 16 rows" in target.reason
    assert device.mode == 0
    texts, starts, end = [text(seed, 310) for seed in range(2)], (270, 20), 20
    plain = ExactTarget(model, target.facts, TreeAttention(model, attention.attend))
    expected = [one_by_one(plain, 0, texts[i][: starts[i] + end], starts[i])[0] for i in range(2)]
    alone = one_by_one(target, 0, texts[0][: starts[0] + end], starts[0])[0]
    assert all(torch.equal(a, b) for a, b in zip(alone, expected[0], strict=True))
    target.prefill([(slot, tokens[: starts[slot]]) for slot, tokens in enumerate(texts)])
    at = list(starts)
    before = len(device.log)
    while active := [slot for slot in range(2) if at[slot] < starts[slot] + end]:
        trees = [tree_along(texts[slot][: starts[slot] + end], at[slot], numbers) for slot in active]
        found = target.forward([(slot, tree) for slot, (tree, _) in zip(active, trees, strict=True)])
        for slot, scores, (_, path) in zip(active, found, trees, strict=True):
            for depth, node in enumerate(path):
                assert torch.equal(scores.row(node), expected[slot][at[slot] + depth - starts[slot]])
            at[slot] += len(path)
        target.commit([(slot, path) for slot, (_, path) in zip(active, trees, strict=True)])
    assert set(target.graphs.passes) <= {(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)}  # slots, pages of each
    assert sum(what == "replay" for what, *_ in device.log[before:]) > 10


def test_captured_texts_are_those_of_plain_decoding(device):
    model = tiny_model("gemma2", initializer_range=0.1).to(torch.float16)
    target = make_target(model, path="exact")
    sequences = assert_same_as_autoregressive(target, PROMPTS, "5,4,7", 40)
    assert sum(sequence.stats.accepted for sequence in sequences) > 0
    store = target.graphs
    del target
    gc.collect()
    assert make_target(model, path="exact").graphs is store  # graphs are reused


@pytest.mark.parametrize("enough", [True, False])
def test_without_memory_for_a_graph_the_others_make_room(enough, device, monkeypatch):
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=600).to(torch.bfloat16)
    target = make_target(model, path="exact")
    tokens = text(1, 280)
    one_by_one(target, 0, tokens[:30], 20)
    assert set(target.graphs.passes) == {(1, 0)}
    honest = GraphStore.drop_passes

    def drop(self, kept=None):
        honest(self, kept)
        device.cost = 1 if enough else device.cost

    monkeypatch.setattr(GraphStore, "drop_passes", drop)
    device.cost = TOTAL + 1
    if not enough:
        with pytest.raises(OutOfMemory, match="did not fit in memory"):
            one_by_one(target, 0, tokens, 270)
        return
    found, _ = one_by_one(target, 0, tokens, 270)
    expected, _ = one_by_one(
        ExactTarget(model, target.facts, TreeAttention(model, attention.attend)), 0, tokens, 270
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (1, 0) not in target.graphs.passes


def test_what_cannot_be_captured_runs_uncaptured_and_says_so(device, monkeypatch):
    honest = ExactTarget.evaluate

    def waits(self, *given):
        device.wait()
        return honest(self, *given)

    monkeypatch.setattr(ExactTarget, "evaluate", waits)
    target = make_target(tiny_model("llama").to(torch.bfloat16), path="exact")
    assert not target.attention.captured
    assert "passes are not captured" in target.reason
    assert f"a pass waits for the device in {__file__}" in target.reason
    hooked = tiny_model("llama").to(torch.bfloat16)
    hooked.model.layers[0].register_forward_hook(lambda *given: None)
    target = make_target(hooked, path="exact")
    assert not target.attention.captured
    assert "has hooks" in target.reason

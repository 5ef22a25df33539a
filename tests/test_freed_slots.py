"""A sequence that ends with NaN affects neither later sequences in its slot nor those running alongside."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fake_cuda import FakeCuda
from families import tiny_model
from lookahead.core import DraftState, Request, TokenTree, decode
from lookahead.cpu.execution_plan import KEY_BLOCK
from lookahead.drafters import Plain
from lookahead.equivalence import trial_tree
from lookahead.hf import attention
from lookahead.hf.attention import exact
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.batch_rows import BatchRowsTarget
from lookahead.hf.cuda_graphs import CudaGraphTarget
from lookahead.hf.exact_mode import ExactTarget
from lookahead.hf.paths import make_target, probe
from lookahead.hf.target import PlainTarget
from lookahead.testing import run

LONG, OTHER = [5 + i % 40 for i in range(300)], [11 + i % 30 for i in range(290)]
SHORT = [7 + i % 50 for i in range(40)]  # long enough that exact mode reads a page of it
EXACT = {"exact": False, "captured-exact": True}
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not attention.has_triton(), reason="no triton"))


#: Triton's interpreter runs a program for each layer and key head, so its model has one of each.
ONE_OF_EACH = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@functools.cache
def model_with(**sizes):
    return tiny_model("llama", initializer_range=0.1, max_position_embeddings=1024, **sizes)


@pytest.fixture
def model(request):
    return model_with(**ONE_OF_EACH if request.node.callspec.params["path"] == "triton" else {})


def on_path(model, path):
    facts = probe(model).facts
    if path in EXACT:
        return ExactTarget(model, facts, TreeAttention(model, exact.attend, captured=EXACT[path]))
    if path in attention.BACKENDS:
        return CudaGraphTarget(model, facts, TreeAttention(model, attention.get(path)), 64)
    return make_target(model, path=path)


def plant(target, slot, begin=0):
    """Overwrite all keys and values written to the slot with NaN, from column ``begin`` on."""
    if target.path != "cpu":
        for storage in target.cache._storage.values():
            numbers = storage[:, slot, :, begin:]
            numbers[numbers != 0] = torch.nan
        return
    array, heads = torch.from_numpy(target.cache.storage[slot]).view(torch.float32), target.cache.key_heads
    layers, _, capacity, size = array.shape
    values = array[:, heads:, begin:]
    values[values != 0] = torch.nan
    keys = array[:, :heads].view(layers, heads, capacity // KEY_BLOCK, size, KEY_BLOCK)  # interleaved
    for column in range(begin, capacity):
        numbers = keys[:, :, column // KEY_BLOCK, :, column % KEY_BLOCK]
        numbers[numbers != 0] = torch.nan


def evaluate(target, trees):
    """The logits of all rows of one pass."""
    scores = target.forward(trees)
    rows = [
        torch.as_tensor(score.row(node))
        for score, (_, tree) in zip(scores, trees, strict=True)
        for node in range(len(tree))
    ]
    return torch.stack(rows)


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max() < 1e-4


PATHS = ("cpu", "transformers", *EXACT, "sdpa", "reference", TRITON)


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """A simulated device for the path that always captures."""
    if request.node.callspec.params["path"] == "captured-exact":
        return FakeCuda(monkeypatch)


@pytest.mark.parametrize("freed", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_nan_of_a_released_slot_reaches_no_later_sequence(model, path, freed):
    tree, other = trial_tree(3, 96), trial_tree(4, 96)
    used, fresh, running = on_path(model, path), on_path(model, path), 1 - freed
    used.prefill([(running, OTHER), (freed, LONG)])
    evaluate(used, [(running, other), (freed, tree)])
    used.commit([(running, [0, 1])])
    plant(used, freed)
    used.release(freed)
    used.prefill([(freed, SHORT)])
    fresh.prefill([(running, OTHER), (freed, SHORT)])
    evaluate(fresh, [(running, other)])
    fresh.commit([(running, [0, 1])])
    for trees in ([(0, tree), (1, other)], [(freed, TokenTree(5))]):
        assert_close(evaluate(used, trees), evaluate(fresh, trees))


@pytest.mark.parametrize("path", ["plain", "batch-rows"])
def test_nan_in_the_state_of_a_released_slot_reaches_no_later_sequence(path):
    """These paths have a cache of transformers for each slot."""
    model = tiny_model("lfm2", initializer_range=0.1, max_position_embeddings=1024)
    used, fresh = (BatchRowsTarget(model) if path == "batch-rows" else PlainTarget(model) for _ in range(2))
    used.prefill([(0, LONG), (1, OTHER)])
    planted = 0
    for state in tree_leaves([vars(layer) for layer in used._caches[0].layers]):
        if torch.is_tensor(state) and state.is_floating_point():
            planted += state.fill_(torch.nan).numel()
    assert planted
    tree = trial_tree(3, 96) if path == "batch-rows" else TokenTree(3)
    assert evaluate(used, [(0, tree)]).isnan().all()
    used.release(0)
    used.prefill([(0, SHORT)])
    fresh.prefill([(0, SHORT), (1, OTHER)])
    trees = [(0, tree), (1, tree)]
    assert torch.equal(evaluate(used, trees), evaluate(fresh, trees))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by triton's interpreter
@pytest.mark.parametrize("path", PATHS)
def test_nan_of_a_running_sequence_reaches_no_other(model, path):
    tree, other = trial_tree(3, 96), trial_tree(4, 96)
    target, alone = on_path(model, path), on_path(model, path)
    target.prefill([(0, OTHER), (1, LONG)])
    alone.prefill([(0, OTHER)])
    plant(target, 1)
    together = evaluate(target, [(0, tree), (1, other)])
    assert_close(together[: len(tree)], evaluate(alone, [(0, tree)]))
    assert together[len(tree) :].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_nan_of_rejected_rows_ends_with_their_step(model, path):
    """The next step has fewer rows, so it overwrites only some, and runs alongside a longer sequence."""
    wide, narrow = TokenTree(9), trial_tree(3, 96)
    for first in range(20, 30):
        wide.add_candidate([first, 3, 4])
    ours, theirs = on_path(model, path), on_path(model, path)
    for target, trees in ((ours, [(0, wide)]), (theirs, [(0, TokenTree(wide.tokens[0]))])):
        target.prefill([(0, SHORT), (1, LONG)])
        evaluate(target, trees)
        target.commit([(0, [0])])
    plant(ours, 0, len(SHORT) + 1)
    trees = [(0, narrow), (1, narrow)]
    assert_close(evaluate(ours, trees), evaluate(theirs, trees))


@pytest.mark.filterwarnings("ignore:the logits of a step were NaN with drafts")
@pytest.mark.parametrize("path", ["transformers", *EXACT, "sdpa"])
def test_a_drafted_token_that_gives_nan_changes_no_text(path):
    """Masked rows of the same step have a weight of 0, and 0 times NaN is NaN."""
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=1024)
    target = on_path(model, path)
    prompt, text = [5, 9, 14, 5, 9, 14, 5, 9], []
    for update in decode(target, [Request(prompt, Plain(), 30)]):
        text += update.tokens
    bad = next(token for token in range(95, 2, -1) if token not in [*prompt, *text])
    model.model.embed_tokens.weight.data[bad] = torch.nan
    (plain,) = run(target, [Request(prompt, Plain(), 30)])
    drafter = Predicting([*text[:10], bad, bad, *text[10:20]])
    (ours,) = run(target, [Request(prompt, drafter, 30)])
    assert ours.tokens == plain.tokens == text


class Predicting(Plain):
    """Drafts pieces of a text, right or wrong."""

    def __init__(self, text):
        self.text = text

    def start(self, sequence):
        return PredictingState(self.text, sequence.first)


class PredictingState(DraftState):
    def __init__(self, text, last):
        self.text, self.last = text, last

    def draft(self, max_depth, max_rows=1, batch=1):
        tree = TokenTree(self.last)
        for at in range(0, len(self.text), 4):
            if max_depth > 4 and max_rows > 50:
                tree.add_candidate(self.text[at : at + 4])
        return tree

    def observe(self, tree, scores, path, tokens):
        self.last = tokens[-1]

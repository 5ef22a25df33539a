"""The step in buckets of rows over a static cache: the same text; capture itself needs a GPU."""

import pytest
import torch

from lookahead.attention.register import enable
from lookahead.core import SettingsError, TokenTree
from lookahead.targets.graphed import BUCKETS, GraphedTarget, bucket_of, buffer_size, fill
from lookahead.targets.probe import make_target
from lookahead.testing import assert_same_as_autoregressive, tiny_model

PROMPTS = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", initializer_range=0.1)
    model = model.to("cuda") if torch.cuda.is_available() else model
    enable(model)
    return model


def test_buckets():
    assert [bucket_of(rows) for rows in (1, 2, 3, 9, 64, 65, 256, 257)] == [1, 2, 4, 16, 64, 80, 256, None]
    # Beyond the small ones at most 8 rows in 40 are padding.
    for rows in range(16, 257):
        assert (bucket_of(rows) - rows) <= max(8, rows // 4)
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_a_step_in_one_buffer():
    tree = TokenTree(7)
    tree.add_candidate([8, 9])
    tree.add_candidate([5])
    buffer = torch.full((buffer_size(8),), -1, dtype=torch.int32)
    fill(buffer, tree, 33, 8)
    assert buffer.tolist() == [
        33,
        *[7, 8, 9, 5, 7, 7, 7, 7],
        *[0, 1, 2, 1, 0, 0, 0, 0],
        *[0b1, 0b11, 0b111, 0b1001, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "several"])
def test_same_text(model, prompts):
    facts = make_target(model, path="transformers").facts
    target = GraphedTarget(model, facts, capacity=16)  # so that it grows several times
    generations = assert_same_as_autoregressive(target, prompts, "lookahead", (5, 4, 7), 60)
    assert sum(g.stats.accepted for g in generations) > 0
    assert target.cache.capacity >= 64
    assert {bucket for _, bucket in target.passes} <= set(BUCKETS)
    assert target.passes


def test_same_logits_as_the_ordinary_pass(model):
    ordinary = make_target(model, path="transformers")
    target = GraphedTarget(model, ordinary.facts)
    tree = TokenTree(3)
    tree.add_candidate([4, 5, 6])
    tree.add_candidate([4, 9])
    for step in range(3):
        both = []
        for one in (ordinary, target):
            if not step:
                one.prefill([(0, PROMPTS[0])])
            (scores,) = one.forward([(0, tree)])
            both.append(torch.stack([scores.row(node) for node in range(len(tree))]))
            one.commit([(0, [0, 1, 4])])
        assert (both[0] - both[1]).abs().max() < 1e-4


def test_a_step_that_cannot_be_captured_goes_the_ordinary_way(model, monkeypatch):
    from lookahead.targets import graphed

    def fails(self, tree, length):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed._Pass, "run", fails)
    target = GraphedTarget(model, make_target(model, path="transformers").facts)
    target.prefill([(0, PROMPTS[0])])
    with pytest.warns(RuntimeWarning, match="cannot be captured .*going on without graphs"):
        target.forward([(0, TokenTree(3))])
    target.commit([(0, [0])])
    target.forward([(0, TokenTree(4))])  # a second warning would be an error here


def test_it_needs_the_tree_attention():
    with pytest.raises(SettingsError, match="enable"):
        GraphedTarget(tiny_model("llama"))

"""How rows are split among ranks and sent between them, without starting processes."""

import importlib
import random
import re
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead import Lookahead
from lookahead.core import OutOfMemory, TokenTree
from lookahead.drafters import Window
from lookahead.parallel.executor import RankExecutor, below
from lookahead.parallel.shard import _branches, shard
from lookahead.parallel.wire import FRAME, Link
from lookahead.testing import FakeTarget


def window_tree(width=15, ngram_size=5, candidates=15, seed=0):
    numbers = random.Random(seed)

    def fill():
        return numbers.randrange(50_000)

    window = Window(width, ngram_size, fill)
    for _ in range(ngram_size - 2):
        window.advance(1, [fill() for _ in range(window.columns)], frozenset())
    tree = TokenTree(1)
    window.add_to(tree)
    for _ in range(candidates):
        tree.add_candidate([fill() for _ in range(ngram_size - 1)])
    return tree


@st.composite
def trees(draw):
    tree = TokenTree(draw(st.integers(0, 5)))
    for _ in range(draw(st.integers(0, 40))):
        tree.add(draw(st.integers(0, 5)), draw(st.integers(0, len(tree) - 1)), draw(st.booleans()))
    return tree


def closure(tree, nodes):
    """The smallest parent-closed set of rows that contains ``nodes``, in row order."""
    bits = reduce(lambda seen, node: seen | tree.ancestors[node], nodes, 1)
    return [row for row in range(len(tree)) if bits >> row & 1]


@given(trees(), st.integers(1, 5), st.data())
def test_shards_are_parent_closed_and_every_read_row_has_one_owner(tree, ranks, data):
    extra = data.draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    cut = shard(tree, ranks, extra)
    for rows in cut.rows:
        assert rows == closure(tree, rows)  # parent-closed, in row order, with the root
        tree.subtree(rows)
    for node, owner in enumerate(cut.owner):
        assert (owner >= 0) == tree.needs_logits[node]
        assert owner < 0 or node in cut.rows[owner]
    assert cut.owner[0] == 0


@given(trees(), st.integers(2, 4))
def test_no_cut_of_the_same_order_is_narrower(tree, ranks):
    """Reference implementation: try every way to cut the branches in their order."""
    from itertools import combinations_with_replacement

    branches = _branches(tree)
    best = min(
        max(
            len(closure(tree, branches[a:b])) for a, b in zip((0, *cuts), (*cuts, len(branches)), strict=True)
        )
        for cuts in combinations_with_replacement(range(len(branches) + 1), ranks - 1)
    )
    assert shard(tree, ranks).widest == best


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("triple", [(15, 5, 15), (15, 5, 0), (7, 3, 2), (60, 5, 60)])
def test_shards_of_the_papers_tree_are_even(triple, ranks):
    tree = window_tree(*triple)
    assert len(tree) == Lookahead(*triple).max_step_rows
    widths = [len(rows) for rows in shard(tree, ranks).rows]
    # Branches are not split, so the widest may exceed the mean by about one branch and its chain.
    chain = triple[0] + triple[1]
    assert max(widths) <= sum(widths) / ranks + chain
    assert max(widths) < len(tree)
    # If balanced by columns, the last shard would get all of level 0.
    assert max(widths) <= min(widths) + chain


def test_more_ranks_than_branches_leaves_ranks_with_the_root():
    tree = TokenTree(3)
    tree.add_candidate([4, 5])
    cut = shard(tree, 4)
    assert sorted(map(len, cut.rows)) == [1, 1, 1, 3]
    assert shard(TokenTree(3), 4).rows == [[0]] * 4


def test_a_rank_that_lacks_rows_gets_fewer():
    tree = window_tree(1, 2, 40)
    even = shard(tree, 2)
    cut = shard(tree, 2, [10, 0])
    assert abs(len(even.rows[0]) - len(even.rows[1])) <= 2
    assert 8 <= len(cut.rows[1]) - len(cut.rows[0]) <= 12


def test_missing_tokens_stand_above_the_root():
    part = TokenTree(7)
    part.add_candidate([8, 9])
    tree = below([5, 6], part)
    assert tree.tokens == [5, 6, 7, 8, 9]
    assert tree.parents == [-1, 0, 1, 2, 3]
    assert tree.depths == [0, 1, 2, 3, 4]
    assert tree.needs_logits == [False, False, True, True, True]


@pytest.mark.parametrize("limit", [100, 11, 10, 9, 8])
def test_missing_rows_are_recomputed_in_passes_of_their_own_where_depth_is_short(limit):
    """An executor that lacked rows scores like one that never did, also at the model's last positions."""
    executor, whole = RankExecutor(FakeTarget(max_positions=limit)), FakeTarget(max_positions=limit)
    prompt, path = [1, 2, 3, 4], [9, 5, 6]
    executor.prefill([(0, prompt)])
    whole.prefill([(0, prompt)])
    executor.forward([(0, TokenTree(9))])
    executor.commit([(0, path)])
    tree = TokenTree(9)
    tree.add_candidate(path[1:])
    whole.forward([(0, tree)])
    whole.commit([(0, [0, 1, 2])])
    assert executor.depth_limit(0) == whole.depth_limit(0)
    tree = TokenTree(4)
    tree.add_candidate(range(10, 10 + whole.depth_limit(0)))
    (expected,) = whole.forward([(0, tree)])
    (scores,) = executor.forward([(0, tree)])
    rows = range(len(tree))
    above = len(executor.missing[0])
    assert [scores.best(above + row) for row in rows] == [expected.best(row) for row in rows]
    executor.commit([(0, [4])])
    whole.commit([(0, [0])])
    assert executor.target.committed == whole.committed


def test_a_rank_keeps_the_accepted_rows_of_its_shard_and_recomputes_the_rest():
    executor = RankExecutor(FakeTarget())
    executor.prefill([(0, [1, 2])])
    tree = TokenTree(9)
    tree.add_candidate([5, 6, 7])
    tree.add_candidate([5, 8])
    executor.forward([(0, tree)])
    executor.commit([(0, [9, 5, 6, 3])])
    assert executor.target.committed[0] == [1, 2, 9, 5, 6]
    assert executor.missing[0] == [3]
    executor.forward([(0, TokenTree(4))])
    executor.commit([(0, [4])])
    assert executor.target.committed[0] == [1, 2, 9, 5, 6, 3, 4]
    assert executor.missing[0] == []


def test_ranks_agree_on_tokens_where_one_has_no_memory_for_a_prompt():
    class Full(FakeTarget):
        def prefill(self, prompts):
            raise OutOfMemory("a prompt does not fit")

    full, other = RankExecutor(Full()), RankExecutor(FakeTarget())
    with pytest.raises(OutOfMemory):
        full.prefill([(0, [1, 2])])
    other.prefill([(0, [1, 2])])
    assert full.checksum == other.checksum != 1


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_token_ids_of_numpy_have_the_checksum_of_pythons(kind):
    of_numpy, of_python = RankExecutor(FakeTarget()), RankExecutor(FakeTarget())
    prompt = list(range(1, 20))
    of_numpy.prefill([(0, list(map(kind, prompt)))])
    of_python.prefill([(0, prompt)])
    assert of_numpy.checksum == of_python.checksum


class Wire:
    """A stand-in for torch.distributed: what one link sends, the other receives."""

    def __init__(self):
        self.tensors = []

    def isend(self, tensor, peer, group):
        self.tensors.append(tensor)
        return self

    def irecv(self, tensor, peer, group):
        sent = self.tensors.pop(0)
        assert sent.shape == tensor.shape
        tensor.copy_(sent)
        return self

    def wait(self, timeout):
        pass


@given(
    st.lists(st.lists(st.integers(-1, 1 << 62))),
    st.text(max_size=300),
    st.lists(st.floats(allow_nan=False)),
    st.sampled_from([0, FRAME - 200, 3 * FRAME]),
)
@pytest.mark.filterwarnings("ignore")
def test_a_message_survives_the_wire(lists, text, floats, more):
    fields = {"lists": lists, "text": text, "floats": floats, "more": "x" * more}
    link = Link(1, None, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookahead.parallel.wire.dist", Wire())
        link.send("answer", **fields)
        assert link.receive() == {"kind": "answer", **fields}
    assert link.exchanged >= 2 * FRAME


def test_token_ids_of_another_library_travel_too():
    import numpy as np

    link = Link(1, None, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookahead.parallel.wire.dist", Wire())
        link.send("forward", trees=[(0, [np.int64(5), 7], [-1, 0], [np.bool_(True), False])])
        assert link.receive()["trees"] == [[0, [5, 7], [-1, 0], [1, False]]]


def test_the_shards_drawn_in_the_docstring():
    tree = TokenTree(1)
    names, parents = ["r", "a1", "a2", "b0", "b1", "b2", "c0", "c1"], [0, 1, 0, 1, 2]
    for number, parent in enumerate(parents):
        tree.add(10 + number, parent, needs_logits=number >= 2)
    tree.add_candidate([20, 21])
    shards = shard(tree, 2)
    lines = importlib.import_module("lookahead.parallel.shard").__doc__
    for rank, rows in enumerate(shards.rows):
        drawn = re.search(rf"rank {rank} \((\d) rows\): ((?:\w+ ?)+)", lines)
        assert int(drawn[1]) == len(rows)
        assert set(drawn[2].split()) == {names[row] for row in rows}

"""TokenTree: trie, mask and subtrees; and the window's shape compared with the paper's figure."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.core import TokenTree
from lookahead.drafters import Window


def picture(tree):
    return ["".join("x" if seen else "." for seen in row) for row in tree.mask()]


def test_mask_of_a_small_tree_is_this_picture():
    tree = TokenTree(7)
    tree.add_candidate([1, 2])
    tree.add_candidate([1, 3])
    tree.add_candidate([4])
    assert tree.tokens == [7, 1, 2, 3, 4]
    assert tree.depths == [0, 1, 2, 2, 1]
    assert repr(tree) == "TokenTree(rows=5, depth=2)"
    assert picture(tree) == [
        "x....",
        "xx...",
        "xxx..",
        "xx.x.",
        "x...x",
    ]


def test_a_common_prefix_is_one_row_and_becomes_read():
    tree = TokenTree(0)
    window_row = tree.add(5, 0)
    assert not tree.needs_logits[window_row]
    tree.add_candidate([5, 6])
    assert tree.needs_logits == [True, True, True]
    assert tree.child(0, 5) == window_row
    assert tree.child(0, 6) is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12), st.data())
def test_a_subtree_keeps_every_path(candidates, data):
    tree = TokenTree(9)
    for candidate in candidates:
        tree.add_candidate(candidate)
    some = data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=5))
    bits = functools.reduce(lambda seen, node: seen | tree.ancestors[node], some, 1)
    rows = [row for row in range(len(tree)) if bits >> row & 1]  # parent-closed
    part = tree.subtree(rows)
    assert [part.path_tokens(i) for i in range(len(part))] == [tree.path_tokens(row) for row in rows]
    for i, row in enumerate(rows):
        for j, other in enumerate(rows):
            assert part.mask()[i][j] == tree.mask()[row][other]


def test_subtree_refuses_an_orphan():
    tree = TokenTree(0)
    last = tree.add_candidate([1, 2])
    with pytest.raises(ValueError, match="parent-closed"):
        tree.subtree([0, last])
    for rows in ([], [last]):
        with pytest.raises(ValueError, match="must start with the root"):
            tree.subtree(rows)


def dense_window_mask(width, levels):
    """The mask of the paper's Figure 2(b), built without a tree: rows level by level, root first."""
    rows = [(0, i) for i in range(width)] + [(lv, i) for lv in range(1, levels) for i in range(width)]
    mask = []
    for level, column in rows:
        seen = []
        for other_level, other_column in rows:
            on_chain = other_level == 0 and other_column <= column
            on_column = other_column == column and other_level <= level
            seen.append(on_chain if level == 0 else (on_chain or on_column))
        mask.append(seen)
    return mask


def test_window_mask_equals_the_dense_one():
    for width in range(1, 8):
        for ngram_size in range(2, 7):
            check_window_mask(width, ngram_size)


def check_window_mask(width, ngram_size):
    fresh = iter(range(1000, 10_000))
    window = Window(width, ngram_size, lambda: next(fresh))
    root = 1
    for _ in range(ngram_size - 2):
        window.add_to(TokenTree(root))
        window.advance(root, [next(fresh) for _ in window.newest_nodes()], frozenset())
    assert window.full
    tree = TokenTree(root)
    window.add_to(tree)
    assert tree.mask() == dense_window_mask(width, ngram_size - 1)
    expected = [i for i in range(width)] + [lv + i for lv in range(1, ngram_size - 1) for i in range(width)]
    assert tree.depths == expected
    assert [tree.depths[n] for n in window.newest_nodes()] == [ngram_size - 2 + i for i in range(width)]

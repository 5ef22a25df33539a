"""The comparison of a target with a reference, without torch: right targets pass, and wrong ones fail."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from lookahead.core import TokenTree
from lookahead.core.fake_target import FakeTarget
from lookahead.equivalence import Reference, Trial, bit_equal_rows, compare, single_rows
from lookahead.llamacpp import check as llamacpp

VOCABULARY = 32


class OfThePrefix(FakeTarget):
    """A target whose rows depend on the whole prefix."""

    def __init__(self):
        super().__init__(VOCABULARY, lambda prefix: hash(tuple(prefix)) % VOCABULARY)


class WrongCommit(OfThePrefix):
    def commit(self, paths):
        super().commit([(slot, [0, 1, 2, 3][: len(path)]) for slot, path in paths])


class WrongAncestor(OfThePrefix):
    def forward(self, trees):
        wrong = copy.deepcopy(trees)
        for _, tree in wrong:
            if len(tree) == 8:
                tree.ancestors[5] ^= 0b10010  # row 1 instead of row 4, at the same depth
                tree.parents[5] = 1
        return super().forward(wrong)


def alone(trial):
    """Each row evaluated after its own prompt."""
    rows = [single_rows(OfThePrefix(), text, ())[0] for text in trial.texts()]
    return Reference(np.stack(rows))


@pytest.mark.parametrize(
    ("target", "ok"), [(OfThePrefix, True), (WrongCommit, False), (WrongAncestor, False)]
)
def test_only_a_right_target_passes(target, ok):
    trials = [Trial(VOCABULARY, number, positions=False) for number in range(3)]
    found = compare(target, trials, alone)
    assert found.ok == ok, found.reason
    assert (found.difference == 0) == ok


def test_a_reference_that_is_not_accurate_allows_a_multiple_of_its_error():
    class Rounded(OfThePrefix):
        def forward(self, trees):
            return [Noisy(scores) for scores in super().forward(trees)]

    class Noisy(SimpleNamespace):
        def __init__(self, scores):
            self.row = lambda node: (
                np.array(scores.row(node)) + 1e-2 * np.random.default_rng(node).normal(size=VOCABULARY)
            )

    def rounded(error):
        def reference(trial):
            rows = alone(trial).rows
            return Reference(rows, np.full(len(rows), error))

        return reference

    trials = [Trial(VOCABULARY, positions=False)]
    assert not compare(Rounded, trials, alone).ok
    assert compare(Rounded, trials, rounded(1.5e-2)).ok
    assert not compare(Rounded, trials, rounded(1e-3)).ok


def test_rows_are_compared_with_single_row_steps():
    assert bit_equal_rows(OfThePrefix()) == (8, 8)
    assert bit_equal_rows(WrongAncestor())[0] == 7


@pytest.mark.parametrize(
    ("target", "ok"), [(OfThePrefix, True), (WrongCommit, False), (WrongAncestor, False)]
)
def test_llamacpp_is_compared_with_its_causal_passes(target, ok, monkeypatch):
    def decode(tokens, positions, sequences, wanted):
        rows = []
        for index in np.flatnonzero(wanted):
            prefix = [
                token
                for token, position, ids in zip(tokens, positions, sequences, strict=True)
                if ids == sequences[index] and position <= positions[index]
            ]
            rows += single_rows(OfThePrefix(), prefix, ())
        return np.stack(rows)

    weights = SimpleNamespace(trees=True, vocabulary=VOCABULARY, window=0, positions=0)
    lease = SimpleNamespace(context=SimpleNamespace(cells=1000, decode=decode), end=lambda: None)
    contexts = SimpleNamespace(weights=weights, lease=lambda: lease)
    monkeypatch.setattr(llamacpp, "LlamaCppTarget", lambda contexts: target())
    found, why, _ = llamacpp.check(contexts)
    assert found == ok, why
    assert "a wrong ancestor shows as" in why


def test_the_control_tree_differs_from_the_tree_in_three_rows():
    trial = Trial(VOCABULARY)
    tree, control = trial.trees[0][0], trial.control_tree()
    assert isinstance(control, TokenTree)
    assert control.tokens == tree.tokens
    changed = [
        row
        for row in range(len(tree))
        if (tree.ancestors[row], tree.depths[row]) != (control.ancestors[row], control.depths[row])
    ]
    assert changed == [3, 5, 7]

"""A static token tree like SpecInfer's (Miao et al., 2024, arXiv 2305.09781), drafted by a small network.

The shape of the tree is fixed: each node at depth d has the draft model's ``widths[d]`` best tokens as children. Here
the draft model is the light head, so the comparison with adaptive and the same head shows how much the calibrated
tree and the other sources add. SpecInfer's own draft models are language models of 68M to 125M parameters; none of
that size exists for SmolLM2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, Target, TokenTree
from lookahead.drafters.adaptive.heads import head_of
from lookahead.drafters.notice import notice

#: Rows of a step, including the root -> children of each node, by depth. The shape for 8 rows fills 7.
SHAPES = {4: (1, 1, 1), 8: (2, 1, 1), 16: (5, 1, 1), 64: (9, 2, 2)}
#: Largest number of rows in one call of the head.
CALL = 16


@dataclass(frozen=True)
class StaticTree(Drafter):
    """Drafts a tree of fixed shape.

    Attributes:
        widths: children of each node, by depth.
        head: path of the light head, or "auto".
    """

    widths: tuple[int, ...]
    head: str = "auto"
    loaded: Any = field(default=None, compare=False, repr=False)

    name = "static-tree"

    def prepare(self, model: Any, target: Target) -> StaticTree:
        return replace(self, loaded=head_of(model, target, self.head, notice))

    def start(self, sequence: Start) -> DraftState:
        return StaticTreeState(self.widths, sequence.first, self.loaded)


class StaticTreeState(DraftState):
    """The last token and the hidden state from which it was chosen."""

    def __init__(self, widths: tuple[int, ...], first: int, head: Any) -> None:
        self._widths = widths
        self._head = head
        self._last = first
        self._state: Any = None

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = TokenTree(self._last)
        tree.needs_hidden = True
        level = [] if self._state is None else [(0, self._state)]
        for width in self._widths[:max_depth]:
            following = []
            for begin in range(0, len(level), CALL):
                some = level[begin : begin + CALL]
                states = np.stack([state for _, state in some])
                guessed, ids, _ = self._head.guess(states, [tree.tokens[node] for node, _ in some], width)
                for (node, _), state, best in zip(some, guessed, ids.tolist(), strict=True):
                    for token in best:
                        if len(tree) < max_rows:
                            following.append((tree.add(token, node, needs_logits=True), state))
            level = following
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
        self._state = scores.hidden(path[-1])

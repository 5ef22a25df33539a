"""A static token tree, as SpecInfer drafts it (Miao et al., 2024, arXiv 2305.09781), from a small network.

The shape of the tree is fixed: level d gives each of its nodes the ``widths[d]`` best tokens of the draft model. Here
the draft model is the light head, so the difference from adaptive with this head is what the calibrated tree and the
other sources bring. SpecInfer's own draft models are language models of 68M to 125M parameters; SmolLM2 has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree

#: The shape for a number of rows, of which 3, 6, 15 and 63 are below the root.
SHAPES = {4: (1, 1, 1), 8: (2, 1, 1), 16: (5, 1, 1), 64: (9, 2, 2)}
#: The most rows of a call of the head.
CALL = 16


@dataclass(frozen=True)
class StaticTree(Drafter):
    """Drafts a tree of one shape.

    Attributes:
        widths: children of each node, by level.
        head: the path of the light head, or "auto".
    """

    widths: tuple[int, ...]
    head: str = "auto"

    name = "static-tree"

    @property
    def wanted_head(self) -> str | None:
        return self.head

    def start(self, sequence: Start) -> DraftState:
        return StaticTreeState(self.widths, sequence.first, sequence.head)


class StaticTreeState(DraftState):
    """The last token, and the hidden state under which it was chosen."""

    def __init__(self, widths: tuple[int, ...], first: int, head: Any) -> None:
        self._widths, self._head, self._last, self._state = widths, head, first, None

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
        self._last, self._state = tokens[-1], scores.hidden(path[-1])

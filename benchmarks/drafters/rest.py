"""REST (He et al., 2024, arXiv 2311.08252): continuations of the last tokens in a datastore of other text.

The datastore is a suffix array over tokens. The longest suffix of the text, at most ``LONGEST`` tokens, that occurs
in it gives up to ``MATCHES`` continuations of ``AHEAD`` tokens. They form a trie, and the rows of a step are those of
its nodes that occur most often, as in the paper's section 3.2. Our datastore is a model's own text and source code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree

#: The longest suffix that is looked up, the tokens of a continuation, and the most continuations.
LONGEST, AHEAD, MATCHES = 16, 10, 5000
#: Separates the texts of the datastore.
END = -1


class Datastore:
    """Texts and the order of their suffixes.

    Args:
        texts: token ids of each.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        parts = [np.append(np.asarray(text, np.int32), np.int32(END)) for text in texts]
        self.tokens = np.concatenate([*parts, np.full(LONGEST + AHEAD, END, np.int32)])
        # Suffixes are sorted by their first LONGEST tokens: the ranks of two halves give those of the whole.
        rank = np.unique(self.tokens, return_inverse=True)[1].astype(np.int64)
        length = 1
        while length < LONGEST:
            later = np.zeros_like(rank)
            later[:-length] = rank[length:] + 1
            rank = np.unique(rank * (int(rank.max()) + 2) + later, return_inverse=True)[1].astype(np.int64)
            length *= 2
        self._order = np.argsort(rank, kind="stable")[: len(self.tokens)]
        self._order = self._order[self._order < len(self.tokens) - LONGEST - AHEAD]
        first = self.tokens[self._order]
        self._begins = dict(zip(*np.unique(first, return_index=True), strict=True))
        self._counts = dict(zip(*np.unique(first, return_counts=True), strict=True))

    def find(self, suffix: Sequence[int]) -> Any:
        """Where the continuations of a suffix begin, (n,)."""
        low = self._begins.get(suffix[0], 0)
        high = low + self._counts.get(suffix[0], 0)
        for depth, token in enumerate(suffix[1:], 1):
            column = self.tokens[self._order[low:high] + depth]
            low, high = low + np.searchsorted(column, token), low + np.searchsorted(column, token, "right")
            if low == high:
                break
        return self._order[low:high] + len(suffix)

    def continuations(self, text: Sequence[int]) -> Any:
        """What followed the longest suffix of the text, (n, AHEAD); a continuation ends before ``END``."""
        for length in range(min(LONGEST, len(text)), 0, -1):
            begins = self.find(text[-length:])
            if len(begins):
                chosen = begins[:: -(-len(begins) // MATCHES)]
                return self.tokens[chosen[:, None] + np.arange(AHEAD)]
        return np.empty((0, AHEAD), np.int32)


@dataclass(frozen=True)
class Rest(Drafter):
    """Drafts from a datastore.

    Attributes:
        rows: rows of a step, at least 2.
        datastore: the texts.
    """

    rows: int
    datastore: Datastore = field(compare=False, repr=False)

    name = "rest"

    def start(self, sequence: Start) -> DraftState:
        return RestState(self, [*sequence.prompt, sequence.first])


class RestState(DraftState):
    """The text so far."""

    def __init__(self, drafter: Rest, text: list[int]) -> None:
        self._rows, self._datastore, self._text = drafter.rows, drafter.datastore, text

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree, found = TokenTree(self._text[-1]), self._datastore.continuations(self._text)
        heap: list[tuple[int, int, int, int]] = []  # minus the count, order of arrival, parent, token
        members: dict[tuple[int, int], Any] = {}

        def offer(parent: int, continuations: Any, depth: int) -> None:
            if depth == min(max_depth, AHEAD):
                return
            tokens, counts = np.unique(continuations[:, depth], return_counts=True)
            for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                if token != END:
                    members[parent, token] = continuations[continuations[:, depth] == token]
                    heappush(heap, (-count, len(members), parent, token))

        offer(0, found, 0)
        while heap and len(tree) < min(self._rows, max_rows):
            _, _, parent, token = heappop(heap)
            node = tree.add(token, parent, needs_logits=True)
            offer(node, members[parent, token], tree.depths[node])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

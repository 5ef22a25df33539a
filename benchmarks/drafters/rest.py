"""REST (He et al., 2024, arXiv 2311.08252): drafts what followed the last tokens in a datastore of other texts.

The datastore is a suffix array over tokens. The longest suffix of the sequence (up to ``LONGEST`` tokens) that occurs
in it yields up to ``MATCHES`` continuations of ``AHEAD`` tokens. They form a trie, and its most frequent nodes are
drafted, as in the paper's section 3.2. Our datastore contains a model's own text and source code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree

#: Length of the longest suffix to look up.
LONGEST = 16
#: Tokens of a continuation.
AHEAD = 10
#: Largest number of continuations; more matches are sampled evenly.
MATCHES = 5000
#: Separates the texts of the datastore.
END = -1


class Datastore:
    """Texts and the sorted order of their suffixes.

    Args:
        texts: token ids of each text.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        parts = [np.append(np.asarray(text, np.int32), np.int32(END)) for text in texts]
        self.tokens = np.concatenate([*parts, np.full(LONGEST + AHEAD, END, np.int32)])
        # Sort suffixes by their first LONGEST tokens. Each round doubles the length: the rank of a whole follows
        # from the ranks of its two halves.
        rank = np.unique(self.tokens, return_inverse=True)[1].astype(np.int64)
        length = 1
        while length < LONGEST:
            later = np.zeros_like(rank)
            later[:-length] = rank[length:] + 1
            rank = np.unique(rank * (int(rank.max()) + 2) + later, return_inverse=True)[1].astype(np.int64)
            length *= 2
        # Drop the suffixes that begin in the padding.
        self._order = np.argsort(rank, kind="stable")[: len(self.tokens)]
        self._order = self._order[self._order < len(self.tokens) - LONGEST - AHEAD]
        # Index the range of each first token, so that find starts with a narrow range.
        first = self.tokens[self._order]
        self._begins = dict(zip(*np.unique(first, return_index=True), strict=True))
        self._counts = dict(zip(*np.unique(first, return_counts=True), strict=True))

    def find(self, suffix: Sequence[int]) -> Any:
        """Start positions of the continuations of a suffix, (n,)."""
        low = self._begins.get(suffix[0], 0)
        high = low + self._counts.get(suffix[0], 0)
        for depth, token in enumerate(suffix[1:], 1):
            column = self.tokens[self._order[low:high] + depth]
            high = low + np.searchsorted(column, token, "right")
            low = low + np.searchsorted(column, token)
            if low == high:
                break
        return self._order[low:high] + len(suffix)

    def continuations(self, text: Sequence[int]) -> Any:
        """The tokens that followed the longest suffix of ``text``, (n, AHEAD). A continuation ends before ``END``."""
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
        datastore: where to look up continuations.
    """

    rows: int
    datastore: Datastore = field(compare=False, repr=False)

    name = "rest"

    def start(self, sequence: Start) -> DraftState:
        return RestState(self, [*sequence.prompt, sequence.first])


class RestState(DraftState):
    """The tokens of one sequence so far."""

    def __init__(self, drafter: Rest, text: list[int]) -> None:
        self._rows = drafter.rows
        self._datastore = drafter.datastore
        self._text = text

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = TokenTree(self._text[-1])
        found = self._datastore.continuations(self._text)
        heap: list[tuple[int, int, int, int]] = []  # negated count, order of arrival, parent, token
        members: dict[tuple[int, int], Any] = {}  # (parent, token) -> continuations through this node

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

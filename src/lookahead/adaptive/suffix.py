"""Suffix matches: a trie of all n-grams of a text up to one length, with counts.

The node of a context is reached from the node of the context one token shorter on the right by one dict
look-up, and its link leads to the context one token shorter on the left. So a drafted token costs one
look-up, whatever the order, and a new token of the text costs one visit per order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from operator import itemgetter

#: Candidates kept per context, from the longest match downwards.
KEEP = 6
SHARES = (0.12, 0.3, 0.55, 0.9)
#: Buckets of one source: order (up to 8) x share (5) x count (3).
SUFFIX_BUCKETS = 8 * 15


class Context:
    """The node of one n-gram: how often it was seen, and what followed."""

    __slots__ = ("after", "buckets", "count", "depth", "link", "stamp", "tokens", "total")

    def __init__(self, link: Context | None, depth: int) -> None:
        self.link = link
        self.depth = depth
        self.count = 0
        #: Tokens seen behind this context, and how many in all.
        self.after: dict[int, Context] = {}
        self.total = 0
        # What ``SuffixTrie.candidates`` found, and the total when it did.
        self.stamp = 0
        self.tokens: list[int] = []
        self.buckets: list[int] = []


class SuffixTrie:
    """All n-grams of up to ``order`` + 1 tokens of the texts fed.

    Args:
        order: longest context, at least 1.
        first_bucket: number of this source's first calibration bucket.
        max_nodes: the trie starts afresh when it has grown beyond; None for no limit.
    """

    def __init__(self, order: int, first_bucket: int = 0, max_nodes: int | None = None) -> None:
        self.order = order
        self.first_bucket = first_bucket
        self.max_nodes = max_nodes
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.root = Context(None, 0)
        self.nodes = 1
        self.start()

    def start(self) -> None:
        """A new text begins: no n-gram crosses this point."""
        self._active: list[Context] = [self.root]

    @property
    def state(self) -> Context:
        """The longest context of the text's end."""
        node = self._active[-1]
        while not node.after and node.link is not None:
            node = node.link
        return node

    def feed(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        order, root = self.order, self.root
        active = self._active
        for token in tokens:
            link = root
            following = [root]
            for context in active:
                context.total += 1
                node = context.after.get(token)
                if node is None:
                    node = context.after[token] = Context(link, context.depth + 1)
                    self.nodes += 1
                node.count += 1
                following.append(node)
                link = node
            if len(following) > order + 1:
                following.pop()
            active = following
        self._active = active
        if self.max_nodes is not None and self.nodes > self.max_nodes:
            self.clear()

    def step(self, state: Context, token: int) -> Context:
        """The longest known context behind ``state`` and ``token``."""
        node: Context | None = state
        while node is not None:
            found = node.after.get(token)
            if found is not None:
                # A context without successors says nothing; its shorter ones may.
                while not found.after and found.link is not None:
                    found = found.link
                return found
            node = node.link
        return self.root

    def candidates(self, state: Context) -> Context:
        """Fill ``tokens`` and ``buckets`` of a context, longest orders first, and return it."""
        if state.stamp != state.total or not state.total:
            tokens: list[int] = []
            buckets: list[int] = []
            if state.depth:
                self._take(state, tokens, buckets)
            state.tokens, state.buckets, state.stamp = tokens, buckets, state.total
        return state

    def _take(self, node: Context, tokens: list[int], buckets: list[int]) -> None:
        total = node.total
        if not total:
            return
        counts = [(after.count, token) for token, after in node.after.items()]
        if len(counts) > KEEP:
            counts = heapq.nlargest(KEEP, counts, key=itemgetter(0))
        else:
            counts.sort(reverse=True)
        base = self.first_bucket + (min(node.depth, 8) - 1) * 15
        for count, token in counts:
            if token in tokens:
                continue
            share = count / total
            place = 0
            for limit in SHARES:
                place += share > limit
            often = 0 if count == 1 else 1 if count < 4 else 2
            tokens.append(token)
            buckets.append(base + place * 3 + often)


def suffix_priors() -> list[float]:
    """What a bucket is worth before anything was observed: larger shares and longer matches are better."""
    priors = []
    for order in range(1, 9):
        for share in (0.05, 0.2, 0.4, 0.7, 1.0):
            for weight in (0.6, 0.8, 1.0):
                trust = (0.25, 0.45, 0.6, 0.7, 0.75, 0.8, 0.82, 0.85)[order - 1]
                priors.append(share * trust * weight)
    return priors

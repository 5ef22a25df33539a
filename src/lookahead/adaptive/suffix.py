"""Suffix matches: a trie of all n-grams of the texts fed, up to one length, with counts.

The node of a context leads to the context one token longer on the right by one dict look-up, and its link to
the context one token shorter on the left. So a drafted token costs one look-up, whatever the order, and a new
token of a text costs one visit per order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

#: Successors of one context that may be proposed.
KEEP = 6
SHARES = (0.12, 0.3, 0.55, 0.9)
ORDERS = 8
#: Buckets: order (longer ones count as the longest) x share x times seen x whether seen in this text.
SUFFIX_BUCKETS = ORDERS * 5 * 3 * 2


class Context:
    """The node of one n-gram: how often it was seen, and what followed."""

    __slots__ = ("after", "buckets", "count", "depth", "link", "mark", "stamp", "tokens", "total")

    def __init__(self, link: Context | None, depth: int) -> None:
        self.link = link
        self.depth = depth
        self.count = 0
        #: The text in which it was seen last.
        self.mark = 0
        #: Tokens seen behind this context, and how many in all.
        self.after: dict[int, Context] = {}
        self.total = 0
        # What ``rank`` found, and the total when it did.
        self.stamp = 0
        self.tokens: list[int] = []
        self.buckets: list[int] = []


class SuffixTrie:
    """All n-grams of up to ``order`` + 1 tokens of the texts fed.

    Args:
        order: longest context, at least 1.
        max_nodes: a trie that has grown beyond starts afresh; None for no limit.
    """

    def __init__(self, order: int, max_nodes: int | None = None) -> None:
        self.order = order
        self.max_nodes = max_nodes
        self.texts = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.root = Context(None, 0)
        self.nodes = 1

    def begin(self) -> Reader:
        """A new text."""
        self.texts += 1
        return Reader(self, self.texts)


class Reader:
    """The end of one text that is being fed to a trie; several texts may share it."""

    def __init__(self, trie: SuffixTrie, mark: int) -> None:
        self.trie = trie
        self.mark = mark
        self._root = trie.root
        self._active: list[Context] = [trie.root]

    @property
    def state(self) -> Context:
        """The longest context of the text's end that has been followed by something."""
        node = self._active[-1]
        while not node.after and node.link is not None:
            node = node.link
        return node

    def feed(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        trie, mark = self.trie, self.mark
        if trie.max_nodes is not None and trie.nodes > trie.max_nodes:
            trie.clear()
        root, order = trie.root, trie.order
        if self._root is not root:  # the trie has started afresh
            self._root, self._active = root, [root]
        active = self._active
        for token in tokens:
            link = root
            following = [root]
            for context in active:
                context.total += 1
                node = context.after.get(token)
                if node is None:
                    node = context.after[token] = Context(link, context.depth + 1)
                    trie.nodes += 1
                node.count += 1
                node.mark = mark
                following.append(node)
                link = node
            if len(following) > order + 1:
                following.pop()
            active = following
        self._active = active


def follow(state: Context, token: int) -> Context:
    """The longest context behind ``state`` and ``token`` that has been followed by something."""
    node: Context | None = state
    while node is not None:
        found = node.after.get(token)
        if found is not None:
            while not found.after and found.link is not None:
                found = found.link
            return found
        state = node
        node = node.link
    return state  # the root


def rank(context: Context, mark: int) -> None:
    """Bring ``tokens`` and ``buckets`` of a context up to date, the most frequent successor first."""
    context.stamp = total = context.total
    after = context.after
    base = (min(context.depth, ORDERS) - 1) * 30
    if base < 0:  # nothing is matched at the root
        return
    if len(after) == 1:
        (token,) = after
        context.tokens = [token]
        often = 0 if total == 1 else 1 if total < 4 else 2
        context.buckets = [base + 24 + often * 2 + (after[token].mark == mark)]
        return
    counts = [(node.count, token) for token, node in after.items()]
    counts = heapq.nlargest(KEEP, counts) if len(counts) > KEEP else sorted(counts, reverse=True)
    context.tokens = [token for _, token in counts]
    context.buckets = buckets = []
    for count, token in counts:
        share = count / total
        place = (share > SHARES[0]) + (share > SHARES[1]) + (share > SHARES[2]) + (share > SHARES[3])
        often = 0 if count == 1 else 1 if count < 4 else 2
        buckets.append(base + place * 6 + often * 2 + (after[token].mark == mark))

"""Suffix matches: a trie of all n-grams of the texts fed, up to one length, with counts.

The node of a context leads to the context one token longer on the right by one dict look-up, and its link to
the context one token shorter on the left. So a drafted token costs one look-up, whatever the order, and a new
token of a text costs one visit per order.

Nodes are stretches of one flat list of numbers, not objects: Python's garbage collector walks all objects
that hold others, and hundreds of thousands of them would cost every step more than drafting does.
"""

from __future__ import annotations

from collections.abc import Iterable

SHARES = (0.12, 0.3, 0.55, 0.9)
ORDERS = 8
#: Buckets: order (longer ones count as the longest) x share x times seen x whether seen in this text.
SUFFIX_BUCKETS = ORDERS * 5 * 3 * 2

# Fields of a node, whose number is the place of its first field. Node 0 is the root, the empty context.
COUNT, TOTAL, LINK, TOKEN, DEPTH, MARK, FIRST, SECOND, THIRD, FIELDS = range(10)
#: A child's key is the parent's number and the token: node << SHIFT | token.
SHIFT = 22


class SuffixTrie:
    """All n-grams of up to ``order`` + 1 tokens of the texts fed.

    Attributes:
        nodes: by node: times seen, successors seen in all, link, last token, length, the text that saw it
            last, and the three most frequent successors (0 for none; of equals the latest).
        children: key of node and token -> node.

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
        self.nodes = [0] * FIELDS
        self.children: dict[int, int] = {}

    def begin(self) -> Reader:
        """A new text."""
        self.texts += 1
        return Reader(self, self.texts)

    def follow(self, state: int, token: int) -> int:
        """The longest context behind ``state`` and ``token`` that has been followed by something."""
        nodes, children = self.nodes, self.children
        while True:
            found = children.get(state << SHIFT | token)
            if found is not None:
                return self.followed(found)
            if not state:
                return 0
            state = nodes[state + LINK]

    def followed(self, state: int) -> int:
        """The longest suffix of a context that has been followed by something."""
        nodes = self.nodes
        while state and not nodes[state + TOTAL]:
            state = nodes[state + LINK]
        return state

    def rank(self, state: int, mark: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The most frequent successors of a context and their buckets; nothing at the root."""
        if not state:
            return (), ()
        nodes = self.nodes
        base = (min(nodes[state + DEPTH], ORDERS) - 1) * 30
        total = nodes[state + TOTAL]
        first = nodes[state + FIRST]
        count = nodes[first + COUNT]
        here = nodes[first + MARK] == mark
        if count == total:
            bucket = base + 24 + (0 if count == 1 else 2 if count < 4 else 4) + here
            return (nodes[first + TOKEN],), (bucket,)
        tokens, buckets = [], []
        for node in (first, nodes[state + SECOND], nodes[state + THIRD]):
            if node:
                count = nodes[node + COUNT]
                share = count / total
                place = (share > SHARES[0]) + (share > SHARES[1]) + (share > SHARES[2]) + (share > SHARES[3])
                often = 0 if count == 1 else 2 if count < 4 else 4
                tokens.append(nodes[node + TOKEN])
                buckets.append(base + place * 6 + often + (nodes[node + MARK] == mark))
        return tuple(tokens), tuple(buckets)


class Reader:
    """The end of one text that is being fed to a trie; several texts may share it."""

    def __init__(self, trie: SuffixTrie, mark: int) -> None:
        self.trie = trie
        self.mark = mark
        self._nodes = trie.nodes
        self._active = [0]

    @property
    def state(self) -> int:
        """The longest context of the text's end that has been followed by something."""
        return self.trie.followed(self._active[-1]) if self.current else 0

    @property
    def current(self) -> bool:
        """Whether the trie has not started afresh since this text was last fed to it."""
        return self._nodes is self.trie.nodes

    @property
    def matched(self) -> int:
        """Tokens of the text's end that have been followed by something before, at most the order."""
        return self.trie.nodes[self.state + DEPTH] if self.state else 0

    def feed(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        trie, mark = self.trie, self.mark
        if trie.max_nodes is not None and len(trie.nodes) > trie.max_nodes * FIELDS:
            trie.clear()
        if self._nodes is not trie.nodes:  # the trie has started afresh
            self._nodes, self._active = trie.nodes, [0]
        nodes, children, longest = trie.nodes, trie.children, trie.order + 1
        active = self._active
        for token in tokens:
            link = 0
            following = [0]
            for context in active:
                nodes[context + TOTAL] += 1
                key = context << SHIFT | token
                node = children.get(key)
                if node is None:
                    node = children[key] = len(nodes)
                    nodes += (1, 0, link, token, len(following), mark, 0, 0, 0)
                else:
                    nodes[node + COUNT] += 1
                    nodes[node + MARK] = mark
                if nodes[context + FIRST] != node:
                    self._rise(context, node)
                following.append(node)
                link = node
            if len(following) > longest:
                following.pop()
            active = following
        self._active = active

    def _rise(self, context: int, node: int) -> None:
        """Bring the three most frequent successors up to date; of equals the later one stands first."""
        nodes = self._nodes
        count = nodes[node + COUNT]
        first, second, third = nodes[context + FIRST], nodes[context + SECOND], nodes[context + THIRD]
        if not first or count >= nodes[first + COUNT]:
            nodes[context + FIRST] = node
            if second != node:
                nodes[context + THIRD] = second
            nodes[context + SECOND] = first
        elif node == second:
            return
        elif not second or count >= nodes[second + COUNT]:
            nodes[context + SECOND], nodes[context + THIRD] = node, second
        elif not third or count >= nodes[third + COUNT]:
            nodes[context + THIRD] = node

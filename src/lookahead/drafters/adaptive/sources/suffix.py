"""Suffix matches: a trie of all n-grams of the texts fed, up to one length, with counts.

The node of a context leads to the context one token longer on the right by one look-up, and its link to the context
one token shorter on the left. So a drafted token costs one look-up, whatever the order, and a new token of a text
costs one visit per order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import CONTEXT, MATCHES, TextEnd, Tree
from ..calibration import MATCH_KINDS, MATCH_ORDERS, SHARES, place_in
from ..compiling import compiled, entry, int64
from ..hashing import find, new_slots, rehash

#: A child's key is the parent's number and the token: node << SHIFT | token.
SHIFT = 22
#: Contexts that a new trie has room for. Memory that is not touched costs nothing, while moving to more of it does.
FIRST_CONTEXTS = 1 << 12


@compiled
def child(text: TextEnd, context: int, token: int) -> int:
    """The context with a token added on the right; 0 where the trie does not know it."""
    slot = text.slots[find(text.slots, int64(context) << SHIFT | token)]
    return int64(slot.value) if slot.key != 0 else int64(0)


@compiled
def followed(text: TextEnd, context: int) -> int:
    """The longest suffix of a context that has been followed by something."""
    while context != 0 and text.trie[context].total == 0:
        context = int64(text.trie[context].link)
    return context


@compiled
def end_of(text: TextEnd) -> int:
    """The longest context of the text's end that has been followed by something."""
    length = len(text.contexts) - 1
    while text.contexts[length] < 0:
        length -= 1
    return followed(text, int64(text.contexts[length]))


@compiled
def follow(text: TextEnd, context: int, token: int) -> int:
    """The longest context behind ``context`` and ``token`` that has been followed by something."""
    while True:
        found = child(text, context, token)
        if found != 0:
            return followed(text, found)
        if context == 0:
            return int64(0)
        context = int64(text.trie[context].link)


@compiled
def _rank(trie: Any, context: int, node: int) -> None:
    """Bring the three most frequent successors up to date; of equals the later one stands first."""
    here, count = trie[context], trie[node].count
    if here.first == 0 or count >= trie[here.first].count:
        if here.second != node:
            here.third = here.second
        here.second = here.first
        here.first = node
    elif node == here.second:
        return
    elif here.second == 0 or count >= trie[here.second].count:
        here.third = here.second
        here.second = node
    elif here.third == 0 or count >= trie[here.third].count:
        here.third = node


@entry
def feed(text: TextEnd, tokens: Any, used: int) -> int:
    """The text goes on; returns how many contexts the trie then has. It must have room for all of them."""
    trie, contexts = text.trie, text.contexts
    for token in tokens:
        link, length = 0, 0
        # Each context of the old end is read before the new one of that length takes its place.
        context = contexts[0]
        while context >= 0:
            trie[context].total += 1
            place = find(text.slots, int64(context) << SHIFT | token)
            slot = text.slots[place]
            if slot.key == 0:
                node = used
                used += 1
                slot.key, slot.value = (int64(context) << SHIFT | token) + 1, node
                new = trie[node]
                new.count, new.total, new.link, new.token, new.depth = 1, 0, link, token, length + 1
                new.first, new.second, new.third = 0, 0, 0
            else:
                node = slot.value
                trie[node].count += 1
            trie[node].text = text.text
            if trie[context].first != node:
                _rank(trie, context, node)
            link = node
            length += 1
            if length == len(contexts):
                break
            context, contexts[length] = contexts[length], node
    return used


@compiled
def _bucket(node: Any, total: int, order: int, text: int) -> int:
    times = 0 if node.count == 1 else 1 if node.count < 4 else 2
    share = place_in(SHARES, node.count / total)
    return order * MATCH_KINDS + share * 6 + times * 2 + (1 if node.text == text else 0)


@compiled
def match(text: TextEnd, tree: Tree, source: int, node: int) -> None:
    """Find what followed the longest suffix that matches at a row of the tree; up to ``MATCHES`` tokens."""
    found = tree.matches[source, node]
    found[0].token = -1
    if len(text.contexts) == 0:
        return
    nodes, places, trie = tree.nodes, tree.places, text.trie
    while places[source, node] < 0:  # the places of the rows above first
        row = node
        while row > 0 and places[source, nodes[row].parent] < 0:
            row = nodes[row].parent
        if row == 0:
            places[source, 0] = end_of(text)
        else:
            places[source, row] = follow(text, places[source, nodes[row].parent], nodes[row].token)
    place = places[source, node]
    if place == 0:
        return
    here = trie[place]
    order: int = min(int64(here.depth), MATCH_ORDERS) - 1
    count = 0
    for successor in (here.first, here.second, here.third):
        if successor != 0:
            found[count].token = trie[successor].token
            found[count].bucket = _bucket(trie[successor], here.total, order, text.text)
            count += 1
    if count < MATCHES:
        found[count].token = -1


class SuffixTrie:
    """All n-grams of up to ``order`` + 1 tokens of the texts fed.

    Args:
        order: longest context, at least 1.
        max_nodes: a trie that has grown beyond starts afresh; None for no limit.
    """

    def __init__(self, order: int, max_nodes: int | None = None) -> None:
        self.order, self.max_nodes = order, max_nodes
        self.texts = self.generation = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.generation += 1  # readers notice
        self.nodes = np.zeros(FIRST_CONTEXTS, CONTEXT)
        self.slots = new_slots(2 * FIRST_CONTEXTS)
        self.used = 1

    def begin(self) -> Reader:
        """A new text."""
        self.texts += 1
        return Reader(self, self.texts)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more; a trie that is full starts afresh first."""
        if self.max_nodes is not None and self.used > self.max_nodes:
            self.clear()
        needed = self.used + tokens * (self.order + 1)
        if needed > len(self.nodes):
            room = 1 << (needed - 1).bit_length()
            nodes, slots = np.empty(room, CONTEXT), new_slots(2 * room)
            nodes[: self.used] = self.nodes[: self.used]
            rehash(self.slots, slots)
            self.nodes, self.slots = nodes, slots


class Reader:
    """The end of one text that is being fed to a trie; several texts may share it."""

    def __init__(self, trie: SuffixTrie, number: int) -> None:
        self.trie, self.number, self._generation = trie, number, 0
        self._contexts = np.zeros(trie.order + 1, np.int32)
        self.catch_up()

    @property
    def text(self) -> TextEnd:
        """What compiled code takes."""
        return TextEnd(self.trie.nodes, self.trie.slots, self._contexts, self.number)

    def feed(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """The text goes on."""
        self.trie.reserve(len(tokens))
        self.catch_up()
        self.trie.used = feed(self.text, np.asarray(tokens, np.int64), self.trie.used)

    def catch_up(self) -> bool:
        """Begin at the root where the trie has started afresh since; returns whether it has."""
        if self._generation == self.trie.generation:
            return False
        self._generation = self.trie.generation
        self._contexts[:] = -1
        self._contexts[0] = 0
        return True


#: Stands for a source that is off.
NO_TEXT = TextEnd(np.zeros(1, CONTEXT), new_slots(2), np.zeros(0, np.int32), 0)

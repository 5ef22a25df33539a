"""Suffix matches: a trie of all n-grams of the texts, up to a maximum length, with counts.

A node of the trie is a context, a sequence of tokens. Its child for token t is the context followed by t, found by
one lookup in a hash table; its suffix link is the context without its first token. So a drafted token takes one
lookup, whatever the order, and a new token of a text takes one lookup per order.

An example with order 2, after the text  a b c a b d a b :

    context   seen   successors        suffix link
    ()               b 3, a 3, d 1     -            three successors are kept; at equal counts, the latest comes first
    (a)        3     b 3               ()
    (b)        3     d 1, c 1          ()
    (a b)      3     d 1, c 1          (b)
    (b d)      1     a 1               (d)
    (a b d)    1     none              (b d)        one token longer than the order, so its successors are not counted

The longest context at the end of the text that was followed by a token is (a b), so the root of the tree gets the
proposals d and c, each with the share 1/2 and the order 2. Below d, one lookup leads from (a b) to (a b d). That has
no successors, so its suffix link is followed to (b d), which proposes a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from ....machine_code import compiled, entry, int64, pack
from ..calibration import interval_of, new_buckets
from ..hashing import find, new_slots, rehash
from ..layout import BUCKET, MATCHES, SLOT, Tree, record
from .source import Setup, TextSource, judge_matches

#: Suffix matches: the highest order with its own buckets, upper ends of the shares, number of buckets per order.
MATCH_ORDERS = 8
SHARES = (0.12, 0.3, 0.55, 0.9)
MATCH_KINDS = (len(SHARES) + 1) * 3 * 2
#: One context (node) of a suffix trie.
CONTEXT = record(
    count="i4",  # how often the context was seen
    total="i4",  # how often it was followed by a token
    link="i4",  # the context without its first token (suffix link)
    token="i4",  # its last token
    depth="i4",  # its length in tokens
    text="i4",  # number of the text in which it was last seen
    first="i4",  # the numbers of its three most frequent successors; 0 for none
    second="i4",
    third="i4",
)
#: A child's key is the parent's number and the token: node << SHIFT | token.
SHIFT = 22
#: Initial capacity in contexts. Unused memory costs nothing, but moving to a larger array does.
FIRST_CONTEXTS = 1 << 12


class TextEnd(NamedTuple):
    """The end of a text in a suffix trie."""

    trie: Annotated[Any, CONTEXT, 1]  # CONTEXT by number; 0 is the root, the empty context
    slots: Annotated[Any, SLOT, 1]  # hash table: (context, next token) -> context
    # (order + 1,): the contexts at the end of the text, by length; -1 after the longest
    contexts: Annotated[Any, "i4", 1]
    text: int  # number of the text in its trie
    used: Annotated[Any, "i8", 1]  # (1,): number of contexts in the trie
    buckets: Annotated[Any, BUCKET, 1]  # (kinds,)


@compiled
def child(text: TextEnd, context: int, token: int) -> int:
    """The context followed by a token; 0 if it is not in the trie."""
    slot = text.slots[find(text.slots, int64(context) << SHIFT | token)]
    return int64(slot.value) if slot.key != 0 else int64(0)


@compiled
def followed(text: TextEnd, context: int) -> int:
    """The longest suffix of a context that was followed by a token."""
    while context != 0 and text.trie[context].total == 0:
        context = int64(text.trie[context].link)
    return context


@compiled
def end_of(text: TextEnd) -> int:
    """The longest context at the end of the text that was followed by a token."""
    length = len(text.contexts) - 1
    while text.contexts[length] < 0:
        length -= 1
    return followed(text, int64(text.contexts[length]))


@compiled
def follow(text: TextEnd, context: int, token: int) -> int:
    """The longest suffix of ``context`` + ``token`` that was followed by a token."""
    while True:
        longer = child(text, context, token)
        if longer != 0:
            return followed(text, longer)
        if context == 0:
            return int64(0)
        context = int64(text.trie[context].link)


@compiled
def _rank(trie: Any, context: int, node: int) -> None:
    """Update the three most frequent successors; at equal counts, the latest comes first."""
    here = trie[context]
    count = trie[node].count
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


@compiled
def feed(text: TextEnd, tokens: Any, length: int) -> None:
    """Append the first ``length`` tokens to the text. The trie must have room for all their contexts."""
    trie = text.trie
    contexts = text.contexts
    used = int64(text.used[0])
    for i in range(length):
        token = int64(tokens[i])
        link = 0
        length = 0
        # From short to long: read each context of the old end before the new one of that length replaces it.
        context = contexts[0]
        while context >= 0:
            trie[context].total += 1
            slot = text.slots[find(text.slots, int64(context) << SHIFT | token)]
            if slot.key == 0:
                node = used
                used += 1
                slot.key, slot.value = (int64(context) << SHIFT | token) + 1, node
                new = trie[node]
                new.count = 1
                new.total = 0
                new.link = link
                new.token = token
                new.depth = length + 1
                new.first = new.second = new.third = 0
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
    text.used[0] = used


@entry
def read(text: TextEnd, tokens: Annotated[Any, "i8", 1]) -> None:
    """``feed`` all of ``tokens``, called from Python."""
    feed(text, tokens, len(tokens))


@compiled
def _bucket(node: Any, total: int, order: int, text: int) -> int:
    times = 0 if node.count == 1 else 1 if node.count < 4 else 2
    share = interval_of(SHARES, node.count / total)
    return order * MATCH_KINDS + share * 6 + times * 2 + (1 if node.text == text else 0)


@compiled
def match(text: TextEnd, tree: Tree, source: int, node: int) -> None:
    """Store up to ``MATCHES`` tokens that followed the longest matching suffix at a row of the tree."""
    matches = tree.matches[source, node]
    matches[0].token = -1
    nodes = tree.nodes
    contexts = tree.contexts
    trie = text.trie

    # The longest context at the row; those of the rows above it first.
    while contexts[source, node] < 0:
        row = node
        while row > 0 and contexts[source, nodes[row].parent] < 0:
            row = nodes[row].parent
        if row == 0:
            contexts[source, 0] = end_of(text)
        else:
            contexts[source, row] = follow(text, contexts[source, nodes[row].parent], nodes[row].token)
    context = contexts[source, node]
    if context == 0:
        return

    # Its most frequent successors.
    here = trie[context]
    order: int = min(int64(here.depth), MATCH_ORDERS) - 1
    count = 0
    for successor in (here.first, here.second, here.third):
        if successor != 0:
            matches[count].token = trie[successor].token
            matches[count].bucket = _bucket(trie[successor], here.total, order, text.text)
            matches[count].level = text.buckets[matches[count].bucket].level
            count += 1
    if count < MATCHES:
        matches[count].token = -1


class SuffixTrie:
    """All n-grams of up to ``order`` + 1 tokens of the texts fed to it.

    Args:
        order: longest context, at least 1.
        max_nodes: a larger trie is cleared; None for no limit.
    """

    def __init__(self, order: int, max_nodes: int | None = None) -> None:
        self.order = order
        self.max_nodes = max_nodes
        self.texts = self.generation = 0
        self.clear()

    def clear(self) -> None:
        """Remove all contexts."""
        self.generation += 1  # readers compare it with their own
        self.nodes = np.zeros(FIRST_CONTEXTS, CONTEXT)
        self.slots = new_slots(2 * FIRST_CONTEXTS)
        self._used = np.ones(1, np.int64)

    @property
    def used(self) -> int:
        """The number of contexts, including the root."""
        return int(self._used[0])

    def begin(self, buckets: Any = None) -> Reader:
        """Start a new text, whose matches have these buckets."""
        self.texts += 1
        return Reader(self, self.texts, buckets)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more tokens; a full trie is cleared first."""
        used = int(self._used[0])
        if self.max_nodes is not None and used > self.max_nodes:
            self.clear()
            used = 1
        needed = used + tokens * (self.order + 1)
        if needed > len(self.nodes):
            room = 1 << (needed - 1).bit_length()
            nodes, slots = np.empty(room, CONTEXT), new_slots(2 * room)
            nodes[:used] = self.nodes[:used]
            rehash(self.slots, slots)
            self.nodes, self.slots = nodes, slots


class Reader:
    """The end of one text that is being fed to a trie. Several texts may share the trie.

    Args:
        trie: the trie.
        number: number of the text.
        buckets: the buckets of its matches.
    """

    def __init__(self, trie: SuffixTrie, number: int, buckets: Any = None) -> None:
        self.trie = trie
        self.number = number
        self._buckets = buckets if buckets is not None else np.zeros(MATCH_KINDS * MATCH_ORDERS, BUCKET)
        self._generation = 0
        self._contexts = np.zeros(trie.order + 1, np.int32)
        self.catch_up()

    @property
    def text(self) -> TextEnd:
        """The arrays for compiled code."""
        trie = self.trie
        return TextEnd(trie.nodes, trie.slots, self._contexts, self.number, trie._used, self._buckets)

    def feed(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Append tokens to the text."""
        self.reserve(len(tokens))
        read(pack(self.text), np.asarray(tokens, np.int64))

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` more tokens of this text. Returns whether the trie was cleared."""
        self.trie.reserve(tokens)
        return self.catch_up()

    def catch_up(self) -> bool:
        """Restart at the root if the trie has been cleared. Returns whether it has."""
        if self._generation == self.trie.generation:
            return False
        self._generation = self.trie.generation
        self._contexts[:] = -1
        self._contexts[0] = 0
        return True


@compiled
def _propose(memory: Any, own: TextEnd, node: int, number: int) -> None:
    match(own, memory.tree, number, node)


@compiled
def _judge(memory: Any, own: TextEnd, node: int, number: int, right: int, truth: int) -> None:
    judge_matches(memory, own.buckets, node, number, truth)


@compiled
def _feed(memory: Any, own: TextEnd, length: int) -> None:
    feed(own, memory.tokens, length)


class Suffix(TextSource):
    """Matches in this sequence."""

    name = "suffix"
    Arrays = TextEnd
    propose = staticmethod(_propose)
    judge = staticmethod(_judge)
    feed = staticmethod(_feed)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._trie = self.trie_of(setup) if self.on else SuffixTrie(1)
        self._reader = self._trie.begin(setup.tables.buckets[self.name])
        self._arrays = self._reader.text

    def trie_of(self, setup: Setup) -> SuffixTrie:
        """The trie in which matches are found."""
        return SuffixTrie(setup.config.suffix_order)

    @classmethod
    def buckets(cls, fits: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
        return {cls.name: new_buckets(fits["matches"])}

    @property
    def arrays(self) -> TextEnd:
        if self._arrays.trie is not self._trie.nodes:
            self._arrays = self._reader.text
        return self._arrays

    def read(self, tokens: Any) -> None:
        self._reader.feed(tokens)

    def reserve(self, rows: int, tokens: int) -> bool:
        return self._reader.reserve(tokens)


class Corpus(Suffix):
    """Matches in the sequences of earlier requests as well, if a state is kept; the oldest are forgotten."""

    name = "corpus"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.on = self.on and setup.keeps

    def trie_of(self, setup: Setup) -> SuffixTrie:
        return setup.state.corpus if setup.keeps else SuffixTrie(1)

    def catch_up(self) -> bool:
        """Restart at the root if another sequence has cleared the trie. Returns whether it has."""
        return self._reader.catch_up()

    def restart(self, memory: Any) -> None:
        """Nothing matches in the cleared trie."""
        memory.tree.contexts[self.number] = 0

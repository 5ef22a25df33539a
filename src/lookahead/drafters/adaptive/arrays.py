"""The memory that compiled code works on: arrays of records with named fields, grouped in named tuples.

Nothing here computes. A function takes the groups that it needs; whoever owns a group (``LogitCache``,
``SuffixTrie``, ``Grower``) makes its arrays larger when need be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


def record(**fields: str) -> Any:
    """A dtype whose elements have named fields: ``array[i].name`` for one, ``array["name"]`` for the column."""
    return np.dtype((np.record, list(fields.items())), align=True)


#: A context of a suffix trie: how often it was seen, successors seen in all, the context one token shorter on the
#: left, its last token, its length, the text that saw it last, and its three most frequent successors (0: none).
CONTEXT = record(
    count="i4", total="i4", link="i4", token="i4", depth="i4", text="i4", first="i4", second="i4", third="i4"
)
#: A bucket of proposals: how many there were and were right, and what follows from these: see ``calibration``.
BUCKET = record(hits="f8", trials="f8", prior="f8", probability="f8", level="i8")
#: Numbers of the oldest entry of a table and of the next one.
SPAN = record(oldest="i8", newest="i8")
#: A row of the tree: the token, its parent row, ``pair`` as key of its last two tokens, and the probability that the
#: target walks through it. Then, once the sources were asked (``asked``): how many tokens they propose behind it,
#: how many of these come from the logit cache and by how many tokens their row was found there, and how many edges
#: are worth a place in the heap. ``entry`` is scratch.
NODE = record(
    token="i4", parent="i4", pair="i8", probability="f8", depth="i4", asked="i4", proposals="i4", cached="i4",
    order="i4", edges="i4", entry="i8",
)  # fmt: skip
#: A token that is proposed behind a row: its joint bucket, its bucket of the logit cache, its score there.
PROPOSAL = record(token="i4", joint="i4", kind="i4", score="f4")
#: A token that followed the longest match: -1 for none; its bucket.
MATCH = record(token="i4", bucket="i4")
#: A proposal that may become a row; ``cost`` is minus the probability of the path down to it.
EDGE = record(cost="f8", token="i8")
#: What waits to be taken: an edge (node * MAX_EDGES + place) or, as ~node, a row to be expanded.
WAITING = record(cost="f8", number="i8")
#: How far growing is: rows, and entries of the heap.
PROGRESS = record(rows="i8", heap="i8")

#: Tokens that one suffix match proposes at most, and answers of the last step kept per position.
MATCHES = 3
ANSWERS = 3
#: Proposals of a node beside those of the logit cache.
BESIDE = 2 * MATCHES + ANSWERS
#: Rows of ``Tree.matches`` and of the calibration of matches; places in ``Sources.texts``.
SUFFIX, CORPUS = 0, 1


class TextEnd(NamedTuple):
    """The end of a text in a suffix trie; no contexts at all where the source is off."""

    trie: Any  # CONTEXT, by number; 0 is the root, the empty context
    slots: Any  # key of context and token -> context
    contexts: Any  # int32: those that the text ends with, by length; -1 behind the longest
    text: int  # number of the text in its trie


class Cache(NamedTuple):
    """The logit cache: by order m (three of them), rows by the key of their last m tokens."""

    slots: Any  # (3, 2n) key -> number; an entry's place is its number modulo n
    keys: Any  # (3, n)
    origins: Any  # (3, n): where the row stood
    ids: Any  # (3, n, width): the best tokens, -1 where there are no more
    odds: Any  # (3, n, width): their log-odds against the best one; NaN where there was no such token
    spans: Any  # (3,) SPAN
    max_entries: int


class Calibration(NamedTuple):
    """What proposals of each kind are worth, as ``BUCKET``."""

    logits: Any  # (3, kinds), by order
    matches: Any  # (2, kinds): in this text, in the corpus
    joint: Any  # (kinds,), by what all sources say together


class Tree(NamedTuple):
    """The tree that is grown, and what is known of its rows."""

    nodes: Any  # (rows,) NODE
    proposals: Any  # (rows, most) PROPOSAL
    edges: Any  # (rows, most) EDGE, likeliest first
    matches: Any  # (2, rows, MATCHES) MATCH
    places: Any  # (2, rows): context that matches at a row; -1 where not looked for yet
    heap: Any  # (rows + 2,) WAITING
    progress: Any  # (1,) PROGRESS


class Sources(NamedTuple):
    """What proposes."""

    texts: tuple[TextEnd, TextEnd]
    cache: Cache
    answers: Any  # (depths, ANSWERS): what the last step answered there, best first; -1 for none
    noise: Any  # (positions, V): Gumbel noise, by position of the token in the text modulo their number
    known: Any  # (positions,): whose noise that is


class Rules(NamedTuple):
    """What does not change within a step."""

    vocabulary: int
    sampled: bool
    use_logits: bool
    use_answers: bool
    temperature: float
    haste: float
    position: int  # tokens of the text
    tail: tuple[int, int, int]  # the last three of them


class Step(NamedTuple):
    """What a step has brought."""

    path: Any  # accepted rows
    tokens: Any  # the target's token under each
    ids: Any  # (rows, top): best tokens of each row
    odds: Any  # (rows, top): their log-odds against the best one
    own: Any  # (rows,): the target's own token under each row; filled in
    credit: Any  # by CREDITED: accepted tokens; added to


def new_tree(rows: int, proposals: int) -> Tree:
    """Memory for trees of so many rows, with so many proposals behind each at most."""
    return Tree(
        np.zeros(rows, NODE),
        np.zeros((rows, proposals), PROPOSAL),
        np.zeros((rows, proposals), EDGE),
        np.zeros((2, rows, MATCHES), MATCH),
        np.zeros((2, rows), np.int64),
        np.zeros(rows + 2, WAITING),
        np.zeros(1, PROGRESS),
    )

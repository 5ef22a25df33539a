"""The records of the arrays that compiled code reads and writes, and the token tree in these arrays.

A field's annotation gives the array's dtype and number of dimensions. ``memory`` puts all arrays into one named
tuple.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from ...machine_code import compiled
from ...sampling.draws import gumbel_of


def record(**fields: str) -> Any:
    """A dtype with named fields: ``array[i].name`` is one value, ``array["name"]`` is the column."""
    return np.dtype((np.record, list(fields.items())), align=True)


#: One entry of a hash table; see ``hashing``.
SLOT = record(key="i8", value="i8")
#: One bucket of the calibration; ``calibration`` explains how probability and level are computed from the others.
BUCKET = record(hits="f8", trials="f8", prior="f8", probability="f8", level="i8")
#: The numbers of a table's entries run from ``oldest`` to ``newest`` - 1.
SPAN = record(oldest="i8", newest="i8")
#: One row of the token tree.
NODE = record(
    token="i4",
    parent="i4",  # row of the parent, -1 for the root
    pair="i8",  # key of the last two tokens: previous token * V + token
    probability="f8",  # estimated probability that verification reaches the row
    depth="i4",
    asked="i4",  # 1 once the sources have been asked; the fields below are valid only then
    proposals="i4",  # number of tokens that the sources propose as children
    recalled="i4",  # how many of them come from the logit cache, the base table or both; these come first
    rest="i4",  # the state of a token that neither proposes; later the joint bucket of one that no source proposes
    order="i4",  # the logit cache matched order + 1 tokens
    edges="i4",  # number of proposals that are likely enough for the heap
    entry="i8",  # scratch space of logit_cache.learn
    guess="i4",  # the light head's guesses under it, a row of ``Guesses``; -1 for none
)
#: A proposed child of a row.
PROPOSAL = record(
    token="i4",
    source="i4",  # the number of the source that added it
    level="i4",  # the confidence of the logit cache, the base table or both
    joint="i4",  # its joint bucket, -1 if only the light head proposes it
    probability="f8",  # its estimated probability
    kind="i4",  # its bucket in the logit cache, -1 if it is not from there
    base_kind="i4",  # its bucket in the base table, -1 if it is not from there
    pair="i4",  # the joint bucket of these two
    score="f4",  # sampling: its score in the logit cache
    guess="i4",  # its index in the light head's guesses, or -1
    both="i4",  # its bucket together with the head
)
#: A token that a text source proposes (-1 after the last), its bucket, and the confidence level of that.
MATCH = record(token="i4", bucket="i4", level="i4")
#: A proposal that may become a row, with the probability of its path from the root.
EDGE = record(probability="f8", token="i8")
#: An entry of the heap, largest probability first.
HEAP_ENTRY = record(
    probability="f8",
    row="i4",
    edge="i4",  # the index of an edge of the row, or ``TO_ASK``
)
#: Instead of an edge: the row itself, whose sources have not been asked yet.
TO_ASK = -1
#: Rows of the tree and entries of the heap so far.
SIZES = record(rows="i8", heap="i8")

#: Largest number of tokens that a text source proposes under a row.
MATCHES = 3
#: How the noise of a token is obtained when sampling: from ``Memory.noise``, or computed for single tokens.
BY_ARRAY, BY_KEY = 1, 2
#: Scalars of the sequence that compiled code reads, and additional results that it writes.
STEP = record(
    vocabulary="i8",
    sampled="i8",  # 0 for greedy decoding; otherwise ``BY_ARRAY`` or ``BY_KEY``
    noise_key="u8",  # with ``BY_KEY``: see ``draws.gumbel_of``
    noise_offset="i8",  # ``position`` plus this is the position in the sequence
    temperature="f8",
    expansion_factor="f8",  # see ``tree_growth.EXPANSION_FACTOR``
    position="i8",  # number of tokens in the sequence
    before="i8",  # the last three tokens of the sequence, the oldest first
    previous="i8",
    last="i8",
    rate="f8",  # tokens per plain step, the price of a plain step's time (``rows``)
    wanted="i8",  # set by ``grow_tree``: the row that a source must serve, or whose noise is missing
    expected="f8",  # set by ``learn``: F of the last tree (``rows``)
)


class Tree(NamedTuple):
    """The tree while it grows, and the sources' proposals at its rows."""

    nodes: Annotated[Any, NODE, 1]  # (rows,) NODE
    proposals: Annotated[Any, PROPOSAL, 2]  # (rows, most) PROPOSAL
    edges: Annotated[Any, EDGE, 2]  # (rows, most) EDGE, likeliest first
    matches: Annotated[Any, MATCH, 3]  # (text sources, rows, MATCHES) MATCH
    # (text sources, rows): scratch space; of a suffix trie, the longest context that matches; -1 if not searched yet
    contexts: Annotated[Any, "i8", 2]
    heap: Annotated[Any, HEAP_ENTRY, 1]  # (rows + 2,) HEAP_ENTRY
    sizes: Annotated[Any, SIZES, 1]  # (1,) SIZES


@compiled
def noise_of(memory: Any, depth: int, token: int) -> Any:
    """The noise of a token chosen under a node of this depth, float32. With ``BY_ARRAY``, ``noise`` must have it."""
    step = memory.step[0]
    if step.sampled == BY_KEY:
        return gumbel_of(step.noise_key, step.noise_offset + step.position + depth, token)
    return memory.noise[(step.position + depth) % len(memory.noise), token]


@compiled
def index_of(tokens: Any, count: int, token: int) -> int:
    """The index of a token among the first ``count`` records, or -1. A record with token -1 ends the list."""
    for index in range(count):
        if tokens[index].token == token:
            return index
        if tokens[index].token < 0:
            break
    return -1


def new_tree(rows: int, proposals: int, texts: int) -> Tree:
    """Memory for a tree of at most ``rows`` rows with at most ``proposals`` proposed children each.

    Args:
        texts: number of text sources.
    """
    matches = np.zeros((texts, rows, MATCHES), MATCH)
    matches["token"] = -1  # of a source that is off
    return Tree(
        np.zeros(rows, NODE),
        np.zeros((rows, proposals), PROPOSAL),
        np.zeros((rows, proposals), EDGE),
        matches,
        np.zeros((texts, rows), np.int64),
        np.zeros(rows + 2, HEAP_ENTRY),
        np.zeros(1, SIZES),
    )

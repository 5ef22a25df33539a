"""The memory of compiled code: arrays of records with named fields, in one named tuple, ``Memory``.

Compiled functions take the whole ``Memory`` and a row number; those called from Python take ``jit.pack(memory)`` and
begin with ``unpack``. A field's annotation gives the array's dtype and number of dimensions. ``grower`` allocates the
arrays of one sequence; ``LogitCache`` and ``SuffixTrie`` allocate and enlarge their own; the base table is mapped
from its file.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from ...jit import compiled, unpack_as
from ...sampling.draws import gumbel_of


def record(**fields: str) -> Any:
    """A dtype with named fields: ``array[i].name`` is one value, ``array["name"]`` is the column."""
    return np.dtype((np.record, list(fields.items())), align=True)


#: One entry of a hash table; see ``hashing``.
SLOT = record(key="i8", value="i8")
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
    cached="i4",  # how many of them come from the logit cache; these come first
    recalled="i4",  # how many come from the logit cache, the base table or both; these come first
    order="i4",  # the logit cache matched order + 1 tokens
    edges="i4",  # number of proposals that are likely enough for the heap
    entry="i8",  # scratch space of logit_cache.write_rows
    guess="i4",  # the light head's guesses under it, a row of ``Guesses``; -1 for none
)
#: A proposed child of a row.
PROPOSAL = record(
    token="i4",
    joint="i4",  # its joint bucket, -1 if only the light head proposes it
    kind="i4",  # its bucket in the logit cache, -1 if it is not from there
    base_kind="i4",  # its bucket in the base table, -1 if it is not from there
    pair="i4",  # the joint bucket of these two
    score="f4",  # sampling: its score in the logit cache
    guess="i4",  # its index in the light head's guesses, or -1
    both="i4",  # its bucket together with the head
)
#: A token that followed the longest suffix match (-1 for none), and its bucket.
MATCH = record(token="i4", bucket="i4")
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

#: Largest number of tokens proposed by one suffix match.
MATCHES = 3
#: Largest number of the last step's answers kept per position.
ANSWERS = 3
#: Largest number of tokens that the light head proposes under a row.
GUESSES = 8
#: Largest number of proposals per row besides those of the logit cache and the base table: two suffix matches, the
#: answers, the head's guesses.
OTHER_PROPOSALS = 2 * MATCHES + ANSWERS + GUESSES
#: Largest number of tokens read from an entry of the base table.
BASE_PROPOSALS = 8
#: The two tries, of this sequence and of earlier ones: indices into ``Tree.matches``, ``Tree.contexts``,
#: ``Calibration.matches`` and ``Memory.texts``.
SUFFIX, CORPUS = 0, 1
#: How the noise of a token is obtained when sampling: from ``Memory.noise``, or computed for single tokens.
BY_ARRAY, BY_KEY = 1, 2
#: Scalars of the sequence that compiled code reads, and additional results that it writes.
STEP = record(
    vocabulary="i8",
    sampled="i8",  # 0 for greedy decoding; otherwise ``BY_ARRAY`` or ``BY_KEY``
    noise_key="u8",  # with ``BY_KEY``: see ``draws.gumbel_of``
    noise_offset="i8",  # ``position`` plus this is the position in the sequence
    use_logits="i8",
    use_answers="i8",
    temperature="f8",
    expansion_factor="f8",  # see ``grow.EXPANSION_FACTOR``
    position="i8",  # number of tokens in the sequence
    before="i8",  # the last three tokens of the sequence, the oldest first
    previous="i8",
    last="i8",
    rate="f8",  # tokens per plain step, the price of a plain step's time (``rows``)
    bias="f8",  # correction of the probabilities by recent acceptance (``rows``)
    guess_depth="i8",  # the light head guesses only under rows of a smaller depth; 0 for none
    guess_price="f8",  # the smallest gain for which a guess pays off, in tokens
    wanted="i8",  # set by ``grow``: the row under which the head must guess, or whose noise is missing
    expected="f8",  # set by ``learn``: F of the last tree, uncorrected (``rows``)
)


class TextEnd(NamedTuple):
    """The end of a text in a suffix trie. ``contexts`` has length 0 if the source is off."""

    trie: Annotated[Any, CONTEXT, 1]  # CONTEXT by number; 0 is the root, the empty context
    slots: Annotated[Any, SLOT, 1]  # hash table: (context, next token) -> context
    # (order + 1,): the contexts at the end of the text, by length; -1 after the longest
    contexts: Annotated[Any, "i4", 1]
    text: int  # number of the text in its trie
    used: Annotated[Any, "i8", 1]  # (1,): number of contexts in the trie


class Cache(NamedTuple):
    """The logit cache: three tables of n entries, indexed by the last one, two and three tokens."""

    # (3, 2n) hash table: key -> entry number; the entry is stored at its number modulo n
    slots: Annotated[Any, SLOT, 2]
    keys: Annotated[Any, "i8", 2]  # (3, n)
    origins: Annotated[Any, "i4", 2, "strided"]  # (3, n): where the row was: ON_PATH or REJECTED
    ids: Annotated[Any, "i4", 3, "strided"]  # (3, n, width): the best tokens, best first; -1 after the last
    # (3, n, width): their log-odds against the best token; NaN after the last
    odds: Annotated[Any, "f4", 3, "strided"]
    spans: Annotated[Any, SPAN, 1]  # of the three
    max_entries: int


class Calibration(NamedTuple):
    """The observed accuracy of proposals by kind, as ``BUCKET``."""

    matches: Annotated[Any, BUCKET, 2]  # (2, kinds): of suffix matches in this sequence and in earlier ones
    logits: Annotated[Any, BUCKET, 2]  # (3, kinds): of the logit cache, by order
    base: Annotated[Any, BUCKET, 1]  # (kinds,): of the base table
    pairs: Annotated[Any, BUCKET, 1]  # (kinds,): of the combination of the logit cache and the base table
    joint: Annotated[Any, BUCKET, 1]  # (kinds,): of the combination of all sources without the light head
    guesses: Annotated[Any, BUCKET, 2]  # (levels, kinds): of the light head
    both: Annotated[Any, BUCKET, 1]  # (kinds,): of the combination of the light head with all others


class Trie(NamedTuple):
    """The base table: n contexts, of which n_1 have one token and n_2 have two; see ``sources.base_table``."""

    roots: Annotated[Any, "i4", 1]  # (V,): token -> its node, or -1
    # (n_1 + n_2 + 1,): the children of node i are children[i] up to children[i + 1]
    children: Annotated[Any, "i4", 1]
    low: Annotated[Any, "u2", 1]  # (n,): the lower 16 bits of each context's last token
    high: Annotated[Any, "u1", 1]  # (n,): its other bits
    counts: Annotated[Any, "u1", 1]  # (n,): how often the context occurred, at most 255; 0 if it has no entry
    ids_low: Annotated[Any, "u2", 2]  # (n, width): the tokens of the entry, likeliest first, split likewise
    ids_high: Annotated[Any, "u1", 2]  # (n, width)
    # (n, width): their negative log-probabilities, in steps; ABSENT after the last
    logs: Annotated[Any, "u1", 2]


class Tree(NamedTuple):
    """The tree while it grows, and the sources' proposals at its rows."""

    nodes: Annotated[Any, NODE, 1]  # (rows,) NODE
    proposals: Annotated[Any, PROPOSAL, 2]  # (rows, most) PROPOSAL
    edges: Annotated[Any, EDGE, 2]  # (rows, most) EDGE, likeliest first
    matches: Annotated[Any, MATCH, 3]  # (2, rows, MATCHES) MATCH
    # (2, rows): the longest context that matches at a row; -1 if not searched yet
    contexts: Annotated[Any, "i8", 2]
    heap: Annotated[Any, HEAP_ENTRY, 1]  # (rows + 2,) HEAP_ENTRY
    sizes: Annotated[Any, SIZES, 1]  # (1,) SIZES


class Guesses(NamedTuple):
    """The light head's guesses in this step, by row of the tree, in the order of its calls."""

    ids: Annotated[Any, "i4", 2]  # (rows, read): tokens, best first; -1 after the last
    logs: Annotated[Any, "f4", 2]  # (rows, read): logarithms of their probabilities
    tokens: Annotated[Any, "i4", 2]  # (rows, GUESSES): the tokens that are proposed; -1 after the last
    kinds: Annotated[Any, "i4", 2]  # (rows, GUESSES): their buckets
    scores: Annotated[Any, "f4", 1]  # (GUESSES,): scratch space


class Memory(NamedTuple):
    """Everything that ``grow`` and ``learn`` read and write."""

    tree: Tree
    texts: tuple[TextEnd, TextEnd]
    cache: Cache
    base: Trie
    calibration: Calibration
    step: Annotated[Any, STEP, 1]  # (1,) STEP
    # (rows + 1,): c(k), the cost of a step of k rows in plain steps; 1 for every k if the rows are fixed
    costs: Annotated[Any, "f8", 1]
    # (rows + 1,): the smallest cost per additional row, from k to any larger number
    slopes: Annotated[Any, "f8", 1]
    # (depths, ANSWERS): the last step's tokens at each depth, likeliest first; -1 for none
    answers: Annotated[Any, "i8", 2]
    # (positions, V): Gumbel noise by position, stored at position modulo positions; empty unless ``BY_ARRAY``
    noise: Annotated[Any, "f4", 2]
    # (positions,): the position whose noise each entry contains; -1 for none
    noise_positions: Annotated[Any, "i8", 1]
    # (2 + 2 * rows,): set by ``grow``: how many rows pay off, the number of rows, and the token and parent of each
    drafted: Annotated[Any, "i8", 1]
    path: Annotated[Any, "i8", 1]  # (rows,): the accepted rows of the last step
    tokens: Annotated[Any, "i8", 1]  # (rows,): the target's token under each of them
    # (rows,): the target's token under each row of the last step; filled in by ``learn``
    own: Annotated[Any, "i8", 1]
    guesses: Guesses
    credit: Annotated[Any, "i8", 1]  # accepted tokens by ``learn.CREDITED``; added to by ``learn``


unpack = unpack_as(Memory)


@compiled
def noise_of(memory: Memory, depth: int, token: int) -> Any:
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


def new_tree(rows: int, proposals: int) -> Tree:
    """Memory for a tree of at most ``rows`` rows with at most ``proposals`` proposed children each."""
    return Tree(
        np.zeros(rows, NODE),
        np.zeros((rows, proposals), PROPOSAL),
        np.zeros((rows, proposals), EDGE),
        np.zeros((2, rows, MATCHES), MATCH),
        np.zeros((2, rows), np.int64),
        np.zeros(rows + 2, HEAP_ENTRY),
        np.zeros(1, SIZES),
    )

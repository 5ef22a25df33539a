"""Growing the token tree of the adaptive drafter from all sources.

The estimated probability that verification reaches a node is the product of the estimates along its path, and
F(tree) = 1 + the sum of these products is the expected number of tokens of the step. A child is never likelier than
its parent, so taking nodes in order of decreasing probability gives the best tree of every size (best-first search).

An example with six rows and edge probabilities from the calibration. The root R has the children a (0.6),
b (0.32) and c (0.05); a has d (0.8) and e (0.1); d has f (0.9).

The heap has two kinds of entries. ``R.a 0.60`` is an edge, with the probability of its whole path; only the best
remaining edge of each node is in the heap. ``a? 0.30`` is a row whose sources have not been asked. It enters with
half of its probability (EXPANSION_FACTOR), because its best child is usually less than half as likely, and its
sources are asked when the entry is the largest in the heap.

    popped      what happens                                 heap afterwards                              rows
    (start)     the root is a row to ask                     R? 1.00                                      R
    R? 1.00     ask the sources under R; push its best edge  R.a 0.60                                     R
    R.a 0.60    a is row 1; R's next edge; a is to be asked  R.b 0.32, a? 0.30                            R a
    R.b 0.32    b is row 2, R's next edge; b is to be asked  a? 0.30, b? 0.16, R.c 0.05                   R a b
    a? 0.30     a's edges: 0.6 * 0.8 and 0.6 * 0.1           a.d 0.48, b? 0.16, R.c 0.05                  R a b
    a.d 0.48    d is row 3; a's next edge                    d? 0.24, b? 0.16, a.e 0.06, R.c 0.05         R a b d
    d? 0.24     d's edge: 0.48 * 0.9                         d.f 0.43, b? 0.16, a.e 0.06, R.c 0.05        R a b d
    d.f 0.43    f is row 4                                   f? 0.22, b? 0.16, a.e 0.06, R.c 0.05         R a b d f
    f? 0.22     nothing is proposed under f                  b? 0.16, a.e 0.06, R.c 0.05                  R a b d f
    b? 0.16     nothing is proposed under b                  a.e 0.06, R.c 0.05                           R a b d f
    a.e 0.06    e is row 5: six rows, the tree is complete                                                R a b d f e

Row 2 (b, 0.32) was taken before row 3 (d, 0.48), which is the price of the factor 0.5. With the factor 1, the order
is exact, but sources are asked under more rows.
"""

from __future__ import annotations

from typing import Any

from ...machine_code import compiled, entry, int64
from .calibration import MAX_PROBABILITY, NOTHING, OTHER, STATES, ZONE
from .layout import BY_ARRAY, MATCHES, TO_ASK, index_of
from .memory import Memory
from .rows import choose, pays
from .sources import SOURCES
from .sources.source import TextSource, chain

#: The sources are asked under a row once its probability times this factor is the largest in the heap.
EXPANSION_FACTOR = 0.5
#: Return values of ``grow_tree``: the tree is complete, the row ``step.wanted`` needs noise, or, from
#: ``SERVICE_WANTED`` on, the source with that number must serve the row.
COMPLETE, NOISE_WANTED, SERVICE_WANTED = 0, 1, 2
#: Edges with a smaller probability are ignored.
MIN_PROBABILITY = 0.002


#: Number of text sources.
TEXTS = sum(issubclass(source, TextSource) for source in SOURCES)
_propose, _refine, _wants = (chain(SOURCES, name) for name in ("propose", "refine", "wants"))


@compiled
def _match_level(memory: Memory, node: int, token: int) -> int:
    """The highest confidence level of a token by the text sources; -1 if none proposes it.

    If ``token`` is -1, the highest level of any proposed token.
    """
    level = int64(-1)
    for number in range(TEXTS):
        for index in range(MATCHES):
            proposed = memory.tree.matches[number, node, index]
            if proposed.token < 0:
                break
            if token < 0 or proposed.token == token:
                level = max(level, int64(proposed.level))
    return level


@compiled
def ask(memory: Memory, node: int) -> None:
    """Collect the proposals of all sources under a row, and select their joint buckets."""
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    zone = 0 if row.depth == 0 else ZONE if row.depth < 3 else 2 * ZONE
    row.recalled = 0
    row.rest = NOTHING
    _propose(memory, node)

    # First the proposals of the logit cache and the base table, each with the state of the text sources.
    best = _match_level(memory, node, -1)
    unmatched = zone + (OTHER + best if best >= 0 else NOTHING) * STATES
    count = int64(row.recalled)
    for index in range(count):
        proposal = proposals[index]
        level = _match_level(memory, node, int64(proposal.token))
        proposal.joint = proposal.level + (zone + level * STATES if level >= 0 else unmatched)

    # Then the tokens that only text sources propose.
    for number in range(TEXTS):
        for proposed in memory.tree.matches[number, node]:
            if proposed.token < 0:
                break
            if index_of(proposals, count, int64(proposed.token)) < 0:
                level = _match_level(memory, node, int64(proposed.token))
                proposals[count].token, proposals[count].source = proposed.token, number
                proposals[count].joint = zone + level * STATES + row.rest
                count += 1
    for index in range(count):
        proposals[index].probability = memory.joint[proposals[index].joint].probability
    row.rest += unmatched
    row.proposals = count
    row.asked = 1
    _refine(memory, node)


@compiled
def _expand(memory: Memory, node: int) -> int:
    """Sort the edges of a node whose sources have been asked, likeliest first. Returns the number of edges."""
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    edges = memory.tree.edges[node]

    # Scale the probabilities if their sum exceeds the limit.
    total = 0.0
    for i in range(row.proposals):
        total += proposals[i].probability
    scale = row.probability if total <= MAX_PROBABILITY else row.probability * MAX_PROBABILITY / total

    # Insertion sort by the probability of the path, then by token.
    count = 0
    for i in range(row.proposals):
        own = proposals[i].probability
        token = proposals[i].token
        if own > MIN_PROBABILITY:
            probability = own * scale
            index = count
            while index > 0:
                before = edges[index - 1]
                if before.probability > probability:
                    break
                if before.probability == probability and before.token <= token:
                    break
                edges[index].probability, edges[index].token = before.probability, before.token
                index -= 1
            edges[index].probability, edges[index].token = probability, token
            count += 1
    row.edges = count
    return count


@compiled
def _before(waiting: Any, probability: float, row: int, edge: int) -> bool:
    """Whether an entry of the heap comes before the given one.

    At equal probability, rows to ask come first, latest first; then edges, by row.
    """
    if waiting.probability != probability:
        return bool(waiting.probability > probability)
    if waiting.edge == TO_ASK or edge == TO_ASK:
        return bool(waiting.edge == TO_ASK and (edge != TO_ASK or waiting.row > row))
    if waiting.row != row:
        return bool(waiting.row < row)
    return bool(waiting.edge < edge)


@compiled
def _comes_first(heap: Any, one: int, other: int) -> bool:
    """Whether one entry of the heap comes before another."""
    entry = heap[other]
    return _before(heap[one], entry.probability, int64(entry.row), int64(entry.edge))


@compiled
def _set(entry: Any, probability: float, row: int, edge: int) -> None:
    entry.probability = probability
    entry.row = row
    entry.edge = edge


@compiled
def _copy(heap: Any, to: int, source: int) -> None:
    entry = heap[source]
    _set(heap[to], entry.probability, int64(entry.row), int64(entry.edge))


@compiled
def _replace_first(heap: Any, size: int, probability: float, row: int, edge: int) -> None:
    """Replace the first entry of a heap of ``size`` entries (sift down)."""
    index = 0
    while 2 * index + 1 < size:
        below = 2 * index + 1
        right = below + 1
        if right < size and _comes_first(heap, right, below):
            below = right
        if not _before(heap[below], probability, row, edge):
            break
        _copy(heap, index, below)
        index = below
    _set(heap[index], probability, row, edge)


@compiled
def _drop_first(sizes: Any, heap: Any) -> None:
    sizes.heap -= 1
    last = heap[sizes.heap]
    _replace_first(heap, sizes.heap, last.probability, int64(last.row), int64(last.edge))


@compiled
def _push(heap: Any, size: int, probability: float, row: int, edge: int) -> None:
    index = size
    while index > 0:
        above = (index - 1) // 2
        if _before(heap[above], probability, row, edge):
            break
        _copy(heap, index, above)
        index = above
    _set(heap[index], probability, row, edge)


@compiled
def add(memory: Memory, parent: int, token: int, probability: float) -> int:
    """Append a row to the tree. Returns its depth."""
    tree = memory.tree
    step = memory.step[0]
    node = tree.sizes[0].rows
    row = tree.nodes[node]
    above = step.previous
    depth = int64(0)
    if parent >= 0:
        above = int64(tree.nodes[parent].token)
        depth = int64(tree.nodes[parent].depth) + 1
    row.token = token
    row.parent = parent
    row.depth = depth
    row.probability = probability
    row.pair = above * step.vocabulary + token
    row.asked = 0
    row.guess = -1
    for number in range(TEXTS):
        tree.contexts[number, node] = -1
    tree.sizes[0].rows = node + 1
    return depth


@compiled
def lacks_noise(memory: Memory, depth: int) -> bool:
    """Whether the noise for tokens under nodes of this depth is needed but not in ``memory.noise`` yet."""
    if memory.step[0].sampled != BY_ARRAY:
        return False
    position = memory.step[0].position + depth
    return bool(memory.noise_positions[position % len(memory.noise_positions)] != position)


@compiled
def _take(memory: Memory, limit: int, max_depth: int) -> int:
    """Take rows from the heap, likeliest first, until the tree is complete. Returns what ``grow_tree`` does."""
    tree = memory.tree
    sizes = tree.sizes[0]
    nodes = tree.nodes
    heap = tree.heap
    while sizes.heap > 0 and sizes.rows < limit:
        probability, node, edge = heap[0].probability, int64(heap[0].row), int64(heap[0].edge)
        # A row to ask: its likeliest edge takes its place in the heap.
        if edge == TO_ASK:
            memory.step[0].wanted = node
            if lacks_noise(memory, int64(nodes[node].depth)):
                return NOISE_WANTED
            ask(memory, node)
            number: int = _wants(memory, node)
            if number >= 0:
                return SERVICE_WANTED + number
            if _expand(memory, node):
                _replace_first(heap, sizes.heap, tree.edges[node, 0].probability, node, 0)
            else:
                _drop_first(sizes, heap)
            continue
        # An edge: it becomes a row, and the next edge of its parent takes its place.
        if not pays(memory, sizes.rows, probability):
            break
        token = int64(tree.edges[node, edge].token)
        if edge + 1 < nodes[node].edges:
            _replace_first(heap, sizes.heap, tree.edges[node, edge + 1].probability, node, edge + 1)
        else:
            _drop_first(sizes, heap)
        row = sizes.rows
        depth = add(memory, node, token, probability)
        if depth < max_depth:
            _push(heap, sizes.heap, probability * memory.step[0].expansion_factor, row, TO_ASK)
            sizes.heap += 1
    return COMPLETE


@entry
def grow_tree(memory: Memory, limit: int, max_depth: int, rate: float, fresh: bool) -> int:
    """Grow a tree of at most ``limit`` nodes and depth ``max_depth``, and fill in ``memory.drafted``.

    Growth ends early when no further row can pay off (``rows.pays``).

    Args:
        rate: r; see ``rows``.
        fresh: whether to begin a new tree.

    Returns:
        ``COMPLETE``; ``NOISE_WANTED`` if the noise at the depth of the row ``step.wanted`` is not in ``memory.noise``
        yet; ``SERVICE_WANTED`` plus the number of a source that must serve that row (``Source.serve``). The caller
        then provides it and calls again with ``fresh`` False to continue the same tree.
    """
    tree = memory.tree
    step = memory.step[0]
    step.rate = rate
    if fresh:
        tree.sizes[0].rows = 0
        add(memory, -1, step.last, 1.0)
        _set(tree.heap[0], 1.0, 0, TO_ASK)
        tree.sizes[0].heap = 1
    result = _take(memory, limit, max_depth) if max_depth >= 1 else COMPLETE
    if result == COMPLETE:
        drafted = memory.drafted
        drafted[0], drafted[1] = choose(memory), tree.sizes[0].rows
        for row in range(drafted[1]):
            drafted[2 + 2 * row] = tree.nodes[row].token
            drafted[3 + 2 * row] = tree.nodes[row].parent
    return result

"""Grow one token tree from all sources, the likeliest rows first.

The estimated probability that the target walks through a node is the product of its edges' estimates, and
F(tree) = 1 + the sum of these is the expected number of tokens of the step. A child is never likelier than its
parent, so taking nodes in order of probability gives the best tree of every size.
"""

from __future__ import annotations

from typing import Any

from .arrays import CORPUS, SUFFIX, Calibration, Rules, Sources, Tree
from .calibration import (
    AGREEMENT,
    ANSWERED_BEST,
    ANSWERED_LATER,
    MAX_PROBABILITY,
    NOTHING,
    OTHER,
    STATES,
    ZONE,
)
from .compiling import compiled, entry, int64
from .sources.logit_cache import propose
from .sources.suffix import match

#: A node is expanded when its probability times this comes up; most best children are not surer.
HASTE = 0.5
#: Edges less likely than this are not worth a place in the heap.
MIN_PROBABILITY = 0.002
#: Most edges of one node.
MAX_EDGES = 128


@compiled
def place_among(tokens: Any, count: int, token: int) -> int:
    """Place of a token among the first ``count`` records, or -1; a token -1 ends them before."""
    for place in range(count):
        if tokens[place].token == token:
            return place
        if tokens[place].token < 0:
            break
    return -1


@compiled
def _match_level(tree: Tree, calibration: Calibration, node: int, token: int) -> int:
    """Confidence in a token (-1: in any) by suffix matches, here and in the corpus; -1 where none proposes it."""
    level = -1
    for source in (SUFFIX, CORPUS):
        for found in tree.matches[source, node]:
            if found.token < 0:
                break
            if token < 0 or found.token == token:
                level = max(level, calibration.matches[source, found.bucket].level)
    return level


@compiled
def ask(tree: Tree, sources: Sources, calibration: Calibration, rules: Rules, node: int) -> None:
    """Ask all sources: tokens of the logit cache come first, then matches, then the last step's answers."""
    row, proposals = tree.nodes[node], tree.proposals[node]
    zone = 0 if row.depth == 0 else ZONE if row.depth < 3 else 2 * ZONE
    match(sources.texts[SUFFIX], tree, SUFFIX, node)
    match(sources.texts[CORPUS], tree, CORPUS, node)
    propose(tree, sources, rules, node)
    best = _match_level(tree, calibration, node, -1)
    unmatched = zone + (OTHER + best if best >= 0 else NOTHING) * STATES
    count, uncached = row.cached, NOTHING
    for place in range(count):
        proposal = proposals[place]
        confidence = calibration.logits[row.order, proposal.kind].level
        level = _match_level(tree, calibration, node, proposal.token)
        proposal.joint = confidence + (zone + level * STATES if level >= 0 else unmatched)
        if place == 0:
            uncached = OTHER + confidence
    for source in (SUFFIX, CORPUS):
        for found in tree.matches[source, node]:
            if found.token < 0:
                break
            if place_among(proposals, count, found.token) < 0:
                level = _match_level(tree, calibration, node, found.token)
                proposals[count].token = found.token
                proposals[count].joint = zone + level * STATES + uncached
                count += 1
    if row.depth < len(sources.answers):
        answered = ANSWERED_BEST
        for token in sources.answers[row.depth]:
            if token < 0:
                break
            place = place_among(proposals, count, token)
            if place < 0:
                place = count
                proposals[place].token, proposals[place].joint = token, unmatched + uncached
                count += 1
            proposals[place].joint += answered * AGREEMENT
            answered = ANSWERED_LATER
    row.proposals, row.asked = count, 1


@compiled
def _expand(tree: Tree, sources: Sources, calibration: Calibration, rules: Rules, node: int) -> int:
    """Find the edges under a node, the likeliest first; returns their number."""
    ask(tree, sources, calibration, rules, node)
    row, proposals, edges = tree.nodes[node], tree.proposals[node], tree.edges[node]
    total = 0.0
    for i in range(row.proposals):
        total += calibration.joint[proposals[i].joint].probability
    scale = -row.probability if total <= MAX_PROBABILITY else -row.probability * MAX_PROBABILITY / total
    count = 0
    for i in range(row.proposals):
        probability, token = calibration.joint[proposals[i].joint].probability, proposals[i].token
        if probability > MIN_PROBABILITY:
            cost = probability * scale
            place = count
            while place > 0 and (
                edges[place - 1].cost > cost
                or (edges[place - 1].cost == cost and edges[place - 1].token > token)
            ):
                edges[place].cost, edges[place].token = edges[place - 1].cost, edges[place - 1].token
                place -= 1
            edges[place].cost, edges[place].token = cost, token
            count += 1
    row.edges = count
    return count


@compiled
def _before(one: Any, cost: float, number: int) -> bool:
    """Whether an entry of the heap comes before another."""
    return bool(one.cost < cost or (one.cost == cost and one.number < number))


@compiled
def _replace_first(heap: Any, size: int, cost: float, number: int) -> None:
    """Put an entry in place of a heap's first."""
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _before(heap[below + 1], heap[below].cost, heap[below].number):
            below += 1
        if not _before(heap[below], cost, number):
            break
        heap[place].cost, heap[place].number = heap[below].cost, heap[below].number
        place = below
    heap[place].cost, heap[place].number = cost, number


@compiled
def _drop_first(progress: Any, heap: Any) -> None:
    progress.heap -= 1
    _replace_first(heap, progress.heap, heap[progress.heap].cost, heap[progress.heap].number)


@compiled
def _push(heap: Any, size: int, cost: float, number: int) -> None:
    place = size
    while place > 0:
        above = (place - 1) // 2
        if _before(heap[above], cost, number):
            break
        heap[place].cost, heap[place].number = heap[above].cost, heap[above].number
        place = above
    heap[place].cost, heap[place].number = cost, number


@compiled
def add(tree: Tree, rules: Rules, parent: int, token: int, probability: float) -> int:
    """A new row; returns its depth."""
    node = tree.progress[0].rows
    row = tree.nodes[node]
    above, depth = rules.tail[1], 0
    if parent >= 0:
        above, depth = int64(tree.nodes[parent].token), int64(tree.nodes[parent].depth) + 1
    row.token, row.parent, row.depth, row.probability = token, parent, depth, probability
    row.pair = above * rules.vocabulary + token
    row.asked = 0
    tree.places[0, node] = tree.places[1, node] = -1
    tree.progress[0].rows = node + 1
    return depth


@compiled
def _take(
    tree: Tree, sources: Sources, calibration: Calibration, rules: Rules, rows: int, max_depth: int, stop: Any
) -> int:
    """Take nodes from the heap while they are likely enough; returns the depth of missing noise, or -1."""
    progress, nodes, heap = tree.progress[0], tree.nodes, tree.heap
    while progress.heap > 0 and progress.rows < rows:
        cost, number = heap[0].cost, heap[0].number
        if number < 0:
            node = ~number
            position = rules.position + nodes[node].depth
            if rules.sampled and sources.known[position % len(sources.known)] != position:
                return int64(nodes[node].depth)
            if _expand(tree, sources, calibration, rules, node):
                _replace_first(heap, progress.heap, tree.edges[node, 0].cost, node * MAX_EDGES)
            else:
                _drop_first(progress, heap)
            continue
        if -cost < stop[progress.rows]:
            break
        node, place = number // MAX_EDGES, number % MAX_EDGES
        token = tree.edges[node, place].token
        if place + 1 < nodes[node].edges:
            _replace_first(heap, progress.heap, tree.edges[node, place + 1].cost, number + 1)
        else:
            _drop_first(progress, heap)
        row = progress.rows
        depth = add(tree, rules, node, token, -cost)
        if depth < max_depth:
            _push(heap, progress.heap, cost * rules.haste, ~row)
            progress.heap += 1
    return -1


@entry
def grow(
    tree: Tree,
    sources: Sources,
    calibration: Calibration,
    rules: Rules,
    rows: int,
    max_depth: int,
    stop: Any,
    fresh: bool,
) -> int:
    """Grow a tree of at most ``rows`` nodes, which ends where row k's probability is below ``stop[k]``.

    Returns the depth whose noise must be handed in first (then it goes on where it is not ``fresh``), or minus the
    number of rows.
    """
    if fresh:
        tree.progress[0].rows = 0
        add(tree, rules, -1, rules.tail[2], 1.0)
        tree.heap[0].cost, tree.heap[0].number = -1.0, ~0
        tree.progress[0].heap = 1
    depth = _take(tree, sources, calibration, rules, rows, max_depth, stop) if max_depth >= 1 else -1
    return depth if depth >= 0 else -int64(tree.progress[0].rows)

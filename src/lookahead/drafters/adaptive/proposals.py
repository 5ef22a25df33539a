"""What all sources propose behind a row of the tree, and the joint bucket of each proposed token."""

from __future__ import annotations

from typing import Any

from .arrays import CORPUS, SUFFIX, Calibration, Rules, Sources, Tree
from .buckets import AGREEMENT, ANSWERED_BEST, ANSWERED_LATER, NOTHING, OTHER, STATES, ZONE
from .compiling import compiled
from .sources.logit_cache import propose
from .sources.suffix import match


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
    """Confidence in a token by suffix matches, here and in the corpus; -1 where neither proposes it."""
    level = -1
    for source in (SUFFIX, CORPUS):
        for found in tree.matches[source, node]:
            if found.token < 0:
                break
            if found.token == token:
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
    best = -1
    for source in (SUFFIX, CORPUS):
        for found in tree.matches[source, node]:
            if found.token < 0:
                break
            best = max(best, calibration.matches[source, found.bucket].level)
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

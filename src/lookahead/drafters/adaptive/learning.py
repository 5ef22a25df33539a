"""Learn from a step: what the proposals were worth, and what the target said behind every row."""

from __future__ import annotations

import numpy as np

from .arrays import ANSWERS, CORPUS, MATCHES, SUFFIX, Calibration, Rules, Sources, Step, Tree
from .calibration import KINDS, WINDOW, learn
from .compiling import compiled, entry, int64
from .growth import add, ask, place_among
from .sources.logit_cache import write_rows

#: Whose proposals are credited with accepted tokens: the sources, and the window for rows that it explored.
CREDITED = ("suffix", "logits", "jacobi", "corpus", "window")
BY_SUFFIX, BY_LOGITS, BY_ANSWERS, BY_CORPUS, BY_WINDOW = range(5)


@compiled
def _source_of(tree: Tree, node: int, right: int, matched: int, recalled: int) -> int:
    """The source of an accepted token; the most telling one of several."""
    row = tree.nodes[node]
    if matched == 0:
        return BY_SUFFIX
    if recalled == 0:
        return BY_CORPUS
    if 0 <= right < row.cached:
        origin = tree.proposals[node, right].kind // KINDS % 3
        return BY_WINDOW if origin == WINDOW else BY_LOGITS
    if matched > 0:
        return BY_SUFFIX
    if recalled > 0:
        return BY_CORPUS
    return BY_ANSWERS if right >= 0 else BY_WINDOW


@compiled
def _judge_matches(tree: Tree, calibration: Calibration, source: int, node: int, truth: int) -> int:
    """Judge the suffix matches at a node; returns the place of the right one, or -1."""
    matches = tree.matches[source, node]
    right = place_among(matches, MATCHES, truth)
    for place in range(MATCHES):
        if matches[place].token < 0:
            break
        learn(calibration.matches[source, matches[place].bucket], place == right)
    return right


@compiled
def _judge(tree: Tree, sources: Sources, calibration: Calibration, rules: Rules, step: Step) -> int:
    """Judge every proposal at the visited nodes; returns tokens accepted because of the window."""
    by_window = 0
    for i in range(len(step.path)):
        node, truth = step.path[i], step.tokens[i]
        row, proposals = tree.nodes[node], tree.proposals[node]
        if row.asked == 0:
            ask(tree, sources, calibration, rules, node)
        right = place_among(proposals, row.proposals, truth)
        for place in range(row.proposals):
            learn(calibration.joint[proposals[place].joint], place == right)
        for place in range(row.cached):
            learn(calibration.logits[row.order, proposals[place].kind], place == right)
        matched = _judge_matches(tree, calibration, SUFFIX, node, truth)
        recalled = _judge_matches(tree, calibration, CORPUS, node, truth)
        if i < len(step.path) - 1:
            source = _source_of(tree, node, right, matched, recalled)
            step.credit[source] += 1
            by_window += 1 if source == BY_WINDOW else 0
    return by_window


@compiled
def _find_own(tree: Tree, sources: Sources, rules: Rules, step: Step) -> None:
    """By row the target's own token there, as far as it can be told: the argmax, or that under the noise."""
    noise, temperature = sources.noise, np.float32(rules.temperature)
    for node in range(tree.progress[0].rows):
        best = 0
        if rules.sampled:
            row = noise[(rules.position + tree.nodes[node].depth) % len(noise)]
            highest = np.float32(-np.inf)
            for i in range(step.ids.shape[1]):
                token = step.ids[node, i]
                if 0 <= token < len(row):
                    score = step.odds[node, i] / temperature + row[token]
                    if score > highest:
                        highest, best = score, i
        step.own[node] = step.ids[node, best]


@compiled
def _keep_answers(tree: Tree, sources: Sources, step: Step) -> None:
    """By depth below the next root what this step's rows answered there, likeliest rows first."""
    answers = sources.answers
    answers[:] = -1
    for node in range(tree.progress[0].rows):
        depth = tree.nodes[node].depth - len(step.path)
        if 0 <= depth < len(answers):
            for place in range(ANSWERS):
                if answers[depth, place] == step.own[node]:
                    break
                if answers[depth, place] < 0:
                    answers[depth, place] = step.own[node]
                    break


@entry
def study(
    tree: Tree,
    sources: Sources,
    calibration: Calibration,
    rules: Rules,
    step: Step,
    rows: int,
    window_start: int,
) -> int:
    """Learn all that a step can teach; returns tokens accepted because of the window, whose first row is given.

    Of the tree's rows that others have added, token and parent are in place. ``own`` and ``credit`` are filled in.
    """
    for node in range(tree.progress[0].rows, rows):
        add(tree, rules, int64(tree.nodes[node].parent), int64(tree.nodes[node].token), 0.0)
    by_window = _judge(tree, sources, calibration, rules, step)
    _find_own(tree, sources, rules, step)
    if rules.use_logits:
        write_rows(tree, sources.cache, rules, step, window_start)
    if rules.use_answers:
        _keep_answers(tree, sources, step)
    return by_window

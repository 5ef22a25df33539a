"""Builds base tables (``drafters.adaptive.sources.base_table``) from a model's own text, from a corpus, or from both.

The entry of each context of one, two or three tokens is the mean of the target's probabilities over all occurrences
of the context, with the entry of the next shorter context (without the first token) as one more occurrence. In a
corpus, which has no probabilities, the next token has probability 1. A tenth of a model's own texts is first held out
to count how often proposals of each kind are right; then the final table is built from all texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..core import SettingsError
from ..drafters.adaptive.calibration import ORDERS
from ..drafters.adaptive.sources import base_table
from ..drafters.adaptive.sources.base_table import ABSENT, ARRAYS, BASE_AXES, STEP, Trie
from .self_text import TEMPERATURE
from .text_parts import Text

#: Number of best tokens per position that enter the means.
READ = 10
#: Number of tokens per entry. Twice the contexts of half the tokens draft as well with 4 rows, and better with 8.
WIDTH = 4
#: Largest number of contexts of a table, whose file then has at most 12 MB. Those whose entries say most are kept.
MOST_CONTEXTS = 480_000
#: The smallest number of weighted occurrences of a context of two or three tokens beside a corpus; others are left
#: out early, because sorting them would take most of the time.
LEAST_COUNT = 2
#: Weight of an occurrence in a model's own text beside a corpus, where it counts as one. On code, four are worth 0.02
#: of S more than one or two; on prose, the weight makes no difference.
OWN = 4.0
#: Weight of the shorter context's entry, in occurrences.
SHORTER = 1.0
#: Weights are rounded to multiples of this, whose sums are the same in any order.
GRAIN = 2.0**-30
#: Smallest probability to store.
LEAST = 0.004
#: Of every ``HELD_OUT`` runs of ``HELD_OUT`` consecutive texts, the last run is held out; runs contain all kinds of
#: text.
HELD_OUT = 10
#: Largest number of initial trials per bucket, so that a request's own tokens still matter.
MOST_TRIALS = 100.0
#: Largest number of held-out positions at which proposals are counted.
MOST_PLACES = 20_000

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Places:
    """All positions of a text's completions that have three tokens before them.

    Attributes:
        contexts: (n, 3) int64, the last three tokens.
        ids, probabilities: (n, k), the target's best tokens and their probabilities; k is READ for a model's own
            text, and 1 for a corpus, of which only the next token is known.
        greedy: (n,), whether the text is greedy.
        held_out: (n,), whether the text is held out.
    """

    contexts: Array
    ids: Array
    probabilities: Array
    greedy: Array
    held_out: Array

    @classmethod
    def of(cls, texts: Iterable[Text]) -> Places:
        """The positions of these texts."""
        contexts, ids, probabilities, greedy, held_out = ([] for _ in range(5))
        for text in texts:
            whole = np.array([*text.prompt, *text.completion], np.int64)
            start = len(text.prompt)
            skipped = max(0, ORDERS - start)
            count = len(text.completion) - skipped
            if count <= 0:
                continue
            first = start + skipped - ORDERS
            windows = np.lib.stride_tricks.sliding_window_view(whole, ORDERS)
            contexts.append(windows[first : first + count])
            ids.append(text.ids[skipped:, :READ])
            probabilities.append(np.exp(text.logprobs[skipped:, :READ].astype(np.float32)))
            greedy.append(np.full(count, text.temperature == 0))
            held_out.append(np.full(count, text.number // HELD_OUT % HELD_OUT == HELD_OUT - 1))
        if not contexts:
            empty = np.zeros((0, READ))
            return cls(
                np.zeros((0, ORDERS), np.int64), empty.astype(np.int32), empty, *[np.zeros(0, bool)] * 2
            )
        parts = (contexts, ids, probabilities, greedy, held_out)
        return cls(*(np.concatenate(part) for part in parts))

    @classmethod
    def of_corpus(cls, texts: Sequence[Array]) -> Places:
        """The positions of texts of token ids, each with probability 1 for the next token."""
        texts = [text for text in texts if len(text) > ORDERS]
        if not texts:
            return cls.of([])
        tokens = np.concatenate(texts).astype(np.int64)
        starts = np.cumsum([0, *(len(text) for text in texts[:-1])])
        inside = np.ones(len(tokens), bool)
        inside[starts[:, None] + np.arange(ORDERS)] = False
        at = np.flatnonzero(inside)
        contexts = tokens[at[:, None] + np.arange(-ORDERS, 0)]
        return cls(contexts, tokens[at, None], np.ones((len(at), 1)), *np.zeros((2, len(at)), bool))

    def __len__(self) -> int:
        return len(self.contexts)

    def where(self, chosen: Array) -> Places:
        """The chosen positions."""
        return Places(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Level:
    """The entries of all contexts of one length.

    Attributes:
        keys: (n,), the contexts as numbers with their tokens as digits in base V, ascending.
        counts: (n,), number of occurrences of each, weighted.
        ids, probabilities: (n, WIDTH), best first; -1 and 0 after the last.
        gains: (n,), how much each entry differs from the shorter context's, summed over its occurrences.
    """

    keys: Array
    counts: Array
    ids: Array
    probabilities: Array
    gains: Array


def _means(groups: Array, ids: Array, weights: Array, vocabulary: int, count: int) -> tuple[Array, Array]:
    """The WIDTH largest sums of weights by group and token: (ids, sums), each (count, WIDTH).

    Of equal sums, that of the smaller id comes first.
    """
    keys = groups * vocabulary + ids
    order = np.argsort(keys)
    keys = keys[order]
    firsts = _firsts(keys)
    sums = np.add.reduceat(np.round(weights[order] / GRAIN) * GRAIN, firsts)
    groups, ids = np.divmod(keys[firsts], vocabulary)

    # Groups are small, so taking the largest sum of each WIDTH times is faster than sorting them.
    best_ids = np.full((count, WIDTH), -1, np.int64)
    best = np.zeros((count, WIDTH))
    for rank in range(WIDTH):
        if not len(groups):
            break
        starts = _firsts(groups)
        largest = np.maximum.reduceat(sums, starts)
        at = np.flatnonzero(sums == np.repeat(largest, np.diff(starts, append=len(groups))))
        at = at[_firsts(groups[at])]
        best_ids[groups[at], rank] = ids[at]
        best[groups[at], rank] = sums[at]
        left = np.ones(len(groups), bool)
        left[at] = False
        groups, ids, sums = groups[left], ids[left], sums[left]
    return best_ids, best


def _firsts(values: Array) -> Array:
    """Where runs of equal values begin."""
    return np.flatnonzero(np.r_[True, values[1:] != values[:-1]][: len(values)])


def levels_in(trie: Trie, vocabulary: int) -> list[Level]:
    """The entries of a trie, at most WIDTH tokens of each, whose contexts are numbered with this V; ``trie_of`` keeps
    them first."""
    starts = [0, int(trie.children[0]), int(trie.children[trie.children[0]]), len(trie.low)]
    levels = []
    for keys, begin, end in zip(keys_of(trie, vocabulary), starts[:-1], starts[1:], strict=True):
        at = np.flatnonzero(trie.counts[begin:end])
        nodes = begin + at
        logs = trie.logs[nodes, :WIDTH]
        there = logs != ABSENT
        ids = trie.ids_high[nodes, :WIDTH].astype(np.int64) << 16 | trie.ids_low[nodes, :WIDTH]
        probabilities = np.exp(-(logs * STEP)) * there
        counts = trie.counts[nodes].astype(float)
        levels.append(
            Level(keys[at], counts, np.where(there, ids, -1), probabilities, np.full(len(at), np.inf))
        )
    return levels


def keys_of(trie: Trie, vocabulary: int) -> list[Array]:
    """The contexts of each level as numbers with their tokens as digits in base V, ascending."""
    tokens = trie.high.astype(np.int64) << 16 | trie.low
    children = trie.children.astype(np.int64)
    starts = [0, int(children[0]), int(children[children[0]]), len(tokens)]
    keys = [tokens[: starts[1]]]
    for level in range(1, ORDERS):
        parents = children[starts[level - 1] : starts[level] + 1]
        keys.append(
            np.repeat(keys[-1], np.diff(parents)) * vocabulary + tokens[starts[level] : starts[level + 1]]
        )
    return keys


def levels_of(
    parts: Sequence[Places],
    vocabulary: int,
    weights: Sequence[float] | None = None,
    least: float = 0.0,
    known: Sequence[Level] | None = None,
) -> list[Level]:
    """The entries of all contexts of one, two and three tokens.

    Args:
        parts: positions of different kinds of text.
        vocabulary: V.
        weights: of an occurrence in each part; 1 by default.
        least: the smallest count of a context of two or three tokens; others are left out.
        known: entries counted earlier, which count as that many more occurrences of their contexts.
    """
    given = np.repeat(weights if weights is not None else np.ones(len(parts)), [len(part) for part in parts])
    contexts = np.concatenate([part.contexts for part in parts])
    levels = list[Level]()
    keys = np.zeros(len(contexts), np.int64)
    digit = 1
    for order in range(ORDERS):
        keys = keys + contexts[:, ORDERS - 1 - order] * digit
        digit *= vocabulary
        unique, group = np.unique(keys, return_inverse=True)
        counts = np.bincount(group, given, len(unique))
        if order and least:
            kept = counts >= least
            group = np.where(kept[group], (np.cumsum(kept) - 1)[group], -1)
            unique, counts = unique[kept], counts[kept]

        # The probabilities at all occurrences, each in the group of its context.
        groups, ids, sums = [], [], []
        begin = 0
        for part in parts:
            end = begin + len(part)
            there = np.flatnonzero(group[begin:end] >= 0)
            groups.append(np.repeat(group[begin:end][there], part.ids.shape[1]))
            ids.append(part.ids[there].ravel().astype(np.int64))
            sums.append((part.probabilities[there] * given[begin:end][there, None]).ravel())
            begin = end
        if known is not None:
            before = known[order]
            rows = np.searchsorted(before.keys, unique).clip(max=len(before.keys) - 1)
            same = np.flatnonzero(before.keys[rows] == unique)
            rows = rows[same]
            filled = before.ids[rows] >= 0
            groups.append(np.repeat(same, filled.sum(axis=1)))
            ids.append(before.ids[rows][filled])
            sums.append((before.probabilities[rows] * before.counts[rows][:, None])[filled])
            counts[same] += before.counts[rows]
        shorter = 0.0
        if order:
            # The shorter context's entry is one more occurrence.
            above = levels[-1]
            shorter = SHORTER
            rows = np.searchsorted(above.keys, unique % (digit // vocabulary))
            filled = above.ids[rows] >= 0
            groups.append(np.repeat(np.arange(len(unique)), WIDTH)[filled.ravel()])
            ids.append(above.ids[rows][filled])
            sums.append(SHORTER * above.probabilities[rows][filled])
        best_ids, best = _means(
            np.concatenate(groups), np.concatenate(ids), np.concatenate(sums), vocabulary, len(unique)
        )
        best /= (counts + shorter)[:, None]
        gains = counts.copy()
        if order:
            gains *= _differences(best_ids, best, above.ids[rows], above.probabilities[rows])
        levels.append(Level(unique, counts, best_ids, best, gains))
    return levels


def joined(known: Sequence[Level], new: Sequence[Level]) -> list[Level]:
    """The entries of both; those of ``new`` replace those of the same contexts."""
    levels = []
    for old, own in zip(known, new, strict=True):
        kept = ~np.isin(old.keys, own.keys)
        order = np.argsort(np.r_[old.keys[kept], own.keys])
        names = Level.__dataclass_fields__
        parts = {
            name: np.concatenate([getattr(old, name)[kept], getattr(own, name)])[order] for name in names
        }
        levels.append(Level(**parts))
    return levels


def _differences(ids: Array, probabilities: Array, others: Array, their: Array) -> Array:
    """For each row, how much more probability it gives its candidates than the other row does, in total."""
    same = (ids[:, :, None] == others[:, None, :]) & (ids >= 0)[:, :, None]
    given = (same * their[:, None, :]).sum(axis=2)
    differences: Array = np.maximum(probabilities - given, 0).sum(axis=1)
    return differences


def trie_of(levels: list[Level], vocabulary: int, most: int | None = None) -> Trie:
    """The levels as a trie.

    Args:
        levels: of one, two and three tokens.
        vocabulary: V.
        most: number of contexts to keep, approximately; those whose entries differ most from the next shorter
            context's are kept. None for all.
    """
    # Choose the contexts.
    kept = [np.ones(len(level.keys), bool) for level in levels]
    if most is not None and sum(map(len, kept)) > most:
        room = max(1, most - len(kept[0]))
        gains = np.concatenate([level.gains for level in levels[1:]])
        least = np.partition(gains, len(gains) - room)[len(gains) - room] if room < len(gains) else 0.0
        for order, level in enumerate(levels[1:], 1):
            kept[order] = level.gains >= least
    entries = [mask.copy() for mask in kept]

    # A node needs its parent, the context without its last token; a parent that was left out has no entry.
    digits = [level.keys[mask] for level, mask in zip(levels, kept, strict=True)]
    for order in (2, 1):
        digits[order - 1] = np.union1d(digits[order - 1], digits[order] // vocabulary)

    # The nodes.
    firsts = [np.searchsorted(digits[order] // vocabulary, digits[order - 1]) for order in (1, 2)]
    starts = np.cumsum([len(level) for level in digits])
    children = np.r_[firsts[0] + starts[0], firsts[1] + starts[1], starts[2]]
    roots = np.full(vocabulary, -1)
    roots[digits[0]] = np.arange(len(digits[0]))
    tokens = np.concatenate([level % vocabulary for level in digits])
    nodes = len(tokens)

    # Their entries.
    counts = np.zeros(nodes)
    ids = np.zeros((nodes, WIDTH), np.int64)
    logs = np.full((nodes, WIDTH), ABSENT)
    for order, level in enumerate(levels):
        with_entry = np.flatnonzero(entries[order])
        rows = np.searchsorted(digits[order], level.keys[with_entry]) + (starts[order - 1] if order else 0)
        probabilities = level.probabilities[with_entry]
        probabilities[:, 1:][probabilities[:, 1:] < LEAST] = 0
        there = probabilities > 0
        steps = np.round(-np.log(np.maximum(probabilities, 1e-30)) / STEP).clip(0, ABSENT - 1)
        counts[rows] = level.counts[with_entry].round().clip(1, 255)
        ids[rows] = np.where(there, level.ids[with_entry], 0)
        logs[rows] = np.where(there, steps, ABSENT)

    # The arrays of the file.
    arrays = {
        "roots": roots,
        "children": children,
        "low": tokens & 0xFFFF,
        "high": tokens >> 16,
        "counts": counts,
        "ids_low": ids & 0xFFFF,
        "ids_high": ids >> 16,
        "logs": logs,
    }
    return Trie(*(np.ascontiguousarray(arrays[name], ARRAYS[name]) for name in Trie._fields))


def count_kinds(trie: Trie, places: Places) -> dict[str, tuple[Array, Array]]:
    """(hits, trials) of the table's buckets at these positions, by "greedy" and "sampled"."""
    greedy, sampled = ((np.zeros(prod(axes)), np.zeros(prod(axes))) for axes in BASE_AXES)
    random = np.random.default_rng(0)
    for index in range(min(len(places), MOST_PLACES)):
        before, previous, last = places.contexts[index].tolist()
        node = base_table.find_entry(trie, before, previous, last)
        if node < 0:
            continue
        ids, probabilities = places.ids[index], places.probabilities[index]
        count = int((trie.logs[node] != ABSENT).sum())
        entry = [base_table.candidate(trie, node, i) for i in range(count)]
        if places.greedy[index]:
            for i, token in enumerate(entry):
                kind = base_table.greedy_kind(trie, node, i)
                greedy[1][kind] += 1
                greedy[0][kind] += token == ids[0]
            continue
        # Sampled: draw noise for the candidates of both. The target's token is the best of its own candidates.
        noise = dict(zip([*ids.tolist(), *entry], random.gumbel(size=len(ids) + count).tolist(), strict=True))
        scores = np.log(probabilities) / TEMPERATURE + [noise[token] for token in ids.tolist()]
        truth = int(ids[scores.argmax()])
        own = [
            base_table.log_odds(trie, node, i) / TEMPERATURE + noise[base_table.candidate(trie, node, i)]
            for i in range(count)
        ]
        order = sorted(range(count), key=own.__getitem__, reverse=True)
        second = own[order[1]] if count > 1 else -np.inf
        for place, i in enumerate(order):
            kind = base_table.sampled_kind(trie, node, own[order[0]], second, own[i], place == 0)
            sampled[1][kind] += 1
            sampled[0][kind] += entry[i] == truth
    return {name: limited(*part) for name, part in (("greedy", greedy), ("sampled", sampled))}


def limited(hits: Array, trials: Array) -> tuple[Array, Array]:
    """The counts of each bucket, scaled down to at most ``MOST_TRIALS`` trials."""
    scale = np.minimum(1.0, MOST_TRIALS / np.maximum(trials, 1.0))
    return hits * scale, trials * scale


def build(
    texts: Iterable[Text], vocabulary: int, most: int | None = None, corpus: Places | None = None
) -> tuple[Trie, dict[str, tuple[Array, Array]], int]:
    """(trie, counts of its buckets, number of tokens of the texts), for ``save_table``.

    Args:
        texts: a model's self-generated texts.
        vocabulary: V.
        most: largest number of contexts to keep, approximately; None for all.
        corpus: the positions of a corpus, which are counted too.

    Raises:
        SettingsError: there is too little text.
    """
    places = Places.of(texts)
    if places.held_out.all():  # also if there are none
        raise SettingsError(
            f"a table needs more of the model's own text, got {len(places)} tokens; learn longer"
        )

    def table(own: Places) -> Trie:
        if corpus is None:
            levels = levels_of([own], vocabulary)
        else:
            levels = levels_of([own, corpus], vocabulary, [OWN, 1.0], LEAST_COUNT)
        return trie_of(levels, vocabulary, most)

    counts = count_kinds(table(places.where(~places.held_out)), places.where(places.held_out))
    return table(places), counts, len(places)

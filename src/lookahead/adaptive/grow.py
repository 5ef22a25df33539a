"""Grow one token tree from all sources, the likeliest rows first.

The estimated probability that the target walks through a node is the product of its edges' estimates, and
F(tree) = 1 + the sum of these is the expected number of tokens of the step. A child is never likelier than
its parent, so taking nodes in order of probability gives the best tree of every size.

This is the drafter's hot loop: plain dicts, lists and one heap, nothing computed that is not popped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

from ..core import TokenTree
from .calibration import NOTHING, SILENT, STATES, SURE, VOICES
from .logits import under_noise
from .state import Tables
from .suffix import Context, follow, rank

ZONE = VOICES * STATES * STATES
VOICE = STATES * STATES
#: A node is expanded when its probability times this comes up; most best children are not surer.
HASTE = 0.5
#: Edges less likely than this are not worth a place in the heap.
LEAST = 0.002
Edges = list[tuple[float, int]]


class Grower:
    """One sequence's view of the sources; the caller moves it along with the text.

    Attributes, by node of the tree that was grown last, rows in order of falling probability:
        tokens, parents, depths, probabilities
    """

    def __init__(self, tables: Tables, vocabulary: int, use: Mapping[str, bool]) -> None:
        self.tables = tables
        self.vocabulary = vocabulary
        self.use = dict(use)
        self.tail = [0, 0, 0]
        self.context: Context | None = None
        self.mark = 0
        #: Depth below the root -> what the last step answered there, best first.
        self.answers: dict[int, list[int]] = {}
        #: Key of two tokens -> what the window's n-grams go on with, latest first.
        self.ngrams: dict[int, list[int]] = {}
        #: Depth -> noise of the token chosen under nodes of that depth; None when greedy.
        self.noise: Any = None
        self.temperature = 1.0

    def grow(self, rows: int, max_depth: int, stop: Sequence[float] | None = None) -> None:
        """Grow to at most ``rows`` nodes. With ``stop``: end when row k's probability is below stop[k]."""
        _, b, root = self.tail
        V = self.vocabulary
        self.tokens = tokens = [root]
        self.parents = parents = [-1]
        self.depths = depths = [0]
        self.probabilities = probabilities = [1.0]
        self.pairs = pairs = [b * V + root]
        self.contexts = contexts = [self.context]
        if max_depth < 1 or rows < 2:
            return
        expand = self.expand
        heap: list[tuple[float, int, int, Edges | None, int]] = [(-1.0, 0, 0, None, 0)]
        serial = 1
        count = 1
        while heap:
            p, _, node, edges, i = heap[0]
            if edges is None:
                edges = expand(node)
                if edges:
                    heapreplace(heap, (-probabilities[node] * edges[0][0], serial, node, edges, 0))
                    serial += 1
                else:
                    heappop(heap)
                continue
            if stop is not None and -p < stop[count]:
                break
            token = edges[i][1]
            i += 1
            if i < len(edges):
                heapreplace(heap, (-probabilities[node] * edges[i][0], serial, node, edges, i))
                serial += 1
            else:
                heappop(heap)
            depth = depths[node] + 1
            tokens.append(token)
            parents.append(node)
            depths.append(depth)
            probabilities.append(-p)
            pairs.append(tokens[node] * V + token)
            contexts.append(None)
            count += 1
            if count == rows:
                break
            if depth < max_depth:
                heappush(heap, (p * HASTE, serial, count - 1, None, 0))
                serial += 1

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` nodes."""
        if rows < len(self.tokens):
            for column in (
                self.tokens,
                self.parents,
                self.depths,
                self.probabilities,
                self.pairs,
                self.contexts,
            ):
                del column[rows:]

    def adopt(self, tree: TokenTree) -> None:
        """Take over the rows that others have added to the tree."""
        own = len(self.tokens)
        self.tokens, self.parents, self.depths = tree.tokens, tree.parents, tree.depths
        for node in range(own, len(tree)):
            self.pairs.append(tree.tokens[tree.parents[node]] * self.vocabulary + tree.tokens[node])
            self.contexts.append(None)

    def look(self, node: int) -> tuple[Any, ...]:
        """What the main sources say behind a node: order and (tokens, buckets) of L, tokens and buckets of S."""
        token, parent = self.tokens[node], self.parents[node]
        pair = self.pairs[node]
        entry: Any = None
        order = 0
        if self.use["logits"]:
            tables = self.tables.logits.tables
            V = self.vocabulary
            above = self.pairs[parent] if node else self.tail[0] * V + self.tail[1]
            entry, order = tables[2].get(above * V + token), 2
            if entry is None:
                entry, order = tables[1].get(pair), 1
                if entry is None:
                    entry, order = tables[0].get(token), 0
            if entry is not None and self.noise is not None:
                entry = under_noise(entry, self.noise(self.depths[node]), self.temperature, 8)
        if not self.use["suffix"]:
            return order, entry, (), ()
        context = self.contexts[node] or self._context(node)
        if context.stamp != context.total:
            rank(context, self.mark)
        return order, entry, context.tokens, context.buckets

    def _context(self, node: int) -> Context:
        """The suffix that matches at a node, found from its parent's."""
        parent = self.parents[node]
        above = self.contexts[parent] or self._context(parent)
        context = self.contexts[node] = follow(above, self.tokens[node])
        return context

    def cells(self, node: int) -> tuple[list[int], list[int]]:
        """Proposed tokens and the joint bucket of each."""
        order, entry, matched, buckets = self.look(node)
        calibrations = self.tables.calibrations
        depth = self.depths[node]
        base = ZONE * (0 if depth == 0 else 1 if depth < 3 else 2)
        suffix_levels = calibrations.suffix.levels
        if matched:
            silent = base + (SILENT + suffix_levels[buckets[0]]) * STATES
        else:
            silent = base + NOTHING * STATES
        if entry is not None:
            levels = calibrations.logits[order].levels
            tokens, kinds = entry
            tokens = tokens.copy()
            states = [levels[kind] for kind in kinds]
            cells = [silent + state for state in states]
            unheard = SILENT + states[0]
        else:
            tokens, states, cells, unheard = [], [], [], NOTHING
        for i, token in enumerate(matched):
            row = base + suffix_levels[buckets[i]] * STATES
            if token in tokens:
                place = tokens.index(token)
                cells[place] = row + states[place]
            else:
                tokens.append(token)
                cells.append(row + unheard)
        said = self.answers.get(depth)
        if said:
            self._voice(said, 1, tokens, cells, silent + unheard)
        ngrams = self.ngrams.get(self.pairs[node])
        if ngrams:
            self._voice(ngrams, 3, tokens, cells, silent + unheard)
        return tokens, cells

    def _voice(
        self, said: Sequence[int], voice: int, tokens: list[int], cells: list[int], nothing: int
    ) -> None:
        for rank_, token in enumerate(said):
            add = VOICE * (voice if voice == 3 else 1 + (rank_ > 0))
            if token in tokens:
                place = tokens.index(token)
                if voice == 3 and cells[place] // VOICE % VOICES:
                    add = VOICE * 4 - cells[place] // VOICE % VOICES * VOICE
                cells[place] += add
            else:
                tokens.append(token)
                cells.append(nothing + add)

    def expand(self, node: int) -> Edges:
        """Edges under a node, the likeliest first."""
        tokens, cells = self.cells(node)
        estimate = self.tables.calibrations.joint.estimate
        edges = [(q, t) for q, t in zip([estimate[c] for c in cells], tokens, strict=True) if q > LEAST]
        edges.sort(reverse=True)
        total = 0.0
        for q, _ in edges:
            total += q
        if total > SURE:
            scale = SURE / total
            edges = [(q * scale, t) for q, t in edges]
        return edges

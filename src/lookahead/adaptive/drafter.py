"""The adaptive drafter: one token tree from all sources, the likeliest rows first.

The estimated probability that the target will walk through a node is the product of its edges' estimates.
F(tree) = 1 + the sum of these is the expected number of tokens of the step. A child is never likelier than
its parent, so taking nodes in order of probability gives the best tree of every size.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from operator import itemgetter
from typing import Any

import numpy as np

from ..core import Drafter, Scores, TokenTree, Window
from ..core.drafter import UNLIMITED_ROWS
from .calibration import SURE, NONE, NL
from .config import AdaptiveConfig
from .logits import ON_PATH, REJECTED, WINDOW
from .state import AdaptiveState

second = itemgetter(1)


class AdaptiveDrafter(Drafter):
    def __init__(self, config: Any = None, vocabulary: int = 0, state: AdaptiveState | None = None) -> None:
        self.config = AdaptiveConfig.of(config)
        self._vocabulary = vocabulary
        self._given = state

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        config = self.config
        self.state = self._given if self._given is not None else AdaptiveState(config, self._vocabulary)
        state = self.state
        V = self.V = max(state.logits.vocabulary, 1)
        self.use = {name: name in config.sources for name in ("suffix", "logits", "ngrams", "jacobi", "corpus")}
        self._eos = eos
        self._tail = [-1, -1, *prompt[-2:], first][-3:]
        state.suffix.start()
        state.suffix.feed(prompt)
        state.suffix.feed([first])
        self._root = first
        self._random = random.Random(config.seed)
        self._source = [t for t in prompt if t not in eos] or list(prompt)
        self._window = (
            Window(config.window_size, config.ngram_size, lambda: self._random.choice(self._source))
            if config.window_size
            else None
        )
        self._jacobi: list[list[int]] = []
        self.credit: Counter[str] = Counter()
        self.expected = 0.0

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        k = min(max_rows, self.config.max_rows)
        window = self._window
        rows = 0
        if window is not None:
            levels = len(window.levels)
            window.narrow(max_depth - levels + 2)
            rows = window.rows()
            if rows > k // 2:
                rows = 0
        tree = self._grow(k - rows, max_depth)
        self._planted = rows > 0
        self._tree_rows = len(tree)
        if rows and window is not None:
            window.plant(tree)
            tree.read = [True] * len(tree)
            V, key1, key2, key3, ctx = self.V, self._key1, self._key2, self._key3, self._ctx
            for node in range(self._tree_rows, len(tree)):
                token, parent = tree.tokens[node], tree.parents[node]
                kk2 = key2[parent]
                key1.append(token)
                key2.append(key1[parent] * V + token)
                key3.append(kk2 * V + token if kk2 >= 0 else -1)
                ctx.append(self.state.suffix.step(ctx[parent], token))
        return tree

    def _grow(self, k: int, max_depth: int) -> TokenTree:
        root = self._root
        tree = self._tree = TokenTree(root)
        V = self.V
        a, b, c = self._tail
        self._key1 = key1 = [c]
        self._key2 = key2 = [b * V + c if b >= 0 else -1]
        self._key3 = key3 = [(a * V + b) * V + c if a >= 0 else -1]
        self._ctx = ctx = [self.state.suffix.state]
        self._prob = prob = [1.0]
        depths = tree.depths
        tokens = tree.tokens
        if max_depth < 1 or k < 2:
            return tree
        step = self.state.suffix.step
        V2 = V * V
        heap = [(-SURE, 0, 0, None, 0)]
        uid = 1
        add = tree.add
        expand = self._expand
        left = k - 1
        while left and heap:
            p, _, node, cands, i = heap[0]
            if cands is None:
                cands = expand(node)
                if cands:
                    heapreplace(heap, (-prob[node] * cands[0][1], uid, node, cands, 0))
                    uid += 1
                else:
                    heappop(heap)
                continue
            token = cands[i][0]
            i += 1
            if i < len(cands):
                heapreplace(heap, (-prob[node] * cands[i][1], uid, node, cands, i))
                uid += 1
            else:
                heappop(heap)
            child = add(token, node, True)
            left -= 1
            prob.append(-p)
            kk2 = key2[node]
            key1.append(token)
            key2.append(key1[node] * V + token)
            key3.append(kk2 * V + token if kk2 >= 0 else -1)
            ctx.append(step(ctx[node], token))
            if depths[child] < max_depth:
                heappush(heap, (p * SURE, uid, child, None, 0))
                uid += 1
        self.expected += sum(prob)
        return tree

    def _cells(self, node):
        """(tokens, cells)"""
        state = self.state
        use = self.use
        lt = lb = st = sb = None
        if use["logits"]:
            tables = state.logits.tables
            order = 2
            entry = tables[2].get(self._key3[node])
            if entry is None:
                order = 1
                entry = tables[1].get(self._key2[node])
                if entry is None:
                    order = 0
                    entry = tables[0].get(self._key1[node])
            if entry is not None:
                lt, lb = entry
                llev = state.logit_calibrations[order].levels
        if use["suffix"]:
            ctx = state.suffix.candidates(self._ctx[node])
            st, sb = ctx.tokens, ctx.buckets
        slev = state.suffix_calibration.levels
        W = state.joint.W
        base = W * W if node else 0
        if not st:
            if not lt:
                return [], []
            base += NONE
            return lt, [base + llev[x] * W for x in lb]
        if not lt:
            base += NONE * W
            return st, [base + slev[x] for x in sb]
        cells = {t: base + slev[x] + (NL + llev[lb[0]]) * W for t, x in zip(st, sb)}
        sbest = NL + slev[sb[0]]
        drop = (NL + llev[lb[0]]) * W
        for t, x in zip(lt, lb):
            c = cells.get(t)
            if c is None:
                cells[t] = base + llev[x] * W + sbest
            else:
                cells[t] = c - drop + llev[x] * W
        return list(cells), list(cells.values())

    def _expand(self, node: int) -> list[tuple[int, float]]:
        tokens, cells = self._cells(node)
        p = self.state.joint.p
        q = [p[c] for c in cells]
        items = sorted(zip(tokens, q), key=second, reverse=True)
        total = sum(q)
        if total > SURE:
            f = SURE / total
            items = [(t, q * f) for t, q in items]
        return items

    def _proposals(self, node: int):
        state = self.state
        use = self.use
        out = []
        if use["logits"]:
            tables = state.logits.tables
            for order, key in ((2, self._key3[node]), (1, self._key2[node]), (0, self._key1[node])):
                entry = tables[order].get(key)
                if entry is not None:
                    out.append(("logits", state.logit_calibrations[order], *entry))
                    break
        if use["suffix"]:
            ctx = state.suffix.candidates(self._ctx[node])
            out.append(("suffix", state.suffix_calibration, ctx.tokens, ctx.buckets))
        return out

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        state = self.state
        V = self.V
        # labels
        for node, truth, i in zip(path, tokens, range(len(path))):
            win, name = 0.0, None
            for token, cell in zip(*self._cells(node)):
                state.joint.learn(cell, token == truth)
            for source, calibration, ids, buckets in self._proposals(node):
                for token, bucket in zip(ids, buckets):
                    hit = token == truth
                    if hit:
                        q = calibration.estimate[bucket]
                        if q > win:
                            win, name = q, source
                    calibration.learn(bucket, hit)
            if i < len(tokens) - 1:
                self.credit[name or "window"] += 1
        # rows
        n = len(tree)
        key1, key2, key3 = self._key1, self._key2, self._key3
        origin = [REJECTED] * self._tree_rows + [WINDOW] * (n - self._tree_rows)
        on = set(path)
        order = list(range(n - 1, -1, -1))
        order = [x for x in order if x not in on] + list(path)
        for x in path:
            origin[x] = ON_PATH
        if self.use["logits"]:
            ids, odds = scores.top(order, self.config.top)
            ids, odds = np.asarray(ids), np.asarray(odds)
            state.logits.write([(key1[x], key2[x], key3[x]) for x in order], ids, odds, [origin[x] for x in order])
        if self._window is not None and self._planted:
            new = [scores.best(node) for node in self._window.newest_nodes()]
            self._window.advance(self._root, new, self._eos)
        state.suffix.feed(tokens)
        self._tail = [*self._tail, *tokens][-3:]
        self._root = tokens[-1]

    def stats(self) -> dict[str, float]:
        return {f"credit_{k}": v for k, v in self.credit.items()} | {"expected": self.expected}

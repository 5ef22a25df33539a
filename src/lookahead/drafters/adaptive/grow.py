"""Grow one token tree from all sources, the likeliest rows first.

The estimated probability that the target walks through a node is the product of its edges' estimates, and
F(tree) = 1 + the sum of these is the expected number of tokens of the step. A child is never likelier than
its parent, so taking nodes in order of probability gives the best tree of every size.

This is the drafter's hot loop, in plain dicts, lists and one heap: nothing is computed for a node that is
not looked at, and what was computed is kept for the judgement after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

from ...core import Scores, TokenTree
from .calibration import NOTHING, SILENT, STATES, SURE, VOICE_NGRAM, VOICES
from .logits import under_noise
from .observe import answers_by_position, judge, keep_ngram, read_rows
from .suffix import Reader, SuffixTrie
from .tables import Tables

VOICE = STATES * STATES
ZONE = VOICES * VOICE
#: A node is expanded when its probability times this comes up; most best children are not surer.
HASTE = 0.5
#: Edges less likely than this are not worth a place in the heap.
LEAST = 0.002
#: Edges less likely than this times the last row of the last tree are left out until they are needed.
FLOOR = 0.25
NONE: tuple[Said, Said] = ((), ())
#: Most edges of one node: a heap entry's number is node * MOST + place.
MOST = 128


#: What the sources say behind one node: proposed tokens and the joint bucket of each; table of the logit cache
#: and buckets of its tokens, which come first; tokens of the suffix match in this text and their buckets; the
#: same of the corpus.
Said = Sequence[int]
Proposals = tuple[list[int], list[int], int, Said, Said, Said, Said, Said]


class Grower:
    """One sequence's view of the sources; ``CompiledGrower`` has the same methods.

    Args:
        tables: what is learned. vocabulary: V. use: whether each source may propose.
        top: tokens kept of each evaluated row.

    Attributes, by node of the tree that was grown last, rows in order of falling probability:
        tokens, parents, depths, probabilities
    """

    def __init__(self, tables: Tables, vocabulary: int, use: Mapping[str, bool], top: int = 8) -> None:
        self.tables = tables
        self.top = top
        self.vocabulary = vocabulary
        self.use = dict(use)
        self.tail = [0, 0, 0]
        #: The end of this text in its own suffix trie, and in the corpus where there is one.
        self.reader: Reader | None = SuffixTrie(1).begin()
        self.corpus: Reader | None = None
        #: Depth below the root -> what the last step answered there, best first.
        self.answers: dict[int, list[int]] = {}
        #: Key of two tokens -> what the window's n-grams go on with, latest first.
        self.ngrams: dict[int, list[int]] = {}
        #: Depth -> noise of the token chosen under nodes of that depth; None when greedy.
        self.noise: Any = None
        self.temperature = 1.0
        #: Accepted tokens by the source on whose word they were drafted.
        self.credit = dict.fromkeys((*use, "window"), 0)
        self._floor = 0.0

    def take(self, tokens: Sequence[int]) -> None:
        """The text has gone on."""
        for reader in (self.reader, self.corpus):
            if reader is not None:
                reader.feed(tokens)
        self.tail = [*self.tail, *tokens][-3:]

    def forget_answers(self) -> None:
        """The last step's answers say nothing of the next position."""
        self.answers = {}

    def study(
        self, scores: Scores, path: Sequence[int], tokens: Sequence[int], window: int
    ) -> tuple[Sequence[int], int]:
        """Learn all that a step can teach.

        Args:
            scores: of the tree that was grown. path, tokens: accepted rows, emitted tokens.
            window: first row of the window.

        Returns:
            The target's own token by node, as far as it can be told; tokens accepted on the window's word.
        """
        credited = judge(self, path, tokens)
        answers = read_rows(self, scores, path, window)
        if self.use["jacobi"]:
            self.answers = answers_by_position(self, answers, len(tokens))
        return answers, credited

    def close(self, ngrams: Sequence[Sequence[int]]) -> None:
        """The window has closed n-grams."""
        if self.use["ngrams"]:
            for ngram in ngrams:
                for i in range(2, len(ngram)):
                    keep_ngram(self.ngrams, ngram[i - 2] * self.vocabulary + ngram[i - 1], ngram[i])

    def grow(self, rows: int, max_depth: int, stop: Sequence[float] | None = None) -> None:
        """Grow to at most ``rows`` nodes. With ``stop``: end when row k's probability is below stop[k]."""
        if not self._grow(rows, max_depth, stop, self._floor):
            self._grow(rows, max_depth, stop, 0.0)
        self._floor = self.probabilities[-1] * FLOOR if len(self.tokens) == rows > 1 else 0.0

    def _grow(self, rows: int, max_depth: int, stop: Sequence[float] | None, floor: float) -> bool:
        """The same, leaving out edges below ``floor``; False where they would have been needed."""
        self.tokens = tokens = [self.tail[2]]
        self.parents = parents = [-1]
        self.depths = depths = [0]
        self.probabilities = probabilities = [1.0]
        self._pairs = pairs = [self.tail[1] * self.vocabulary + self.tail[2]]
        self._seen: dict[int, Proposals] = {}
        self._places: list[dict[int, int]] = []
        self._ask = self._asker()
        if max_depth < 1:
            return True
        edges: dict[int, list[tuple[float, int]]] = {}
        expand, size = self._expand, self.vocabulary
        # Entries: (-p, node * MOST + place of an edge), or (-p * HASTE, ~node) for a node to be expanded.
        heap = [(-1.0, -1)]
        count = 1
        while heap and count < rows:
            p, number = heap[0]
            if number < 0:
                node = ~number
                below = edges[node] = expand(node, probabilities[node], floor)
                if below:
                    heapreplace(heap, (below[0][0], node * MOST))
                else:
                    heappop(heap)
                continue
            if stop is not None and -p < stop[count]:
                return True
            node = number // MOST
            below = edges[node]
            place = number % MOST
            if place + 1 < len(below):
                heapreplace(heap, (below[place + 1][0], number + 1))
            else:
                heappop(heap)
            depth = depths[node] + 1
            token = below[place][1]
            pairs.append(tokens[node] * size + token)
            tokens.append(token)
            parents.append(node)
            depths.append(depth)
            probabilities.append(-p)
            if depth < max_depth and -p > floor:
                heappush(heap, (p * HASTE, ~count))
            count += 1
        return count == rows or not floor

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` nodes."""
        if rows < len(self.tokens):
            for column in (self.tokens, self.parents, self.depths, self.probabilities, self._pairs):
                del column[rows:]
            # Others may add rows under these numbers.
            known: dict[int, Any]
            for known in (self._seen, *self._places):
                for node in [node for node in known if node >= rows]:
                    del known[node]

    def adopt(self, tree: TokenTree) -> None:
        """Take over the rows that others have added to the tree."""
        own, size = len(self.tokens), self.vocabulary
        for column, others in zip(
            (self.tokens, self.parents, self.depths), (tree.tokens, tree.parents, tree.depths), strict=True
        ):
            column += others[own:]
        self._pairs += [tree.tokens[tree.parents[n]] * size + tree.tokens[n] for n in range(own, len(tree))]

    def row_keys(self) -> tuple[list[int], list[int], list[int]]:
        """Of every row: keys of its last one, two and three tokens."""
        tokens, pairs, size = self.tokens, self._pairs, self.vocabulary
        triples = [pairs[parent] * size + token for parent, token in zip(self.parents, tokens, strict=True)]
        triples[0] = (self.tail[0] * size + self.tail[1]) * size + tokens[0]
        return tokens, pairs, triples

    def proposals(self, node: int) -> Proposals:
        """What the sources say behind a node; found once per tree."""
        seen = self._seen.get(node)
        if seen is None:
            seen = self._seen[node] = self._ask(node)
        return seen

    def pair(self, node: int) -> int:
        """Key of the last two tokens of a row."""
        return self._pairs[node]

    def _asker(self) -> Callable[[int], Proposals]:
        """A function of the node, with everything at hand that it needs: it is called for most of the rows."""
        tokens_of, parents, depths, pairs = self.tokens, self.parents, self.depths, self._pairs
        calibrations = self.tables.calibrations
        one, two, three = self.tables.logits.tables
        level_of, matches = [c.levels for c in calibrations.logits], calibrations.suffix.levels
        match, match_corpus = self._matcher(self.reader), self._matcher(self.corpus)
        recalls = calibrations.corpus.levels
        answers, ngrams, size = self.answers, self.ngrams, self.vocabulary
        above_root = self.tail[0] * size + self.tail[1]
        use_logits, noise = self.use["logits"], self.noise

        def ask(node: int) -> Proposals:
            depth, pair = depths[node], pairs[node]
            base = 0 if not depth else ZONE if depth < 3 else 2 * ZONE
            matched, buckets = match(node) if match is not None else NONE
            states_of = [matches[bucket] for bucket in buckets]
            recalled, marks = NONE
            said: Sequence[int] = matched
            if match_corpus is not None:
                recalled, marks = match_corpus(node)
                said, states_of = _either(matched, states_of, recalled, [recalls[mark] for mark in marks])
            silent = base + (SILENT + max(states_of) if said else NOTHING) * STATES
            entry: Any = None
            order = 0
            if use_logits:
                above = pairs[parents[node]] if node else above_root
                entry, order = three.get(above * size + tokens_of[node]), 2
                if entry is None:
                    entry, order = two.get(pair), 1
                    if entry is None:
                        entry, order = one.get(tokens_of[node]), 0
            if entry is None:
                tokens: list[int] = []
                kinds: Sequence[int] = ()
                states: list[int] = []
                cells: list[int] = []
                unheard = NOTHING
            else:
                if noise is not None:
                    entry = under_noise(entry, noise(depth), self.temperature)
                tokens, kinds, levels = list(entry[0]), entry[1], level_of[order]
                states = [levels[kind] for kind in kinds]
                cells = [silent + state for state in states]
                unheard = SILENT + states[0]
            for token, state in zip(said, states_of, strict=True):
                row = base + state * STATES
                if token in tokens:
                    place = tokens.index(token)
                    cells[place] = row + states[place]
                else:
                    tokens.append(token)
                    cells.append(row + unheard)
            if depth in answers:
                _hear(answers[depth], 1, tokens, cells, silent + unheard)
            if pair in ngrams:
                _hear(ngrams[pair], VOICE_NGRAM, tokens, cells, silent + unheard)
            return tokens, cells, order, kinds, matched, buckets, recalled, marks

        return ask

    def _matcher(self, reader: Reader | None) -> Callable[[int], tuple[Said, Said]] | None:
        """A function of the node: successors of the longest suffix that matches there, and their buckets."""
        if reader is None:
            return None
        parents, tokens, rank, follow, mark = (
            self.parents,
            self.tokens,
            reader.trie.rank,
            reader.trie.follow,
            reader.mark,
        )
        places = {0: reader.state}
        self._places.append(places)

        def place(node: int) -> int:
            above = parents[node]
            found = follow(places[above] if above in places else place(above), tokens[node])
            places[node] = found
            return found

        def match(node: int) -> tuple[Said, Said]:
            if not reader.current:  # another text has filled the trie since
                return NONE
            return rank(places[node] if node in places else place(node), mark)

        return match

    def _expand(self, node: int, probability: float, floor: float) -> list[tuple[float, int]]:
        """Edges under a node, the likeliest first: minus the path's probability, and the token."""
        seen = self._seen[node] = self._ask(node)
        estimate = self.tables.calibrations.joint.estimate
        values = [estimate[cell] for cell in seen[1]]
        total = 0.0
        for value in values:  # not sum(), which from Python 3.12 on rounds differently
            total += value
        scale = -probability if total <= SURE else -probability * SURE / total
        least = floor / probability
        if least < LEAST:
            least = LEAST
        edges = [(value * scale, token) for value, token in zip(values, seen[0]) if value > least]  # noqa: B905
        edges.sort()
        return edges


def _either(
    tokens: Said, states: list[int], others: Said, their_states: list[int]
) -> tuple[list[int], list[int]]:
    """Both lists of tokens as one; of a token in both the better state counts."""
    tokens, states = list(tokens), list(states)
    for token, state in zip(others, their_states, strict=True):
        if token in tokens:
            place = tokens.index(token)
            states[place] = max(states[place], state)
        else:
            tokens.append(token)
            states.append(state)
    return tokens, states


def _hear(said: Sequence[int], voice: int, tokens: list[int], cells: list[int], nothing: int) -> None:
    """Let J or P speak: what they say moves a token to another bucket, or adds one."""
    for place, token in enumerate(said):
        mine = voice if voice == VOICE_NGRAM else voice + (place > 0)
        if token not in tokens:
            tokens.append(token)
            cells.append(nothing + mine * VOICE)
            continue
        at = tokens.index(token)
        before = cells[at] // VOICE % VOICES
        cells[at] += (VOICES - 1 - before if before else mine) * VOICE

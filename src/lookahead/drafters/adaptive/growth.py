"""The token tree of the adaptive drafter: growing it from all sources, and learning from the step's result.

The estimated probability that verification reaches a node is the product of the estimates along its path, and
F(tree) = 1 + the sum of these products is the expected number of tokens of the step. A child is never likelier than
its parent, so taking nodes in order of decreasing probability gives the best tree of every size (best-first search).

Three parts: compiled functions that grow the tree (``grow``), compiled functions that learn from the target's answers
(``learn_from_step``), and ``Grower``, which owns the memory of one sequence and calls both.

An example of ``grow`` with six rows and edge probabilities from the calibration. The root R has the children a (0.6),
b (0.32) and c (0.05); a has d (0.8) and e (0.1); d has f (0.9).

    The heap holds two kinds of entries: ``R.a 0.60`` is an edge, with the probability of its whole path; ``a? 0.30``
    is a row whose sources have not been asked. A row cannot have a child likelier than itself, and its best child is
    usually less than half as likely, so the row enters with EXPANSION_FACTOR = 0.5 times its probability, and its
    sources are asked only if that reaches the top. Of each node, only the best remaining edge is in the heap.

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

Row 2 (b, 0.32) was taken before row 3 (d, 0.48): that is the cost of the factor 0.5 here. With the factor 1 the order
is exact, but sources are asked under more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import Scores, TokenTree
from ...jit import compiled, entry, int64
from .arrays import (
    ANSWERS,
    CORPUS,
    MATCHES,
    OTHER_PROPOSALS,
    SUFFIX,
    Calibration,
    Constants,
    Sources,
    StepResult,
    Tree,
    new_tree,
)
from .calibration import (
    AGREEMENT,
    ANSWERED_BEST,
    ANSWERED_LATER,
    KINDS,
    MAX_PROBABILITY,
    NOTHING,
    OTHER,
    STATES,
    WINDOW,
    ZONE,
    learn,
)
from .settings import SEARCHED_ROWS, AdaptiveSettings
from .sources.logit_cache import propose, write_rows
from .sources.suffix import NO_TEXT, Reader, match
from .state import Tables

#: The sources are asked under a row when its probability times this factor is the largest in the heap.
EXPANSION_FACTOR = 0.5
#: Edges with a smaller probability do not enter the heap.
MIN_PROBABILITY = 0.002
#: The most edges of one node.
MAX_EDGES = 128
#: What accepted tokens are credited to: the sources, and the window for rows that only it evaluated.
CREDITED = ("suffix", "logits", "jacobi", "corpus", "window")
BY_SUFFIX, BY_LOGITS, BY_ANSWERS, BY_CORPUS, BY_WINDOW = range(5)
#: Initial number of positions whose noise is kept.
FIRST_POSITIONS = 32


@compiled
def index_of(tokens: Any, count: int, token: int) -> int:
    """The index of a token among the first ``count`` records, or -1. A record with token -1 ends the list."""
    for index in range(count):
        if tokens[index].token == token:
            return index
        if tokens[index].token < 0:
            break
    return -1


@compiled
def _match_level(tree: Tree, calibration: Calibration, node: int, token: int) -> int:
    """The confidence level of a token from the suffix matches of both tries; -1 if neither proposes it.

    With ``token`` -1: the highest level of any proposed token.
    """
    level = -1
    for source in (SUFFIX, CORPUS):
        for proposed in tree.matches[source, node]:
            if proposed.token < 0:
                break
            if token < 0 or proposed.token == token:
                level = max(level, calibration.matches[source, proposed.bucket].level)
    return level


@compiled
def ask(tree: Tree, sources: Sources, calibration: Calibration, constants: Constants, node: int) -> None:
    """Collect the proposals of all sources under a row: logit cache, suffix matches, answers of the last step."""
    row, proposals = tree.nodes[node], tree.proposals[node]
    zone = 0 if row.depth == 0 else ZONE if row.depth < 3 else 2 * ZONE
    match(sources.texts[SUFFIX], tree, SUFFIX, node)
    match(sources.texts[CORPUS], tree, CORPUS, node)
    propose(tree, sources, constants, node)
    best = _match_level(tree, calibration, node, -1)
    unmatched = zone + (OTHER + best if best >= 0 else NOTHING) * STATES
    count, uncached = row.cached, NOTHING
    for index in range(count):
        proposal = proposals[index]
        confidence = calibration.logits[row.order, proposal.kind].level
        level = _match_level(tree, calibration, node, proposal.token)
        proposal.joint = confidence + (zone + level * STATES if level >= 0 else unmatched)
        if index == 0:
            uncached = OTHER + confidence
    for source in (SUFFIX, CORPUS):
        for proposed in tree.matches[source, node]:
            if proposed.token < 0:
                break
            if index_of(proposals, count, proposed.token) < 0:
                level = _match_level(tree, calibration, node, proposed.token)
                proposals[count].token = proposed.token
                proposals[count].joint = zone + level * STATES + uncached
                count += 1
    if row.depth < len(sources.answers):
        answered = ANSWERED_BEST
        for token in sources.answers[row.depth]:
            if token < 0:
                break
            index = index_of(proposals, count, token)
            if index < 0:
                index = count
                proposals[index].token, proposals[index].joint = token, unmatched + uncached
                count += 1
            proposals[index].joint += answered * AGREEMENT
            answered = ANSWERED_LATER
    row.proposals, row.asked = count, 1


@compiled
def _expand(tree: Tree, sources: Sources, calibration: Calibration, constants: Constants, node: int) -> int:
    """Ask the sources under a node and sort its edges, likeliest first. Returns the number of edges."""
    ask(tree, sources, calibration, constants, node)
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
            index = count
            while index > 0 and (
                edges[index - 1].cost > cost
                or (edges[index - 1].cost == cost and edges[index - 1].token > token)
            ):
                edges[index].cost, edges[index].token = edges[index - 1].cost, edges[index - 1].token
                index -= 1
            edges[index].cost, edges[index].token = cost, token
            count += 1
    row.edges = count
    return count


@compiled
def _before(waiting: Any, cost: float, number: int) -> bool:
    """Whether an entry of the heap comes before the one with this cost and number."""
    return bool(waiting.cost < cost or (waiting.cost == cost and waiting.number < number))


@compiled
def _replace_first(heap: Any, size: int, cost: float, number: int) -> None:
    """Replace the first entry of a heap of ``size`` entries (sift down)."""
    index = 0
    while 2 * index + 1 < size:
        below = 2 * index + 1
        if below + 1 < size and _before(heap[below + 1], heap[below].cost, heap[below].number):
            below += 1
        if not _before(heap[below], cost, number):
            break
        heap[index].cost, heap[index].number = heap[below].cost, heap[below].number
        index = below
    heap[index].cost, heap[index].number = cost, number


@compiled
def _drop_first(sizes: Any, heap: Any) -> None:
    sizes.heap -= 1
    _replace_first(heap, sizes.heap, heap[sizes.heap].cost, heap[sizes.heap].number)


@compiled
def _push(heap: Any, size: int, cost: float, number: int) -> None:
    index = size
    while index > 0:
        above = (index - 1) // 2
        if _before(heap[above], cost, number):
            break
        heap[index].cost, heap[index].number = heap[above].cost, heap[above].number
        index = above
    heap[index].cost, heap[index].number = cost, number


@compiled
def add(tree: Tree, constants: Constants, parent: int, token: int, probability: float) -> int:
    """Append a row to the tree. Returns its depth."""
    node = tree.sizes[0].rows
    row = tree.nodes[node]
    above, depth = constants.tail[1], 0
    if parent >= 0:
        above, depth = int64(tree.nodes[parent].token), int64(tree.nodes[parent].depth) + 1
    row.token, row.parent, row.depth, row.probability = token, parent, depth, probability
    row.pair = above * constants.vocabulary + token
    row.asked = 0
    tree.contexts[0, node] = tree.contexts[1, node] = -1
    tree.sizes[0].rows = node + 1
    return depth


@compiled
def _take(
    tree: Tree,
    sources: Sources,
    calibration: Calibration,
    constants: Constants,
    rows: int,
    max_depth: int,
    stop: Any,
) -> int:
    """Take rows from the heap, likeliest first, until the tree is complete.

    Returns -1, or the depth at which the sources need noise that is not in ``sources.noise`` yet.
    """
    sizes, nodes, heap = tree.sizes[0], tree.nodes, tree.heap
    while sizes.heap > 0 and sizes.rows < rows:
        cost, number = heap[0].cost, heap[0].number
        if number < 0:
            node = ~number
            position = constants.position + nodes[node].depth
            if (
                constants.sampled
                and sources.noise_positions[position % len(sources.noise_positions)] != position
            ):
                return int64(nodes[node].depth)
            if _expand(tree, sources, calibration, constants, node):
                _replace_first(heap, sizes.heap, tree.edges[node, 0].cost, node * MAX_EDGES)
            else:
                _drop_first(sizes, heap)
            continue
        if -cost < stop[sizes.rows]:
            break
        node, index = number // MAX_EDGES, number % MAX_EDGES
        token = tree.edges[node, index].token
        if index + 1 < nodes[node].edges:
            _replace_first(heap, sizes.heap, tree.edges[node, index + 1].cost, number + 1)
        else:
            _drop_first(sizes, heap)
        row = sizes.rows
        depth = add(tree, constants, node, token, -cost)
        if depth < max_depth:
            _push(heap, sizes.heap, cost * constants.expansion_factor, ~row)
            sizes.heap += 1
    return -1


@entry
def grow(
    tree: Tree,
    sources: Sources,
    calibration: Calibration,
    constants: Constants,
    rows: int,
    max_depth: int,
    stop: Any,
    fresh: bool,
) -> int:
    """Grow a tree of at most ``rows`` nodes and depth ``max_depth``.

    It ends early if the next row k has a probability below ``stop[k]``.

    Returns:
        Minus the number of rows; or a depth of at least 0 at which noise is missing. The caller then stores that
        noise and calls again with ``fresh`` False, which continues the same tree.
    """
    if fresh:
        tree.sizes[0].rows = 0
        add(tree, constants, -1, constants.tail[2], 1.0)
        tree.heap[0].cost, tree.heap[0].number = -1.0, ~0
        tree.sizes[0].heap = 1
    depth = _take(tree, sources, calibration, constants, rows, max_depth, stop) if max_depth >= 1 else -1
    return depth if depth >= 0 else -int64(tree.sizes[0].rows)


@compiled
def _source_of(tree: Tree, node: int, right: int, matched: int, recalled: int) -> int:
    """The source to credit with an accepted token: the most specific of those that proposed it."""
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
    """Count hits and trials of the suffix matches at a node. Returns the index of the correct match, or -1."""
    matches = tree.matches[source, node]
    right = index_of(matches, MATCHES, truth)
    for index in range(MATCHES):
        if matches[index].token < 0:
            break
        learn(calibration.matches[source, matches[index].bucket], index == right)
    return right


@compiled
def _judge(
    tree: Tree, sources: Sources, calibration: Calibration, constants: Constants, step: StepResult
) -> int:
    """Count hits and trials of every proposal under the accepted rows. Returns tokens accepted because of the window.

    The target's token is known under each of these rows, so every proposal there can be judged, whether it was a row
    of the tree or not.
    """
    by_window = 0
    for i in range(len(step.path)):
        node, truth = step.path[i], step.tokens[i]
        row, proposals = tree.nodes[node], tree.proposals[node]
        if row.asked == 0:
            ask(tree, sources, calibration, constants, node)
        right = index_of(proposals, row.proposals, truth)
        for index in range(row.proposals):
            learn(calibration.joint[proposals[index].joint], index == right)
        for index in range(row.cached):
            learn(calibration.logits[row.order, proposals[index].kind], index == right)
        matched = _judge_matches(tree, calibration, SUFFIX, node, truth)
        recalled = _judge_matches(tree, calibration, CORPUS, node, truth)
        if i < len(step.path) - 1:
            source = _source_of(tree, node, right, matched, recalled)
            step.credit[source] += 1
            by_window += 1 if source == BY_WINDOW else 0
    return by_window


@compiled
def _find_own(tree: Tree, sources: Sources, constants: Constants, step: StepResult) -> None:
    """The target's token under each row: the argmax of its logits, with the noise added when sampling.

    Only the best ``top`` tokens of a row are known, so when sampling the result may miss a token with large noise.
    """
    noise, temperature = sources.noise, np.float32(constants.temperature)
    for node in range(tree.sizes[0].rows):
        best = 0
        if constants.sampled:
            row = noise[(constants.position + tree.nodes[node].depth) % len(noise)]
            highest = np.float32(-np.inf)
            for i in range(step.ids.shape[1]):
                token = step.ids[node, i]
                if 0 <= token < len(row):
                    score = step.odds[node, i] / temperature + row[token]
                    if score > highest:
                        highest, best = score, i
        step.own[node] = step.ids[node, best]


@compiled
def _keep_answers(tree: Tree, sources: Sources, step: StepResult) -> None:
    """Keep the target's tokens under this step's rows, by depth below the next root, likeliest rows first."""
    answers = sources.answers
    answers[:] = -1
    for node in range(tree.sizes[0].rows):
        depth = tree.nodes[node].depth - len(step.path)
        if 0 <= depth < len(answers):
            for index in range(ANSWERS):
                if answers[depth, index] == step.own[node]:
                    break
                if answers[depth, index] < 0:
                    answers[depth, index] = step.own[node]
                    break


@entry
def learn_from_step(
    tree: Tree,
    sources: Sources,
    calibration: Calibration,
    constants: Constants,
    step: StepResult,
    rows: int,
    window_start: int,
) -> int:
    """Update the calibration, the logit cache and the answers from the result of a step.

    Rows from ``tree.sizes.rows`` to ``rows`` were added by others (the window); their token and parent are set.
    ``window_start`` is the first row of the window. Fills in ``step.own`` and adds to ``step.credit``.

    Returns:
        The number of tokens that were accepted because of the window.
    """
    for node in range(tree.sizes[0].rows, rows):
        add(tree, constants, int64(tree.nodes[node].parent), int64(tree.nodes[node].token), 0.0)
    by_window = _judge(tree, sources, calibration, constants, step)
    _find_own(tree, sources, constants, step)
    if constants.use_logits:
        write_rows(tree, sources.cache, constants, step, window_start)
    if constants.use_answers:
        _keep_answers(tree, sources, step)
    return by_window


class Grower:
    """Grows the trees of one sequence and learns from its steps.

    Args:
        tables: the logit cache and the calibration, which may be shared by sequences.
        vocabulary: V.
        config: sources, rows, and tokens kept per row.
        sampled: whether tokens are sampled, with noise known in advance.

    Attributes:
        tokens, parents, probabilities: of the last tree, by row.
        reader: this text in its suffix trie; None if the source is off.
        corpus: this text in the trie of earlier texts; None if the source is off.
        tail: the last three tokens of the text.
        noise: depth -> noise (V,) of the token chosen under nodes of that depth; None for greedy decoding.
    """

    def __init__(
        self, tables: Tables, vocabulary: int, config: AdaptiveSettings, sampled: bool = False
    ) -> None:
        self.tables, self.vocabulary, self.sources = tables, vocabulary, config.sources
        self.top = config.sampled_top if sampled else config.top
        self.reader: Reader | None = None
        self.corpus: Reader | None = None
        self.tail = [0, 0, 0]
        self.noise: Callable[[int], Any] | None = None
        self.temperature, self.expansion_factor = 1.0, EXPANSION_FACTOR
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self._position = 0
        rows = max(config.max_rows, SEARCHED_ROWS) if config.chain else config.max_rows
        tables.logits.make_room(0, self.top)
        self._tree = new_tree(rows, tables.logits.width + OTHER_PROPOSALS)
        self._answers = np.full((rows, ANSWERS), -1)
        self._noise, self._noise_positions = np.zeros((1, 0), np.float32), np.full(1, -1)
        self._path, self._truths, self._own = (np.zeros(rows, np.int64) for _ in range(3))
        self._ids, self._odds = np.zeros((rows, self.top), np.int64), np.zeros((rows, self.top), np.float32)
        self._credit = np.zeros(len(CREDITED), np.int64)
        self._no_stop = np.zeros(rows + 1)

    @property
    def credit(self) -> dict[str, int]:
        """Accepted tokens by the source that proposed them."""
        return dict(zip(CREDITED, self._credit.tolist(), strict=True))

    @property
    def depths(self) -> list[int]:
        """The depths of the tree's rows."""
        depths: list[int] = self._tree.nodes["depth"][: len(self.tokens)].tolist()
        return depths

    def sources_of(self, row: int) -> list[str]:
        """The sources that proposed a row of the last tree, other than the root."""
        tree, parent, token = self._tree, self.parents[row], self.tokens[row]
        proposed = {"logits": tree.proposals["token"][parent, : tree.nodes["cached"][parent]].tolist()}
        for name, source in (("suffix", SUFFIX), ("corpus", CORPUS)):
            found = tree.matches["token"][source, parent].tolist()
            proposed[name] = found[: found.index(-1)] if -1 in found else found
        names = [name for name, tokens in proposed.items() if token in tokens]
        return names or ["jacobi"]  # the previous step's answers, which this step's answers have replaced

    def take(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text = np.array(tokens, np.int64)
        for reader in (self.reader, self.corpus):
            if reader is not None:
                reader.feed(text)
        self.tail = [*self.tail, *tokens][-3:]
        self._position += len(tokens)

    def forget_answers(self) -> None:
        """Drop the last step's answers: after plain steps, they do not fit the next position."""
        self._answers[:] = -1

    def _arguments(self) -> tuple[Tree, Sources, Calibration, Constants]:
        here, earlier = (NO_TEXT if reader is None else reader.text for reader in (self.reader, self.corpus))
        sources = Sources(
            (here, earlier), self.tables.logits.arrays, self._answers, self._noise, self._noise_positions
        )
        constants = Constants(
            self.vocabulary,
            self.noise is not None,
            "logits" in self.sources,
            "jacobi" in self.sources,
            self.temperature,
            self.expansion_factor,
            self._position,
            (self.tail[0], self.tail[1], self.tail[2]),
        )
        return self._tree, sources, self.tables.calibration, constants

    def _keep_noise(self, depth: int) -> None:
        """Store the noise of the tokens chosen under nodes of this depth in the array that compiled code reads."""
        assert self.noise is not None
        noise, position = self.noise(depth), self._position + depth
        if depth >= len(self._noise_positions) or noise.shape[0] != self._noise.shape[1]:
            positions = max(FIRST_POSITIONS, 2 << depth.bit_length())
            old, known = self._noise, self._noise_positions
            self._noise = np.empty((positions, noise.shape[0]), np.float32)
            self._noise_positions = np.full(positions, -1)
            for row, number in enumerate(known.tolist()):
                if number >= self._position:
                    self._noise[number % positions] = old[row]
                    self._noise_positions[number % positions] = number
        self._noise[position % len(self._noise_positions)] = noise
        self._noise_positions[position % len(self._noise_positions)] = position

    def grow_chain(self, max_depth: int, least: float = 0.0) -> None:
        """Grow the chain, at most ``max_depth`` deep, on which most tokens are expected to be accepted.

        No row of it is less likely than ``least``.
        """
        rows = len(self._path)
        self.grow(rows, max_depth, [least] * (rows + 1))
        self._keep_best_chain()

    def grow(self, rows: int, max_depth: int, stop: Sequence[float] | None = None) -> None:
        """Grow a tree of at most ``rows`` rows; with ``stop``, end before a row k less likely than stop[k]."""
        rows = min(rows, len(self._path))
        limits = self._no_stop if stop is None else np.array(stop, np.float64)
        if self.corpus is not None:
            self.corpus.catch_up()  # another text may have filled the trie
        missing = grow(*self._arguments(), rows, max_depth, limits, True)
        while missing >= 0:
            self._keep_noise(int(missing))
            missing = grow(*self._arguments(), rows, max_depth, limits, False)
        count = -missing
        self.tokens, self.parents, self.probabilities = (
            self._tree.nodes[field][:count].tolist() for field in ("token", "parent", "probability")
        )

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` rows."""
        if rows < len(self.tokens):
            del self.tokens[rows:], self.parents[rows:], self.probabilities[rows:]
            self._tree.sizes["rows"] = rows

    def _keep_best_chain(self) -> None:
        expected = self.probabilities[:1]
        for parent, probability in zip(self.parents[1:], self.probabilities[1:], strict=True):
            expected.append(expected[parent] + probability)
        rows, row = [], expected.index(max(expected))
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        rows.reverse()
        tree, count = self._tree, len(rows)
        for kept in (tree.nodes, tree.proposals, tree.edges):
            kept[:count] = kept[rows]
        for kept in (tree.matches, tree.contexts):
            kept[:, :count] = kept[:, rows]
        tree.nodes["parent"][:count] = np.arange(-1, count - 1)
        self.tokens = [self.tokens[row] for row in rows]
        self.probabilities = [self.probabilities[row] for row in rows]
        self.parents = list(range(-1, count - 1))
        tree.sizes["rows"] = count

    def adopt(self, tree: TokenTree) -> None:
        """Include the rows that others (the window) have added to the tree."""
        nodes, own, count = self._tree.nodes, len(self.tokens), len(tree)
        for field, values in (("token", tree.tokens), ("parent", tree.parents), ("depth", tree.depths)):
            nodes[field][own:count] = values[own:]
        self.tokens, self.parents = tree.tokens, tree.parents

    def learn(
        self, scores: Scores, path: Sequence[int], tokens: Sequence[int], window_start: int
    ) -> tuple[list[int], int]:
        """Learn from a step in which every row has logits.

        Args:
            scores: of all rows of the tree.
            path, tokens: the accepted rows and the emitted tokens.
            window_start: first row of the window.

        Returns:
            (own, credited): the target's token under each row as far as it is known, and the number of tokens that
            were accepted because of the window.
        """
        count, length = len(self.tokens), len(path)
        ids, odds = scores.top(range(count), self.top)
        columns = min(self.top, len(ids[0]))
        if columns < self._ids.shape[1]:
            self._ids, self._odds = self._ids[:, :columns].copy(), self._odds[:, :columns].copy()
        self._ids[:count], self._odds[:count] = np.asarray(ids)[:, :columns], np.asarray(odds)[:, :columns]
        self._path[:length], self._truths[:length] = path, tokens
        if self.noise is not None:
            for position in range(self._position, self._position + max(self.depths) + 1):
                if self._noise_positions[position % len(self._noise_positions)] != position:
                    self._keep_noise(position - self._position)
        if self.corpus is not None and self.corpus.catch_up():
            self._tree.contexts[1] = 0  # another text has filled the trie since: nothing matches
        self.tables.logits.reserve(count + length)
        step = StepResult(
            self._path[:length], self._truths[:length], self._ids, self._odds, self._own, self._credit
        )
        by_window: int = learn_from_step(*self._arguments(), step, count, window_start)
        return self._own[:count].tolist(), by_window

"""The adaptive drafter: grows a tree, reads every row of the answer, and learns what its proposals are worth.

The parts: ``suffix``, ``logits``, ``explorer`` and ``observe`` are the sources, ``calibration`` prices what
they propose, ``grow`` builds the tree, ``budget`` says how many rows pay, ``state`` is what may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from ..core import Drafter, Scores, SettingsError, TokenTree
from ..core.drafter import UNLIMITED_ROWS, Noise
from .budget import MENU, Budget, place_of
from .config import SOURCES, AdaptiveConfig
from .explorer import Explorer
from .grow import Grower, Proposals
from .logits import KINDS, WINDOW
from .observe import answers_by_position, read_rows
from .state import AdaptiveState
from .suffix import SuffixTrie


class AdaptiveDrafter(Drafter):
    """One calibrated token tree from every training-free source.

    Args:
        config: anything that ``AdaptiveConfig.of`` takes; None takes the state's.
        vocabulary: V; 0 takes the largest token seen plus one, which makes keys of contexts ambiguous.
        state: what is kept from request to request; None begins cold.
    """

    def __init__(self, config: Any = None, vocabulary: int = 0, state: AdaptiveState | None = None) -> None:
        if state is not None and not isinstance(state, AdaptiveState):
            raise SettingsError(f"adaptive keeps an AdaptiveState across calls, got {type(state).__name__}")
        if config is None and state is not None:
            config = state.config
        self.config = AdaptiveConfig.of(config)
        self.vocabulary = vocabulary
        self.state = state
        self._sampling: Noise | None = None

    def use_noise(self, noise: Noise | None) -> None:
        self._sampling = noise

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        config = self.config
        kept = self.state is not None and self.state.keep
        state = self.state if self.state is not None and kept else AdaptiveState(config)
        vocabulary = max(self.vocabulary, max(prompt) + 1, first + 1)
        self._grower = grower = Grower(
            state.tables(self._sampling is not None), vocabulary, {s: s in config.sources for s in SOURCES}
        )
        grower.reader = SuffixTrie(config.suffix_order).begin() if "suffix" in config.sources else None
        grower.corpus = state.corpus.begin() if kept and "corpus" in config.sources else None
        self._readers = [reader for reader in (grower.reader, grower.corpus) if reader is not None]
        grower.tail = [prompt[0]] * 3
        self._emitted = 1
        #: Not yet taken in: the prompt, later what plain steps have emitted; and how many of these there were.
        self._unread = [*prompt, first]
        self._skipped = 0
        self._light = False
        self._context = len(prompt)
        self._noise: dict[int, Any] = {}
        if self._sampling is not None:
            grower.noise = self._noise_below
            grower.temperature = max(self._sampling.temperature, 1e-3)
        self._explorer = (
            Explorer(config.window_size, config.ngram_size, prompt, vocabulary, eos, config.seed)
            if config.window_size
            else None
        )
        if self._explorer is not None and grower.use["ngrams"]:
            grower.ngrams = self._explorer.ngrams
        times = self.state.times if self.state is not None else state.times
        self._budget = Budget(times, config.max_rows) if config.budget else None
        self._credit = dict.fromkeys((*SOURCES, "window"), 0)
        self._offered = 0.0
        self._accepted = 0

    def _noise_below(self, depth: int) -> Any:
        """Noise of the token that is chosen under nodes of this depth."""
        index = self._emitted + depth
        noise = self._noise.get(index)
        if noise is None:
            assert self._sampling is not None
            noise = self._noise[index] = self._sampling(index)
        return noise

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        grower, budget = self._grower, self._budget
        self._start = perf_counter()
        limit = min(max_rows, self.config.max_rows)
        if budget is None:
            self._catch_up()
            grower.grow(limit, max_depth)
            return self._plant(len(grower.tokens), limit, max_depth)
        budget.times.enter(id(self))
        self._light = budget.plain and self._skipped < budget.interval
        if self._light:
            self._skipped += 1
            return TokenTree(self._unread[-1] if self._unread else grower.tail[2])
        self._catch_up()
        self._skipped = 0
        if budget.plain and not budget.probing:
            limit = 1
        grower.grow(limit, max_depth, budget.stop(self._context, limit))
        rows = budget.choose(grower.probabilities, self._context)
        return self._plant(rows, min(limit, MENU[place_of(rows)]), max_depth)

    def _catch_up(self) -> None:
        """Take in what has not been read yet: the prompt, or what plain steps have emitted."""
        if self._unread:
            self._take(self._unread)
            self._grower.answers = {}
            self._unread = []

    def _take(self, tokens: Sequence[int]) -> None:
        """The text has gone on."""
        for reader in self._readers:
            reader.feed(tokens)
        self._grower.tail = [*self._grower.tail, *tokens][-3:]

    def _plant(self, rows: int, room: int, max_depth: int) -> TokenTree:
        """The tree of the first ``rows`` nodes, with the window where there is room or it pays more."""
        grower, explorer = self._grower, self._explorer
        if explorer is not None and room > 1:
            wanted = explorer.wanted(max_depth)
            spare = rows + wanted - room
            if spare > 0 and wanted <= room // 2:
                given_up = sum(grower.probabilities[rows - spare : rows])
                if given_up < explorer.credit * wanted:
                    rows -= spare
            planted = 0 < wanted <= room - rows
        else:
            planted = False
        grower.cut(rows)
        tree = TokenTree.of(grower.tokens, grower.parents)
        self._window_start = rows
        if planted and explorer is not None:
            explorer.plant(tree)
            grower.adopt(tree)
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        budget = self._budget
        if self._light:
            assert budget is not None
            self._unread += tokens
        else:
            self._study(tree, scores, path, tokens)
        context = self._context
        self._context += len(tokens)
        self._emitted += len(tokens)
        if self._noise:
            for index in [index for index in self._noise if index < self._emitted]:
                del self._noise[index]
        if budget is None:
            return
        budget.batch = budget.times.leave(id(self))
        seconds = perf_counter() - self._start
        if self._light:
            budget.learn_plain(context, seconds)
        else:
            budget.learn(context, len(tree), self._expected, len(tokens), seconds)

    def _study(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn all that a step can teach."""
        grower, explorer = self._grower, self._explorer
        self._expected = sum(grower.probabilities)
        credited = self._learn(path, tokens)
        top = self.config.top if grower.noise is None else self.config.sampled_top
        answers = read_rows(grower, scores, path, self._window_start, top)
        if grower.use["jacobi"]:
            grower.answers = answers_by_position(grower, answers, len(tokens))
        if explorer is not None and len(tree) > self._window_start:
            explorer.advance(tree.tokens[0], answers, len(tree) - self._window_start, credited)
        self._take(tokens)
        self._offered += self._expected - 1
        self._accepted += len(tokens) - 1

    def _learn(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """Judge every proposal at the visited nodes; returns tokens accepted on the window's word."""
        grower = self._grower
        calibrations = grower.tables.calibrations
        last, credited = path[-1], 0
        for node, truth in zip(path, tokens, strict=True):
            seen = grower.proposals(node)
            proposed, cells, order, kinds, matched, buckets, recalled, marks = seen
            right = proposed.index(truth) if truth in proposed else -1
            calibrations.joint.learn(cells, right)
            if kinds:
                calibrations.logits[order].learn(kinds, right)
            if matched:
                calibrations.suffix.learn(buckets, matched.index(truth) if truth in matched else -1)
            if recalled:
                calibrations.corpus.learn(marks, recalled.index(truth) if truth in recalled else -1)
            if node != last:
                name = self._witness(node, truth, seen, right)
                self._credit[name] += 1
                credited += name in ("window", "ngrams")
        return credited

    def _witness(self, node: int, truth: int, seen: Proposals, right: int) -> str:
        """The source on whose word an accepted token was drafted; the most telling one of several."""
        _, _, _, kinds, matched, _, recalled, _ = seen
        if matched and matched[0] == truth:
            return "suffix"
        if recalled and recalled[0] == truth:
            return "corpus"
        if 0 <= right < len(kinds):
            return "window" if kinds[right] // KINDS % 3 == WINDOW else "logits"
        if truth in matched:
            return "suffix"
        if truth in recalled:
            return "corpus"
        if truth in self._grower.ngrams.get(self._grower.pair(node), ()):
            return "ngrams"
        return "jacobi" if right >= 0 else "window"

    def stats(self) -> dict[str, float]:
        """Accepted tokens by source, expected and real acceptance, and the budget's figures."""
        figures: dict[str, float] = {f"accepted_by_{name}": count for name, count in self._credit.items()}
        figures["expected_acceptance"] = self._offered
        figures["acceptance"] = self._accepted
        if self._explorer is not None:
            figures["window_rows"] = self._explorer.rows_used
        if self._budget is not None:
            figures["plain_steps"] = self._budget.paused_steps
            figures["breaker_trips"] = self._budget.trips
        return figures

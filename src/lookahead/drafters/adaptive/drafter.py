"""The adaptive drafter: grows a tree, reads every row of the answer, and learns what its proposals are worth.

The parts: ``sources`` propose, ``calibration`` says what a proposal is worth, ``growth`` builds the tree,
``learning`` reads the answer, ``budget`` says how many rows pay, ``state`` is what may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from ...core import Drafter, Scores, SettingsError, TokenTree
from ...core.drafter import UNLIMITED_ROWS, Noise
from .budget import LONGEST_REST, MENU, Budget, place_of
from .config import SOURCES, AdaptiveConfig
from .costs import StepTimes
from .grower import Grower
from .sources.suffix import SuffixTrie
from .sources.window import WindowSource
from .state import AdaptiveState

#: While a text goes on plainly: steps between two peeks at whether it repeats itself, and for how many tokens.
PEEK, REPEATS = 8, 4


class AdaptiveDrafter(Drafter):
    """One calibrated token tree from every training-free source.

    Args:
        config: anything that ``AdaptiveConfig.of`` takes; None takes the state's.
        vocabulary: V; 0 takes the largest token seen plus one, which makes keys of contexts ambiguous.
        state: what is kept from request to request; None begins cold.
    """

    def __init__(
        self,
        config: Any = None,
        vocabulary: int = 0,
        state: AdaptiveState | None = None,
    ) -> None:
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
        # A text that begins paused may never draft, so what drafting needs is made when it does.
        self._begin: tuple[list[int], frozenset[int]] | None = (list(prompt), eos)
        self._emitted = 1
        #: Not yet taken in: the prompt, later what plain steps have emitted.
        self._unread = [*prompt, first]
        self._last = first
        self._context = len(prompt)
        self._noise: dict[int, Any] = {}
        self._explorer: WindowSource | None = None
        times = self.state.times if self.state is not None else StepTimes()
        self._times = times
        self._drafts = times.drafts
        sampled = self._sampling is not None
        self._budget = Budget(times, self.config.max_rows, sampled) if self.config.budget else None
        #: Plain steps still to come before candidates are looked at; those made since, and their seconds.
        self._rest = self._budget.rest(self._context) if self._budget is not None else 0
        #: Stretches of ``REPEATS`` tokens seen, where drafting is not set up before one comes again; how often
        #: in a row that was the case.
        self._seen: set[tuple[int, ...]] | None = None
        self._again = 0
        if self._budget is not None and self._budget.waits:
            self._seen = set(zip(*(self._unread[i:] for i in range(REPEATS)), strict=False))
            self._rest = LONGEST_REST
            self._needed = self._budget.patience
        self._rested, self._rest_seconds = 0, 0.0
        self._offered = 0.0
        self._accepted = 0

    def _open(self, prompt: list[int], eos: frozenset[int]) -> None:
        """Make what drafting needs."""
        config, self._begin, self._seen = self.config, None, None
        kept = self.state is not None and self.state.keep
        state = self.state if kept else AdaptiveState(config)
        assert state is not None
        vocabulary = max(self.vocabulary, max(self._unread) + 1)
        if state.largest >= vocabulary:
            raise SettingsError(
                f"a saved state must be of this model: it holds token {state.largest}, the vocabulary has "
                f"{vocabulary}"
            )
        sampled = self._sampling is not None
        self._grower = grower = Grower(state.tables(sampled), vocabulary, config, sampled)
        grower.reader = SuffixTrie(config.suffix_order).begin() if "suffix" in config.sources else None
        grower.corpus = state.corpus.begin() if kept and "corpus" in config.sources else None
        grower.tail = [prompt[0]] * 3
        if self._sampling is not None:
            grower.noise = self._noise_below
            grower.temperature = max(self._sampling.temperature, 1e-3)
        if config.window_size:
            self._explorer = WindowSource(config.window_size, config.ngram_size, prompt, eos, config.seed)

    def _noise_below(self, depth: int) -> Any:
        """Noise of the token that is chosen under nodes of this depth."""
        index = self._emitted + depth
        noise = self._noise.get(index)
        if noise is None:
            assert self._sampling is not None
            noise = self._noise[index] = self._sampling(index)
        return noise

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        self._start = perf_counter()
        before, self._drafts = self._drafts, self._times.drafts + 1
        self._times.drafts = self._drafts
        if self._rest:  # as little as can be: after a forward pass even this code comes from slow memory
            return TokenTree(self._last)
        if self._begin is not None:
            self._open(*self._begin)
            self._catch_up()
            now = perf_counter()  # what happens once in a text says nothing of its steps
            if self._budget is not None:
                self._budget.opened(self._context, now - self._start)
            self._start = now
        grower, budget = self._grower, self._budget
        limit = min(max_rows, self.config.max_rows)
        if budget is None:
            self._catch_up()
            grower.grow(limit, max_depth)
            return self._plant(len(grower.tokens), limit, max_depth)
        # Drafters that share step times draft once a round each.
        budget.batch = self._drafts - before
        self._catch_up()
        grower.grow(limit, max_depth, budget.stop(self._context, limit))
        rows = budget.choose(grower.probabilities, self._context)
        if rows == 1 and not budget.may_study(self._context):
            return self._go_on_plainly(budget)
        return self._plant(rows, min(limit, MENU[place_of(rows)]), max_depth)

    def _go_on_plainly(self, budget: Budget) -> TokenTree:
        """The candidates promise nothing, and there is no time to learn from a single row."""
        now = perf_counter()
        budget.glanced(self._context, now - self._start)
        self._start = now
        self._rest = max(1, budget.rest(self._context))
        return TokenTree(self._last)

    def _catch_up(self) -> None:
        """Take in what has not been read yet: the prompt, or what plain steps have emitted."""
        if self._unread:
            self._grower.take(self._unread)
            self._grower.forget_answers()
            self._unread = []

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
            explorer.add_to(tree)
            grower.adopt(tree)
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        if self._rest:
            self._unread += tokens
            self._last = tokens[-1]
            self._rest -= 1
            self._rested += 1
            self._rest_seconds += perf_counter() - self._start
            if not self._rest:
                self._wake()
            elif self._repeats() if self._seen is not None else not self._rested % PEEK and self._peek():
                self._rest = 0
                self._wake()
            return
        self._study(tree, scores, path, tokens)
        budget, context = self._budget, self._context
        self._context += len(tokens)
        self._emitted += len(tokens)
        self._last = tokens[-1]
        if self._noise:
            for index in [index for index in self._noise if index < self._emitted]:
                del self._noise[index]
        if budget is not None:
            budget.learn(context, len(tree), self._expected, len(tokens), perf_counter() - self._start)
            self._rest = budget.rest(self._context) if len(tree) == 1 else 0

    def _repeats(self) -> bool:
        """Whether the last tokens came before, and those before them too; asked before drafting is set up."""
        assert self._seen is not None
        last = tuple(self._unread[-REPEATS:])
        self._again = self._again + 1 if last in self._seen else 0
        self._seen.add(last)
        return self._again > self._needed

    def _peek(self) -> bool:
        """Whether the text repeats itself, so that a look at the candidates is worth more than usual."""
        reader, budget = self._grower.reader, self._budget
        if reader is None or budget is None:
            return False
        self._catch_up()
        matched = reader.matched
        return matched >= REPEATS and budget.may_look(self._context, matched >= 2 * REPEATS)

    def _wake(self) -> None:
        """Plain steps are over, or the text is: count them."""
        steps, self._rested = self._rested, 0
        if steps and self._budget is not None:
            self._budget.learn_plain(self._context, steps, self._rest_seconds)
            self._context += steps
            self._emitted += steps
            self._rest_seconds = 0.0

    def _study(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn all that a step can teach."""
        grower, explorer = self._grower, self._explorer
        self._expected = sum(grower.probabilities)
        answers, credited = grower.study(scores, path, tokens, self._window_start)
        if explorer is not None and len(tree) > self._window_start:
            rows = len(tree) - self._window_start
            explorer.advance(tree.tokens[0], answers, rows, credited)
        grower.take(tokens)
        self._offered += self._expected - 1
        self._accepted += len(tokens) - 1

    @property
    def estimates(self) -> list[float]:
        """Of the last tree's own nodes (the window's come behind): the estimated probability of each path."""
        return [] if self._rest else list(self._grower.probabilities)

    @property
    def resting(self) -> bool:
        """Whether this step is a plain one, because drafts have not paid of late."""
        return bool(self._rest)

    def stats(self) -> dict[str, float]:
        """Accepted tokens by source, expected and real acceptance, and the budget's figures."""
        self._wake()
        if self._budget is not None:
            self._budget.close(self._context)
        credit = dict.fromkeys((*SOURCES, "window"), 0) if self._begin is not None else self._grower.credit
        figures: dict[str, float] = {f"accepted_by_{name}": count for name, count in credit.items()}
        figures["expected_acceptance"] = self._offered
        figures["acceptance"] = self._accepted
        if self.config.window_size:
            figures["window_rows"] = self._explorer.rows_used if self._explorer is not None else 0
        if self._budget is not None:
            figures["plain_steps"] = self._budget.plain_steps
            figures["breaker_trips"] = self._budget.trips
        return figures

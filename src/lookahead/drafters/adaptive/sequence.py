"""The state of one sequence: it grows a tree, reads the logits of every row, and learns how good its proposals are.

The sources propose tokens, ``calibration`` estimates their probabilities, ``growth`` builds the tree, ``controller``
chooses the number of rows, ``state`` may be kept across sequences. A text is in one of two phases: ``PlainSteps`` (at
first, and while drafting does not pay) and ``Drafting``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ...core import UNLIMITED_ROWS, DraftState, Scores, Start, TokenTree
from .controller import COOLDOWN, Controller
from .growth import Grower
from .settings import SOURCES, AdaptiveSettings
from .sources.suffix import SuffixTrie
from .sources.window_rows import WindowSource
from .state import AdaptiveState
from .step_times import MENU, StepTimes, menu_index


@dataclass(slots=True)
class Drafting:
    """Candidates are grown in every step.

    Attributes:
        grower: the sources of this sequence and the last tree.
        window: its rows are added if there is room; None for no window.
        own_rows: rows of the last tree without the window, whose rows follow.
    """

    grower: Grower
    window: WindowSource | None
    own_rows: int = 0


@dataclass(slots=True)
class PlainSteps:
    """Plain decoding steps, in which no candidates are grown.

    Attributes:
        steps: plain steps left. Then ``drafting`` continues; if it is None, drafting is set up as soon as the loss
            budget covers the cost.
        unread: tokens that the sources have not read.
        passes: seconds of each pass from which the controller has not learned yet.
        own: seconds that the drafter took in all of these passes.
        disturbed: whether a probe or a drafted step came just before.
    """

    steps: int
    drafting: Drafting | None
    unread: list[int]
    passes: list[float] = field(default_factory=list)
    own: float = 0.0
    disturbed: bool = False


class AdaptiveDraftState(DraftState):
    """One sequence: its phase, its controller, and the statistics of its steps.

    Args:
        settings: the drafter's settings.
        state: the state that sequences share, or None.
        sequence: without a vocabulary, V is the largest token seen plus one, which makes keys of contexts ambiguous;
            without step times, a new ``StepTimes`` learns from this sequence alone.

    Raises:
        SettingsError: the state belongs to another model.
    """

    def __init__(self, settings: AdaptiveSettings, state: AdaptiveState | None, sequence: Start) -> None:
        if state is not None and sequence.vocabulary:
            state.check(sequence.vocabulary)
        self.settings, self._state = settings, state
        self._vocabulary, self._sampling = sequence.vocabulary, sequence.noise
        self._prompt, self._eos = list(sequence.prompt), sequence.eos
        self._phase: PlainSteps | Drafting = PlainSteps(0, None, sequence.text)
        self._last, self._emitted = sequence.first, 1
        self._times: StepTimes = sequence.step_times if sequence.step_times is not None else StepTimes()
        sampled = sequence.noise is not None
        #: None: every step has as many rows as the settings allow, whatever their cost.
        timed = settings.budget is not False
        self._controller = Controller(self._times, len(self._prompt), sampled) if timed else None
        self._expected, self._offered, self._accepted = 0.0, 0.0, 0
        self._plain_steps = 0
        self._tries: dict[int, bool] = {}  # by the bin of the batch's size
        #: When the step began, and when its tree was ready; seconds of the last step's bookkeeping, which are counted
        #: in the next step; seconds of all drafters until the tree was ready.
        self._start = self._grown = self._late = self._taken = 0.0
        #: Seconds of drawing noise since the step or its observation began; last token whose noise was drawn.
        self._drawing, self._drawn = 0.0, -1

    def _set_up(self, text: list[int]) -> Drafting:
        """Allocate the sources and the tree, and read the prompt."""
        config, sampled = self.settings, self._sampling is not None
        kept = self._state is not None
        state = self._state if self._state is not None else AdaptiveState(config)
        vocabulary = max(self._vocabulary, max(text) + 1)
        state.check(vocabulary)
        grower = Grower(state.tables(sampled), vocabulary, config, sampled)
        grower.reader = SuffixTrie(config.suffix_order).begin() if "suffix" in config.sources else None
        grower.corpus = state.corpus.begin() if kept and "corpus" in config.sources else None
        grower.tail = [self._prompt[0]] * 3
        if self._sampling is not None:
            grower.noise = self._noise
            grower.temperature = max(self._sampling.temperature, 1e-3)
        window = None
        if config.window_size and not config.chain:
            window = WindowSource(config.window_size, config.ngram_size, self._prompt, self._eos, config.seed)
        return Drafting(grower, window)

    def _noise(self, depth: int) -> Any:
        """Noise of the token chosen under nodes of this depth."""
        assert self._sampling is not None
        begin = perf_counter()
        self._drawn = max(self._drawn, self._emitted + depth)
        noise = self._sampling(self._emitted + depth)
        seconds, draw = perf_counter() - begin, self._times.draw
        draw.value = draw.value or seconds
        self._drawing += draw.add(seconds)
        return noise

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        begin = perf_counter()
        self._start, self._late = begin - self._late, 0.0
        if self._controller is not None:
            self._controller.batch = batch
        if isinstance(self._phase, PlainSteps) and self._phase.steps == 0:
            self._phase = self._after(self._phase)
        if isinstance(self._phase, PlainSteps):
            tree = TokenTree(self._last)
        else:
            tree = self._grow(self._phase, max_depth, min(max_rows, self.settings.max_rows))
        self._times.drafted(len(tree))
        self._start, self._drawing = self._start + self._drawing, 0.0
        self._grown = perf_counter()
        self._taken = self._times.take(self._grown - begin)
        return tree

    def _after(self, plain: PlainSteps) -> PlainSteps | Drafting:
        """The phase that follows plain steps."""
        controller, drafting = self._controller, plain.drafting
        if drafting is None:
            if controller is not None and not (controller.can_set_up and self._may_try(controller.batch)):
                return PlainSteps(COOLDOWN, None, plain.unread)
            drafting = self._set_up(plain.unread)
        drafting.grower.take(plain.unread)
        drafting.grower.forget_answers()
        if plain.drafting is None and controller is not None:
            now = perf_counter()  # the set-up happens once and is not part of a step
            controller.set_up(now - self._start)
            self._start = now
        return drafting

    def _may_try(self, batch: int) -> bool:
        """Whether drafting may be set up in a batch of this size; decided once for each bin of sizes."""
        if batch == 1:
            return True
        sampled = self._sampling is not None
        where, _ = self._times.bin_of(batch, 0, sampled)
        if where not in self._tries:
            self._tries[where] = self._times.tries(batch, sampled)
        return self._tries[where]

    def _grow(self, drafting: Drafting, max_depth: int, limit: int) -> TokenTree:
        controller, grower = self._controller, drafting.grower
        prices = None if controller is None else controller.prices(limit)
        limit = limit if prices is None else len(prices) - 1
        if self.settings.chain:
            # The chain's rows are found among the rows of all branches, so prices by row number do not apply.
            grower.grow_chain(min(max_depth, limit - 1), 0.0 if prices is None else min(prices[1:]))
        else:
            grower.grow(limit, max_depth, prices)
        if controller is None:
            return self._tree(drafting, len(grower.tokens), limit, max_depth)
        rows = controller.choose(grower.probabilities)
        return self._tree(drafting, rows, min(limit, MENU[menu_index(rows)]), max_depth)

    @staticmethod
    def _tree(phase: Drafting, rows: int, room: int, max_depth: int) -> TokenTree:
        """The tree of the first ``rows`` nodes, with the window if there is room, or if it pays more than the nodes
        that it would replace."""
        grower, window = phase.grower, phase.window
        wanted = window.wanted(max_depth) if window is not None and room > 1 else 0
        spare = rows + wanted - room
        if window is not None and spare > 0 and wanted <= room // 2:
            given_up = sum(grower.probabilities[rows - spare : rows])
            rows -= spare if given_up < window.credit * wanted else 0
        grower.cut(rows)
        tree = TokenTree.of(grower.tokens, grower.parents)
        phase.own_rows = rows
        if window is not None and 0 < wanted <= room - rows:
            window.add_to(tree)
            grower.adopt(tree)
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        begin = perf_counter()
        # The time of other sequences' drafters since this tree was ready is not part of the pass.
        passed = begin - self._grown - (self._times.evaluated() - self._taken)
        if isinstance(self._phase, Drafting):
            self._study(self._phase, tree, scores, path, tokens)
        else:
            self._phase.unread.extend(tokens)
        self._last = tokens[-1]
        self._emitted += len(tokens)
        self._plain_steps += len(tree) == 1
        if self._controller is not None:
            self._account(self._controller, len(tree), len(tokens), passed, begin)
        self._times.take(perf_counter() - begin)

    def _account(self, controller: Controller, rows: int, tokens: int, passed: float, begin: float) -> None:
        """Report a step to the controller and change the phase if needed. ``begin``: when its observation began."""
        phase, times = self._phase, self._times
        controller.context = len(self._prompt) + self._emitted
        end = perf_counter()
        drafted, observed = self._grown - self._start, end - begin - self._drawing
        self._drawing = 0.0
        if self._emitted - tokens <= self._drawn:  # noise drawn ahead is not in the pass, but it is in t(1)
            passed += times.draw.value
        if isinstance(phase, PlainSteps):
            phase.steps -= 1
            phase.own += min(drafted + observed, times.probe.value)  # a longer time was an interruption
            if times.rows == times.batch and not times.mixed:  # else it was not a plain pass
                phase.passes.append(passed)
            if phase.steps and len(phase.passes) < COOLDOWN:
                return
            controller.learn_plain(phase.passes, phase.own, phase.disturbed)
            phase.passes, phase.own, phase.disturbed = [], 0.0, False
        else:
            drafted += times.draw.value * (tokens - 1)
            if rows == 1:
                times.probe.add(drafted + observed)
                drafted += observed
            else:  # observing takes longer with more rows, and every sequence waits for it
                passed += controller.batch * observed
            controller.learn(rows, self._expected, tokens, passed, drafted)
            steps = controller.cooldown(rows)
            if steps:
                self._phase = PlainSteps(steps, phase, [], disturbed=True)
        self._late = perf_counter() - end

    def _study(
        self, phase: Drafting, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Learn from the logits of all rows of a step.

        If the engine evaluated only the first rows of the drafted tree, or has only their logits, ``tree`` has only
        these rows.
        """
        grower, window = phase.grower, phase.window
        grower.cut(len(tree))
        self._expected = sum(grower.probabilities)
        answers, credited = grower.learn(scores, path, tokens, phase.own_rows)
        if window is not None and len(tree) > phase.own_rows:
            window.advance(tree.tokens[0], answers, len(tree) - phase.own_rows, credited)
        grower.take(tokens)
        self._offered += self._expected - 1
        self._accepted += len(tokens) - 1

    @property
    def _drafting(self) -> Drafting | None:
        """The sources and the last tree; None until drafting is set up."""
        return self._phase.drafting if isinstance(self._phase, PlainSteps) else self._phase

    @property
    def estimates(self) -> list[float]:
        """The estimated probability of each node of the last tree, without the window's rows at its end."""
        return list(self._phase.grower.probabilities) if isinstance(self._phase, Drafting) else []

    @property
    def cooling(self) -> bool:
        """Whether the step is a plain step, in which no candidates are grown."""
        return not isinstance(self._phase, Drafting)

    def trace(self, tree: TokenTree | None) -> dict[str, Any]:
        """The estimated probability that verification reaches each row, and the sources that proposed the row."""
        drafting = self._drafting
        if tree is None or len(tree) == 1 or drafting is None:
            return {}
        grower, window, own = drafting.grower, drafting.window, drafting.own_rows
        return {
            "probabilities": [round(probability, 4) for probability in grower.probabilities[:own]],
            "sources": [[], *(grower.sources_of(row) for row in range(1, own))],
            "window": window.nodes() if window is not None and len(tree) > own else [],
        }

    def stats(self) -> dict[str, float]:
        """Accepted tokens by source, expected and observed acceptance, and the controller's statistics."""
        drafting, controller = self._drafting, self._controller
        credit, rows = dict.fromkeys((*SOURCES, "window"), 0), 0
        if drafting is not None:
            credit = drafting.grower.credit
            rows = drafting.window.rows_used if drafting.window is not None else 0
        figures: dict[str, float] = {f"accepted_by_{name}": count for name, count in credit.items()}
        figures |= {"expected_acceptance": self._offered, "acceptance": self._accepted}
        if self.settings.window_size:
            figures["window_rows"] = rows
        if controller is not None:
            figures |= {"plain_steps": self._plain_steps, "cooldowns": controller.cooldowns}
        return figures

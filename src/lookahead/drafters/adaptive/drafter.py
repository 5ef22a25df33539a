"""The adaptive drafter: grows a tree, reads every row of the answer, and learns what its proposals are worth.

The sources propose, ``calibration`` prices what they propose, ``growth`` builds the tree, ``controller`` says how
many rows pay, ``state`` is what may be kept. A text is in one of two phases, and each holds what exists in it:
``Plain`` steps (at first, and where drafting does not pay) and ``Drafting``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ...core import Drafter, Scores, SettingsError, TokenTree
from ...core.drafter import UNLIMITED_ROWS, Noise
from .config import SOURCES, AdaptiveConfig
from .controller import COOLDOWN, Controller
from .grower import Grower
from .sources.suffix import SuffixTrie
from .sources.window import WindowSource
from .state import AdaptiveState
from .step_times import MENU, StepTimes, place_of


@dataclass(slots=True)
class Drafting:
    """Candidates are probed at every step.

    Attributes:
        grower: one sequence's view of the sources, and the tree that was grown last.
        window: its rows are added where there is room; None for no window.
        own_rows: rows of the last tree that the grower chose; those of the window follow.
    """

    grower: Grower
    window: WindowSource | None
    own_rows: int = 0


@dataclass(slots=True)
class Plain:
    """Plain steps, without a probe of the candidates.

    Attributes:
        steps: so many; then ``drafting`` goes on, or is set up where it is None and the loss budget can pay for it.
        unread: tokens that no source has seen.
        passes: seconds of each pass that was not learnt from yet; own: of the drafter in all of them.
        disturbed: whether a probe or a drafted step came just before these.
    """

    steps: int
    drafting: Drafting | None
    unread: list[int]
    passes: list[float] = field(default_factory=list)
    own: float = 0.0
    disturbed: bool = False


class AdaptiveDrafter(Drafter):
    """One calibrated token tree from every training-free source.

    Args:
        config: anything that ``AdaptiveConfig.of`` takes; None takes the state's.
        vocabulary: V; 0 takes the largest token seen plus one, which makes keys of contexts ambiguous.
        state: what is kept from request to request; None begins cold.

    Raises:
        SettingsError: unknown settings, or a state of another model.
    """

    def __init__(self, config: Any = None, vocabulary: int = 0, state: AdaptiveState | None = None) -> None:
        if state is not None and not isinstance(state, AdaptiveState):
            raise SettingsError(f"adaptive keeps an AdaptiveState across calls, got {type(state).__name__}")
        if state is not None and vocabulary:  # before the first token, not once drafting is set up
            state.check(vocabulary)
        self.config = AdaptiveConfig.of(state.config if config is None and state is not None else config)
        self.vocabulary, self.state = vocabulary, state
        self._sampling: Noise | None = None
        self.reset([0], 0, frozenset())

    def use_noise(self, noise: Noise | None) -> None:
        self._sampling = noise

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self._prompt, self._eos = list(prompt), eos
        self._phase: Plain | Drafting = Plain(0, None, [*prompt, first])
        self._last, self._emitted = first, 1
        self._times = self.state.times if self.state is not None else StepTimes()
        #: None: as many rows as the settings allow, whatever they cost.
        sampled = self._sampling is not None
        self._controller = Controller(self._times, len(prompt), sampled) if self.config.budget else None
        self._expected, self._offered, self._accepted = 0.0, 0.0, 0
        self._plain_steps = 0
        #: When the step began and its tree was there; seconds of the last step's accounts, which the next one bears;
        #: what all drafters had taken by then.
        self._start = self._grown = self._late = self._taken = 0.0
        #: Seconds in which noise was drawn since the step began, or since it was to be observed; its last token.
        self._drawing, self._drawn = 0.0, -1

    def _set_up(self, text: list[int]) -> Drafting:
        """Make what drafting needs."""
        config, sampled = self.config, self._sampling is not None
        kept = self.state is not None and self.state.keep
        state = self.state if self.state is not None and kept else AdaptiveState(config)
        vocabulary = max(self.vocabulary, max(text) + 1)
        state.check(vocabulary)
        grower = Grower(state.tables(sampled), vocabulary, config, sampled)
        grower.reader = SuffixTrie(config.suffix_order).begin() if "suffix" in config.sources else None
        grower.corpus = state.corpus.begin() if kept and "corpus" in config.sources else None
        grower.tail = [self._prompt[0]] * 3
        if self._sampling is not None:
            grower.noise = self._noise
            grower.temperature = max(self._sampling.temperature, 1e-3)
        window = None
        if config.window_size:
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

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        begin = perf_counter()
        self._start, self._late = begin - self._late, 0.0
        if self._controller is not None:
            self._controller.batch = self.batch
        if isinstance(self._phase, Plain) and self._phase.steps == 0:
            self._phase = self._after(self._phase)
        if isinstance(self._phase, Plain):
            tree = TokenTree(self._last)
        else:
            tree = self._grow(self._phase, max_depth, min(max_rows, self.config.max_rows))
        self._times.drafted(len(tree))
        self._start, self._drawing = self._start + self._drawing, 0.0
        self._grown = perf_counter()
        self._taken = self._times.take(self._grown - begin)
        return tree

    def _after(self, plain: Plain) -> Plain | Drafting:
        """The phase that follows upon plain steps."""
        controller, drafting = self._controller, plain.drafting
        if drafting is None:
            if controller is not None and not controller.can_set_up:
                return Plain(COOLDOWN, None, plain.unread)
            drafting = self._set_up(plain.unread)
        drafting.grower.take(plain.unread)
        drafting.grower.forget_answers()
        if plain.drafting is None and controller is not None:
            now = perf_counter()  # what happens once in a text says nothing of its steps
            controller.set_up(now - self._start)
            self._start = now
        return drafting

    def _grow(self, drafting: Drafting, max_depth: int, limit: int) -> TokenTree:
        controller, grower = self._controller, drafting.grower
        if controller is None:
            grower.grow(limit, max_depth)
            return self._tree(drafting, len(grower.tokens), limit, max_depth)
        prices = controller.prices(limit)
        limit = len(prices) - 1
        grower.grow(limit, max_depth, prices)
        rows = controller.choose(grower.probabilities)
        return self._tree(drafting, rows, min(limit, MENU[place_of(rows)]), max_depth)

    @staticmethod
    def _tree(phase: Drafting, rows: int, room: int, max_depth: int) -> TokenTree:
        """The tree of the first ``rows`` nodes, with the window where there is room or it pays more."""
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
        # What other drafters did since this one's tree was there is no part of the pass.
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
        """Count a step that began to be observed at ``begin``, and go on to the phase that follows from it."""
        phase, times = self._phase, self._times
        controller.context = len(self._prompt) + self._emitted
        end = perf_counter()
        drafted, observed = self._grown - self._start, end - begin - self._drawing
        self._drawing = 0.0
        if self._emitted - tokens <= self._drawn:  # noise drawn ahead is missing in the pass, and not in t(1)
            passed += times.draw.value
        if isinstance(phase, Plain):
            phase.steps -= 1
            phase.own += min(drafted + observed, times.probe.value)  # more was an interruption
            if times.rows == times.batch:  # else others of the batch have drafted, and it was no plain pass
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
            else:  # which more rows take more of, for every sequence of the pass
                passed += controller.batch * observed
            controller.learn(rows, self._expected, tokens, passed, drafted)
            steps = controller.cooldown(rows)
            if steps:
                self._phase = Plain(steps, phase, [], disturbed=True)
        self._late = perf_counter() - end

    def _study(
        self, phase: Drafting, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Learn all that a step can teach."""
        grower, window = phase.grower, phase.window
        self._expected = sum(grower.probabilities)
        answers, credited = grower.study(scores, path, tokens, phase.own_rows)
        if window is not None and len(tree) > phase.own_rows:
            window.advance(tree.tokens[0], answers, len(tree) - phase.own_rows, credited)
        grower.take(tokens)
        self._offered += self._expected - 1
        self._accepted += len(tokens) - 1

    @property
    def estimates(self) -> list[float]:
        """Of the last tree's own nodes (the window's come behind): the estimated probability of each path."""
        return list(self._phase.grower.probabilities) if isinstance(self._phase, Drafting) else []

    @property
    def cooling(self) -> bool:
        """Whether the step is a plain one, its candidates not probed."""
        return not isinstance(self._phase, Drafting)

    def stats(self) -> dict[str, float]:
        """Accepted tokens by source, expected and real acceptance, and the controller's figures."""
        phase, controller = self._phase, self._controller
        drafting = phase.drafting if isinstance(phase, Plain) else phase
        credit, rows = dict.fromkeys((*SOURCES, "window"), 0), 0
        if isinstance(drafting, Drafting):
            credit = drafting.grower.credit
            rows = drafting.window.rows_used if drafting.window is not None else 0
        figures: dict[str, float] = {f"accepted_by_{name}": count for name, count in credit.items()}
        figures |= {"expected_acceptance": self._offered, "acceptance": self._accepted}
        if self.config.window_size:
            figures["window_rows"] = rows
        if controller is not None:
            figures |= {"plain_steps": self._plain_steps, "cooldowns": controller.cooldowns}
        return figures

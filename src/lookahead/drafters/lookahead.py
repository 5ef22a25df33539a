"""Lookahead decoding (paper, Algorithms 2 and 3): window, pool and candidates in one tree.

Each step completes up to W new n-grams in the window and adds them to the pool. In the same forward pass, up to G
n-grams of the pool that begin with the last token are verified.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core import (
    UNLIMITED_ROWS,
    Drafter,
    DraftState,
    Scores,
    SettingsError,
    Start,
    TokenTree,
    common_prefix,
)
from ..core.target import best_or_nan
from .checks import check_flag, check_whole, text_form
from .pool import NGramPool, ngrams_of
from .window import Window, fill_tokens

#: Largest W, N and G.
LARGEST = 512
#: The share of a small row budget that is reserved for candidates.
CANDIDATE_SHARE = 0.5
TRIPLE = ("window_size", "ngram_size", "guess_set_size")


@dataclass(frozen=True)
class Lookahead(Drafter):
    """The paper's method with a fixed (W, N, G).

    Attributes:
        window_size: W, columns of the window, 1 to 512.
        ngram_size: N, tokens of an n-gram, 2 to 512.
        guess_set_size: G, candidates verified per step, 0 to 512.
        pool_from_prompt: add n-grams of the prompt to the pool ("prompt as reference", paper, Table 3).
        pool_from_output: add n-grams of the completion to the pool as it is generated.
        max_pool_keys: largest number of keys in the pool; None for no limit.
        max_jacobi_iterations: after this many consecutive steps without an accepted token, the window is refilled
            from the prompt and warms up again; the pool is kept. None for never.
        seed: seed of the random tokens that fill the window. It changes the draft, never the output.
        pool: an n-gram pool that sequences share; None to start every sequence with an empty pool.

    Raises:
        SettingsError: a value out of range.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    max_pool_keys: int | None = None
    max_jacobi_iterations: int | None = None
    seed: int = 0
    pool: NGramPool | None = field(default=None, compare=False, repr=False)

    name = "lookahead"

    @property
    def uses_prediction(self) -> bool:
        """Whether n-grams of a prediction enter the pool and can become candidates."""
        return self.pool_from_prompt and self.guess_set_size > 0

    def __post_init__(self) -> None:
        if self.triple == (1, 1, 0):
            raise SettingsError("(1, 1, 0) means plain decoding; use lookahead.Plain()")
        check_whole(self, "window_size", 1, LARGEST)
        check_whole(self, "ngram_size", 2, LARGEST)
        check_whole(self, "guess_set_size", 0, LARGEST)
        check_whole(self, "seed", 0)
        check_flag(self, "pool_from_prompt")
        check_flag(self, "pool_from_output")
        for name in ("max_pool_keys", "max_jacobi_iterations"):
            if getattr(self, name) is not None:
                check_whole(self, name, 1)
        if self.pool is not None and not isinstance(self.pool, NGramPool):
            raise SettingsError(f"pool must be an NGramPool or None, got {type(self.pool).__name__}")

    def __str__(self) -> str:
        return text_form(self.name, self, TRIPLE)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Lookahead:
        """Settings by name: code, text or creative; 7b, 13b or 34b (see ``for_model``); cpu for few rows.

        Args:
            name: a key of ``PRESETS``.
            **changes: settings that override the preset's.

        Raises:
            SettingsError: an unknown name or setting, or a value out of range.
        """
        if name not in PRESETS:
            raise SettingsError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        try:
            return replace(PRESETS[name], **changes)
        except TypeError as error:
            raise SettingsError(f"preset {name}: {error}") from None

    @classmethod
    def for_model(cls, parameters: float) -> Lookahead:
        """The paper's (W, N, G) for an A100, by model size (section 5).

        Args:
            parameters: number of parameters, such as 7e9. Up to 10e9 gives (15, 5, 15), the paper's choice
                for 7B models; up to 20e9 gives (10, 5, 10), for 13B; more gives (7, 5, 7), for 34B.

        Raises:
            SettingsError: not a number above 0.
        """
        if not isinstance(parameters, (int, float)) or isinstance(parameters, bool) or not parameters > 0:
            raise SettingsError(f"parameters must be a number above 0, as in 7e9, got {parameters!r}")
        return PRESETS["7b" if parameters <= 10e9 else "13b" if parameters <= 20e9 else "34b"]

    @property
    def triple(self) -> tuple[int, int, int]:
        """(W, N, G)."""
        return self.window_size, self.ngram_size, self.guess_set_size

    @property
    def max_step_rows(self) -> int:
        """The number of rows in the largest step: the root, the window and G candidates of N-1 tokens.

        With k levels, the window has k (W + N - 1 - k) rows including the root; a narrow one is largest in warm-up.
        """
        w, n, g = self.triple
        return max(k * (w + n - 1 - k) for k in range(1, n)) + g * (n - 1)

    def start(self, sequence: Start) -> DraftState:
        return LookaheadDraftState(self, sequence)


#: Settings by name. 7b, 13b and 34b are the paper's (section 5). code, text and creative are for completions
#: with much, moderate and little repetition: the more repetition, the longer the n-grams and the wider the
#: window. cpu has few rows, because on a CPU every row takes time.
PRESETS = {
    "code": Lookahead(8, 6, 15, max_pool_keys=10_000, max_jacobi_iterations=12),
    "text": Lookahead(7, 5, 10, max_pool_keys=10_000, max_jacobi_iterations=16),
    "creative": Lookahead(5, 4, 8, max_pool_keys=10_000, max_jacobi_iterations=20),
    "7b": Lookahead(15, 5, 15),
    "13b": Lookahead(10, 5, 10),
    "34b": Lookahead(7, 5, 7),
    "cpu": Lookahead(2, 3, 3),
}


class LookaheadDraftState(DraftState):
    """Window, pool and tokens of one sequence."""

    def __init__(self, settings: Lookahead, sequence: Start) -> None:
        self.settings = settings
        kept = settings.pool
        self.pool = kept if kept is not None else NGramPool(settings.guess_set_size, settings.max_pool_keys)
        self._text = sequence.text
        if settings.pool_from_prompt:
            self.pool.add_text(self._text, settings.ngram_size)
        self._eos = sequence.eos
        self._random = random.Random(settings.seed)
        self._source = fill_tokens(sequence.prompt, sequence.eos)
        self._window = Window(settings.window_size, settings.ngram_size, self._guess)
        self._offered: list[tuple[int, ...]] = []
        # N-grams of the window that were added to the pool in the last step.
        self._entered: list[tuple[int, ...]] = []
        self._unread = 0  # start of the first n-gram that the last step's tokens completed
        self._steps = self._hits = self._matched = 0
        self._fruitless = 0  # consecutive steps without an accepted token

    def _guess(self) -> int:
        """A token for an empty position of the window: a random token of the prompt."""
        return self._random.choice(self._source)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = TokenTree(self._text[-1])
        self._fit_window(max_depth, max_rows)
        self._window.add_to(tree)
        self._offered = []
        if self.settings.guess_set_size and max_depth > 0:
            self._offered = self.pool.get(self._text[-1])[: self.settings.guess_set_size]
        for continuation in self._offered:
            room = max_rows - len(tree)
            tree.add_candidate(continuation[: min(max_depth, room)])
        return tree

    def _fit_window(self, max_depth: int, max_rows: int) -> None:
        """Make the window as wide as the step has room for.

        Under a small row budget, candidates get their share first. With 64 rows, (15, 5, 15) has 32 rows for
        candidates; the window keeps 8 columns of 4 levels, which are 32 rows including the root. When the budget
        grows, the window widens again.
        """
        window = self._window
        settings = self.settings
        candidates = settings.guess_set_size * (settings.ngram_size - 1)
        room = max_rows - min(candidates, int(CANDIDATE_SHARE * max_rows))  # includes the root
        levels = len(window.levels)
        if not levels and min(max_depth + 2 - window.height, room // window.height) < 1:
            return  # the warm-up could never finish
        # With k levels, c columns have k c rows including the root; column i reaches depth i + k - 1.
        columns = min(max_depth + 2 - max(1, levels), room // max(1, levels))
        window.narrow(columns)
        window.widen(columns)

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        settings = self.settings
        window = self._window
        pool = self.pool
        text = self._text

        # Statistics of the candidates.
        self._steps += 1
        self._hits += bool(self._offered)
        accepted = tokens[:-1]  # the last one is the bonus token
        self._matched += max((common_prefix(candidate, accepted) for candidate in self._offered), default=0)

        # Advance the window, and add the n-grams that it completed to the pool.
        new = [best_or_nan(scores, node) for node in window.newest_nodes()]
        self._entered = [n for n in window.advance(text[-1], new, self._eos) if n[0] not in self._eos]
        for ngram in self._entered:
            pool.add(ngram[0], ngram[1:])

        # Restart a window that has led to no accepted token for too long.
        self._fruitless = 0 if len(tokens) > 1 else self._fruitless + 1
        if self._fruitless == settings.max_jacobi_iterations:
            self._fruitless = 0
            window.narrow(0)

        # Add the n-grams of the sequence itself that the new tokens completed.
        text.extend(tokens)
        self._unread = len(text) - len(tokens) - settings.ngram_size + 1
        if settings.pool_from_output:
            pool.add_text(text, settings.ngram_size, self._unread)

    def trace(self, tree: TokenTree | None) -> dict[str, Any]:
        """Rows of the window by level, rows of the candidates, n-grams added to the pool."""
        settings = self.settings
        read = settings.pool_from_prompt if tree is None else settings.pool_from_output
        copied = (
            ngrams_of(self._text, settings.ngram_size, 0 if tree is None else self._unread) if read else ()
        )
        shown: dict[str, Any] = {"ngrams": self._entered, "ngrams_of_text": [list(ngram) for ngram in copied]}
        if tree is None:
            return shown
        chains = [tree.chain(candidate) for candidate in self._offered]
        return {"window": self._window.nodes(), "candidates": [chain for chain in chains if chain], **shown}

    def stats(self) -> dict[str, float]:
        """Statistics of the pool and of its candidates in this sequence.

        ``pool_hit_rate`` is h, the share of steps in which the pool had candidates. ``mean_match_length`` is m, the
        mean number of accepted tokens of the best candidate in those steps. S is 1 + h m, plus the tokens accepted
        from the window's own rows.
        """
        figures = {f"pool_{key}": value for key, value in self.pool.stats().items()}
        figures["pool_hit_rate"] = self._hits / self._steps if self._steps else 0.0
        figures["mean_match_length"] = self._matched / self._hits if self._hits else 0.0
        return figures

"""Statistics collected while a sequence is decoded, and the first difference between two token sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

PHASES = ("prefill", "draft", "forward", "verify", "commit", "observe")


@dataclass(slots=True)
class Stats:
    """Statistics of one sequence. Steps are the forward passes after the prefill, which emits the first token.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: emitted tokens, including that of the prefill.
        steps: forward passes after the prefill.
        rows: rows evaluated in those passes.
        drafted: rows below the root that verification could have accepted (they and their ancestors have logits).
        accepted: rows that verification accepted.
        tokens_per_step: number of steps for each number of emitted tokens.
        rows_per_step: number of steps for each number of rows.
        seconds: wall-clock time by phase. Sequences that share a forward pass each count its full time.
        drafter: statistics of the drafting method.
        path: how the target evaluates steps (``Target.path``); "" if unnamed.
        guarantee: how this sequence compares with plain decoding on the same path; "" if unknown.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_step: Counter[int] = field(default_factory=Counter)
    rows_per_step: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafter: dict[str, float] = field(default_factory=dict)
    path: str = ""
    guarantee: str = ""

    def count_step(self, rows: int, drafted: int, emitted: int) -> None:
        """Count one step: evaluated rows, rows that could have been accepted, emitted tokens (accepted plus one)."""
        self.steps += 1
        self.rows += rows
        self.drafted += drafted
        self.accepted += emitted - 1
        self.tokens_per_step[emitted] += 1
        self.rows_per_step[rows] += 1

    @property
    def compression_ratio(self) -> float:
        """S: tokens per forward pass after the prefill, including the bonus token (paper, section 4)."""
        return (self.new_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted rows."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of steps that accepted at least 1, 2, 3, ... drafted tokens."""
        longest = max(self.tokens_per_step, default=1)
        return [
            sum(count for size, count in self.tokens_per_step.items() if size > depth) / self.steps
            for depth in range(1, longest)
        ]

    def as_dict(self) -> dict[str, Any]:
        """All attributes and the figures computed from them, as JSON values."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("tokens_per_step", "rows_per_step"):
            plain[name] = {str(size): steps for size, steps in sorted(plain[name].items())}
        for name in ("seconds", "drafter"):
            plain[name] = dict(plain[name])
        for name in ("compression_ratio", "acceptance_rate", "acceptance_by_position"):
            plain[name] = getattr(self, name)
        return plain


class timed:
    """``with timed("draft", stats):`` adds the block's wall time to that phase of every given ``Stats``.

    It is a class because a generator-based context manager takes three times as long, and every step enters five.
    """

    __slots__ = ("_phase", "_start", "_stats")

    def __init__(self, phase: str, stats: Sequence[Stats]) -> None:
        self._phase = phase
        self._stats = stats
        self._start = perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        elapsed = perf_counter() - self._start
        for sequence in self._stats:
            sequence.seconds[self._phase] += elapsed


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two token sequences."""
    shorter = min(len(a), len(b))
    return next((index for index in range(shorter) if a[index] != b[index]), shorter)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if the sequences are equal.

    If one is a prefix of the other, this is the length of the shorter one.
    """
    length = common_prefix(a, b)
    return None if length == len(a) == len(b) else length

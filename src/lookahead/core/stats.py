"""What decoding one sequence cost, counted while it is decoded; and where two texts part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

from .target import PROMISES

PHASES = ("prefill", "draft", "forward", "verify", "commit", "observe")


@dataclass(slots=True)
class Stats:
    """What one sequence cost. A step is a forward pass after the prefill, which emits the first token.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: tokens emitted, that of the prefill included.
        steps: forward passes after the prefill.
        rows: rows evaluated in those passes.
        drafted: rows that verification could have accepted: below the root, reached through rows with logits.
        accepted: rows that it did accept.
        tokens_per_step: steps by the number of tokens that they emitted.
        rows_per_step: steps by their number of rows.
        seconds: wall time by phase while this sequence was in it; sequences that share a pass share it.
        drafter: figures of the drafting method's own.
        path: what evaluated the steps, by the target's own name; "" where it has none.
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

    def count_step(self, rows: int, drafted: int, emitted: int) -> None:
        """One step: rows evaluated, rows that could have been accepted, tokens emitted (accepted plus one)."""
        self.steps += 1
        self.rows += rows
        self.drafted += drafted
        self.accepted += emitted - 1
        self.tokens_per_step[emitted] += 1
        self.rows_per_step[rows] += 1

    @property
    def compression_ratio(self) -> float:
        """S: tokens per forward pass after the prefill, bonus token included (paper, section 4)."""
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

    @property
    def promise(self) -> str:
        """What holds of this text beside plain decoding on the same path; "" where that is not known."""
        return PROMISES.get(self.path, "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: every attribute and every figure computed from them."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("tokens_per_step", "rows_per_step"):
            plain[name] = {str(size): steps for size, steps in sorted(plain[name].items())}
        for name in ("seconds", "drafter"):
            plain[name] = dict(plain[name])
        for name in ("compression_ratio", "acceptance_rate", "acceptance_by_position", "promise"):
            plain[name] = getattr(self, name)
        return plain


@contextmanager
def timed(phase: str, stats: Sequence[Stats]) -> Iterator[None]:
    """``with timed("draft", stats):`` adds the block's wall time to that phase of every given ``Stats``."""
    start = perf_counter()
    try:
        yield
    finally:
        elapsed = perf_counter() - start
        for one in stats:
            one.seconds[phase] += elapsed


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length where one begins the other; None if equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))

"""What commands say of a result: records for machines, lines for people, and the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.records import RecordWriter

if TYPE_CHECKING:
    from ..engine.compare import Comparison
    from ..engine.llm import LLM
    from ..engine.results import Result


def tracing(path: Path | None, append: bool = False) -> AbstractContextManager[RecordWriter | None]:
    """The writer of ``--trace``, or None."""
    return nullcontext() if path is None else RecordWriter(path, append, durable=False)


def as_record(result: Result) -> dict[str, Any]:
    """A result in the words of the batch form; steps are forward passes after the prefill."""
    record = {
        "output_ids": result.tokens,
        "text": result.text,
        "new_tokens": len(result.tokens),
        "steps": result.stats.steps,
        "rows": result.stats.rows,
        "seconds": result.seconds,
        "finish_reason": result.finish_reason,
    }
    return record if result.seed is None else record | {"seed": result.seed}


def summary(llm: LLM, result: Result) -> str:
    """One line: tokens, steps, speed."""
    stats = result.stats
    seed = "" if result.seed is None else f" · seed {result.seed}"
    return (
        f"{stats.new_tokens} tokens in {stats.steps} steps ({stats.compression_ratio:.2f} a step) · "
        f"{result.seconds:.2f} s · {stats.new_tokens / max(result.seconds, 1e-9):.1f} tokens/s · "
        f"{result.finish_reason}{seed} · {llm.method} · {llm.dtype}"
        + (f" · {stats.path} path" if stats.path else "")
    )


def compared(llm: LLM, comparison: Comparison) -> str:
    """One line: equal or not, steps and seconds of both."""
    as_dict = comparison.as_dict()
    cost = (
        f"steps {as_dict['steps']} against {as_dict['plain_steps']} · "
        f"seconds {as_dict['seconds']:.2f} against {as_dict['plain_seconds']:.2f} ({comparison.speedup:.2f}x)"
    )
    if comparison.equal:
        return f"equal to plain decoding · {cost}"
    return (
        f"NOT equal to plain decoding from token {comparison.first_divergence} on, where the two best "
        f"logits are {comparison.gap:.3g} apart ({llm.dtype}) · {cost}"
    )


def diverged(llm: LLM, comparisons: Sequence[Comparison]) -> int:
    """Exit status: 1 where a full-precision run is not equal; in short formats near ties may flip."""
    return int(llm.dtype in ("float32", "float64") and any(not c.equal for c in comparisons))

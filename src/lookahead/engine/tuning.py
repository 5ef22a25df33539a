"""Step times of a loaded model, measured at length and kept for the adaptive drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from ..drafters.adaptive import measure_times, model_key, save_times
from .llm import LLM


def tune_model(
    llm: LLM,
    rows: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    progress: Callable[[int, int, int, float], None],
) -> Path | None:
    """Measure steps of all these sizes and keep their times for this machine and model.

    Args:
        llm: its target evaluates the steps.
        rows: per sequence; must contain 1, which is plain decoding.
        contexts: committed tokens; what does not fit the model is left out.
        batches: sequences in one pass.
        repeats: measurements of each size, at least 1.
        progress: told (batch, context, rows, seconds) of each size.

    Returns:
        The file that holds the times; None where no context fits.
    """
    target = llm.target()
    times = measure_times(target, target.vocabulary, rows, contexts, batches, repeats, progress, inf)
    return save_times(model_key(llm.model, target.path), times) if times.bins else None

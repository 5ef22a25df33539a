"""Forgetting what is kept of a model, for changes that leave no trace (docs/cpu.md says which are seen)."""

from __future__ import annotations

from typing import Any

from .llm import LLM


def refresh(model: Any) -> None:
    """Read a model anew: its probe, compiled weights, captured passes and step times are forgotten.

    Needed after weights were written behind torch's back (``weight.data += delta``, as some adapters are merged);
    nothing in flight is changed.

    Args:
        model: a transformers model, or an ``LLM``.
    """
    from ..drafters.adaptive.times import forget_times
    from ..targets.factory import forget, probe

    llm = model if isinstance(model, LLM) else None
    model = model if llm is None else llm.model
    forget(model)
    forget_times(model)
    if llm is not None:
        llm.probe, llm._path = probe(model), None

"""The model under test: what the methods need of it, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import Target
from ..engine import LLM, load

UNLIMITED = 1 << 30


@dataclass(slots=True)
class ModelUnderTest:
    """A model and the target on it.

    Attributes:
        name: for the records.
        target: evaluates the steps of our methods.
        model: the transformers model; None where there is only a target, and then no ``hf-`` method.
        tokenizer: of transformers; None where prompts are tokens already.
        eos: tokens that end a text.
        max_positions: the longest text that the model takes, in tokens.
        draft_model: for ``hf-assisted``.
        dtype: for the records.
    """

    name: str
    target: Target
    model: Any = None
    tokenizer: Any = None
    eos: frozenset[int] = frozenset()
    max_positions: int = UNLIMITED
    draft_model: Any = None
    dtype: str = "float32"

    @classmethod
    def of(cls, llm: LLM, draft_model: Any = None, path: str = "auto") -> ModelUnderTest:
        """What ``lookahead.load`` gave, with a target of the given path (see ``LLM.target``)."""
        longest = llm.context or UNLIMITED
        target = llm.target(path)
        return cls(llm.name, target, llm.model, llm.tokenizer, llm.eos, longest, draft_model, llm.dtype)


def load_model(
    model: str | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    draft_model: str | None = None,
    device: str | None = None,
    path: str = "auto",
) -> ModelUnderTest:
    """Load a model by directory or hub id; the bundled one where None.

    Raises:
        SettingsError: whatever of this cannot be honoured.
    """
    llm = load(model, dtype=dtype, threads=threads, device=device)
    if model is not None and Path(model).exists():
        llm.name = Path(model).resolve().name  # the whole path says nothing on another machine
    draft = None if draft_model is None else load(draft_model, dtype=dtype, device=device).model
    return ModelUnderTest.of(llm, draft, path)

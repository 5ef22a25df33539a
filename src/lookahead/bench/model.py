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
    """A model and the target on it."""

    name: str  # for the records
    target: Target  # evaluates the steps of our methods
    model: Any = None  # of transformers; None where there is only a target, and then no ``hf-`` method
    tokenizer: Any = None  # of transformers; None where prompts are tokens already
    eos: frozenset[int] = frozenset()  # tokens that end a text
    max_positions: int = UNLIMITED  # the longest text that the model takes, in tokens
    draft_model: Any = None  # for ``hf-assisted``
    dtype: str = "float32"  # for the records

    @classmethod
    def of(cls, llm: LLM, draft_model: Any = None, path: str = "auto") -> ModelUnderTest:
        """What ``lookahead.load`` gave, with a target of the given path (see ``LLM.target``)."""
        longest = llm.context or UNLIMITED
        target = llm.target(path)
        return cls(llm.name, target, llm.model, llm.tokenizer, llm.eos, longest, draft_model, llm.dtype)


def load_model(
    path_or_id: str | None = None, *, draft_model: str | None = None, path: str = "auto", **options: Any
) -> ModelUnderTest:
    """The model of a directory, file or hub id; the default one of ``lookahead.load`` where None.

    Args:
        draft_model: likewise, for ``hf-assisted``.
        path: of the target; see ``LLM.target``.
        **options: as ``lookahead.load`` takes them.

    Raises:
        SettingsError: whatever of this cannot be honoured.
    """
    llm = load(path_or_id, **options)
    if path_or_id is not None and Path(path_or_id).exists():
        llm.name = Path(path_or_id).resolve().name  # the whole path says nothing on another machine
    draft = None if draft_model is None else load(draft_model, **options).model
    return ModelUnderTest.of(llm, draft, path)

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
    dtype: str = "float32"  # for the records
    gguf: str | None = None  # the file that it was read from, for llama.cpp

    @classmethod
    def of(cls, llm: LLM, path: str = "auto") -> ModelUnderTest:
        """What ``lookahead.load`` gave, with a target of the given path (see ``LLM.target``)."""
        longest = llm.context or UNLIMITED
        return cls(llm.name, llm.target(path), llm.model, llm.tokenizer, llm.eos, longest, llm.dtype)


def load_model(path_or_id: str | None = None, path: str = "auto", **options: Any) -> ModelUnderTest:
    """The model of ``lookahead.load``, which takes the options, on a target of the given path."""
    llm = load(path_or_id, **options)
    file = Path(path_or_id or "-")
    if file.exists():
        llm.name = file.resolve().name  # the whole path says nothing on another machine
    model = ModelUnderTest.of(llm, path)
    model.gguf = str(file) if file.suffix == ".gguf" else None
    return model

"""The model under measurement: what the methods need of it, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNLIMITED = 1 << 30


@dataclass(slots=True)
class Subject:
    """The model under measurement.

    Attributes:
        name: for the records.
        target: fulfils ``lookahead.core.Target``.
        model: the transformers model; None where there is only a target, and then no ``hf-`` method.
        tokenizer: of transformers; None where prompts are tokens already.
        eos: tokens that end a text.
        max_positions: the longest text that the model takes.
        draft_model: for ``hf-assisted``.
        dtype: for the records.
        path: which code evaluates our steps: "cpu", "transformers" or "plain".
    """

    name: str
    target: Any
    model: Any = None
    tokenizer: Any = None
    eos: frozenset[int] = frozenset()
    max_positions: int = UNLIMITED
    draft_model: Any = None
    dtype: str = "float32"
    path: str = ""

    @property
    def vocabulary(self) -> int:
        """V, columns of the logits."""
        return int(self.target.vocabulary)

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, name: str, draft_model: Any = None, path: str = "auto"
    ) -> Subject:
        """A subject from a transformers model and its tokenizer.

        Args:
            path: "cpu" or "transformers" to force one of the two; see ``lookahead.targets.factory.make_target``.
        """
        from ..targets.factory import make_target

        target = make_target(model, path=path)
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = getattr(tokenizer, "eos_token_id", None)
        config = model.config.get_text_config(decoder=True)
        return cls(
            name=name,
            target=target,
            model=model,
            tokenizer=tokenizer,
            eos=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
            max_positions=int(getattr(config, "max_position_embeddings", None) or UNLIMITED),
            draft_model=draft_model,
            dtype=str(model.dtype).removeprefix("torch."),
            path=target.path,
        )


def load_subject(
    model: str | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    draft_model: str | None = None,
    device: str | None = None,
    path: str = "auto",
) -> Subject:
    """Load a model by directory or hub id; the bundled one where None.

    Raises:
        SettingsError: whatever of this cannot be honoured.
    """
    from ..engine import load

    llm = load(model, dtype=dtype, threads=threads, device=device)
    draft = load(draft_model, dtype=dtype, device=device).model if draft_model is not None else None
    # A directory says nothing on another machine, the last part of it does; a hub id is kept whole.
    name = "bundled" if model is None else Path(model).resolve().name if Path(model).exists() else model
    return Subject.of(llm.model, llm.tokenizer, name, draft, path)

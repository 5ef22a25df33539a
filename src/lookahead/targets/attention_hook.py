"""Our attention inside transformers models, through their public AttentionInterface, for the length of one pass.

A model whose attention implementation is ``NAME`` calls us in every layer; what it cannot hand over (where rows
stand, what they see) is set beside the call. No mask is made: transformers skips its masks for a name that has no
mask function. Models that ignore the setting are found by their flag and by counting calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from ..attention import Attend
from ..core.errors import SettingsError

NAME = "lookahead_tree"


@contextmanager
def implementation(model: Any, name: str, what: str = "_attn_implementation") -> Iterator[None]:
    """Inside, the model's attention implementation is ``name``, or another setting. One thread at a time."""
    before = [(config, getattr(config, what)) for config in _configs(model)]
    try:
        for config, _ in before:
            setattr(config, what, name)
        yield
    finally:
        for config, old in before:  # a config sets those inside it, which come behind it
            setattr(config, what, old)


def with_masks(model: Any) -> AbstractContextManager[None]:
    """Inside, the model takes 4-D masks: under sdpa where its own attention (flash, flex) takes none."""
    none = str(model.config._attn_implementation).startswith(("flash", "flex", "kernels"))
    return implementation(model, "sdpa") if none else nullcontext()


class TreeAttention:
    """An attention function of one model, which stays as it was outside of ``within``.

    Args:
        model: a causal language model.
        attend: the function, of ``lookahead.attention`` or one that takes the same after query, key and value.

    Attributes:
        lock: held while the model is switched over.
        idle: what a target leaves to the next one (``cuda_graphs``).
        captured, watched: of exact mode: passes are captured, and one was seen not to wait for the host.

    Raises:
        SettingsError: the model ignores attention functions, or attends in chunks.
    """

    def __init__(self, model: Any, attend: Attend) -> None:
        from transformers import AttentionInterface

        name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "attention_chunk_size", None):
            raise SettingsError(f"{name} attends in chunks, which the tree attention does not know; use sdpa")
        if not getattr(model, "_supports_attention_backend", False):
            raise SettingsError(
                f"{name} does not take attention functions (its class lacks _supports_attention_backend); use sdpa"
            )
        AttentionInterface.register(NAME, forward)
        self.lock = threading.RLock()
        self.idle: list[Any] = []
        self.captured = self.watched = False
        calls: list[int] = []

        def count(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> torch.Tensor:
            calls.append(1)
            return query.new_zeros(*query.shape[:3], value.shape[-1])

        self.attend: Attend = count
        try:
            with torch.no_grad(), self.within(model):
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        except SettingsError:
            calls.clear()
        layers = len(getattr(config, "layer_types", None) or range(config.num_hidden_layers))
        if len(calls) != layers:
            raise SettingsError(
                f"{name} called the tree attention in {len(calls)} of its {layers} layers, so its steps would be "
                "silently wrong; use sdpa"
            )
        self.attend = attend

    @property
    def backend(self) -> str:
        """The name of what computes."""
        return self.attend.__module__.rsplit(".", 1)[-1]

    @contextmanager
    def within(self, model: Any, *rows: Any) -> Iterator[None]:
        """The model's passes call ``attend`` inside, with ``rows`` behind query, key and value.

        One thread at a time: nothing else may run on the model inside.
        """
        with self.lock, implementation(model, NAME):
            token = _rows.set((self, rows))
            try:
                yield
            finally:
                _rows.reset(token)


_rows: ContextVar[tuple[TreeAttention, tuple[Any, ...]] | None] = ContextVar("rows", default=None)


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What layers call: query (B, H, Q, D), keys and values of the cache; the output is (B, Q, H, Dv)."""
    current = _rows.get()
    if current is None or attention_mask is not None or others.get("position_bias") is not None:
        raise SettingsError(
            f"the attention {NAME!r} takes no mask and no position bias, and serves the steps of lookahead only; "
            "use sdpa or eager"
        )
    attention, rows = current
    options = {"scale": scaling, "window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux}
    return attention.attend(query, key, value, *rows, **options).transpose(1, 2).contiguous(), None


def _configs(model: Any) -> list[Any]:
    """The configs of a model and its parts, outer ones first, each once."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    for config in list(found.values()):
        parts = [getattr(config, key, None) for key in config.sub_configs]
        found.update((id(part), part) for part in parts if part is not None)
    return list(found.values())

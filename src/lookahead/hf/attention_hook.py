"""Replaces the attention of a transformers model during a pass, through the public AttentionInterface.

A model whose attention implementation is set to ``NAME`` calls ``forward`` in every layer. A context variable carries
what the model does not pass on: where rows are stored and what they see. transformers builds no mask for an
implementation without a mask function. Models that ignore the setting are detected by a class flag and by counting
calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from ..core.errors import SettingsError
from ..core.target import MOST_ROWS
from .attention import Attend

NAME = "lookahead_tree"


@contextmanager
def implementation(model: Any, name: str, setting: str = "_attn_implementation") -> Iterator[None]:
    """Set the model's attention implementation, or another implementation setting, within the block.

    Use it in one thread at a time, because the setting belongs to the model.
    """
    before = [(config, getattr(config, setting)) for config in _configs(model)]
    try:
        for config, _ in before:
            setattr(config, setting, name)
        yield
    finally:
        # Setting an outer config also sets its nested configs, so nested configs are restored after it.
        for config, old in before:
            setattr(config, setting, old)


def mask_compatible_attention(model: Any) -> AbstractContextManager[None]:
    """A context in which the model accepts 4-D masks; falls back to sdpa if its own attention (flash, flex) does
    not."""
    ignores_masks = str(model.config._attn_implementation).startswith(("flash", "flex", "kernels"))
    return implementation(model, "sdpa") if ignores_masks else nullcontext()


class TreeAttention:
    """A custom attention function for one model, active only inside ``installed``.

    Args:
        model: a causal language model.
        attend: an attention function of ``lookahead.hf.attention``, or another that accepts the same arguments after
            query, key and value.
        captured: in exact mode, whether passes are captured.

    Attributes:
        lock: held while the attention is installed.
        idle: the ``graph_store.GraphStore`` that the next target takes over, if any.
        most_rows: the largest number of rows for which a captured pass fits in memory, as far as checked.

    Raises:
        SettingsError: the model ignores attention functions, or attends in chunks.
    """

    def __init__(self, model: Any, attend: Attend, captured: bool = False) -> None:
        from transformers import AttentionInterface

        name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "attention_chunk_size", None):
            raise SettingsError(
                f"{name} attends in chunks, which the tree attention does not support; use sdpa"
            )
        if not getattr(model, "_supports_attention_backend", False):
            raise SettingsError(
                f"{name} does not accept attention functions (its class lacks _supports_attention_backend); use sdpa"
            )
        AttentionInterface.register(NAME, forward)
        self.lock = threading.RLock()
        self.idle: list[Any] = []
        self.captured = captured
        self.most_rows = MOST_ROWS
        calls: list[int] = []

        def count(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
        ) -> torch.Tensor:
            calls.append(1)
            return query.new_zeros(*query.shape[:3], value.shape[-1])

        self.attend: Attend = count
        try:
            with torch.no_grad(), self.installed(model):
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
        """The name of the attention function's module."""
        return self.attend.__module__.rsplit(".", 1)[-1]

    @contextmanager
    def installed(self, model: Any, *arguments: Any) -> Iterator[None]:
        """A context in which the model's layers call ``attend``, with ``arguments`` after query, key and value.

        Use it in one thread at a time; nothing else may run on the model at the same time.
        """
        with self.lock, implementation(model, NAME):
            token = _current.set((self, arguments))
            try:
                yield
            finally:
                _current.reset(token)


_current: ContextVar[tuple[TreeAttention, tuple[Any, ...]] | None] = ContextVar("attention", default=None)


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
    """The function that layers call, with the argument names of transformers.

    Query is (B, H, Q, D), key and value are what the cache returned, and the output is (B, Q, H, Dv).

    Raises:
        SettingsError: called outside ``TreeAttention.installed``, or with a mask or a position bias.
    """
    current = _current.get()
    if current is None or attention_mask is not None or others.get("position_bias") is not None:
        raise SettingsError(
            f"the attention {NAME!r} accepts no mask and no position bias, and only serves lookahead's own steps; "
            "use sdpa or eager"
        )
    attention, arguments = current
    options = {"scale": scaling, "window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux}
    return attention.attend(query, key, value, *arguments, **options).transpose(1, 2).contiguous(), None


def _configs(model: Any) -> list[Any]:
    """The distinct configs of a model and its submodules, outer ones first."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    by_id = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    for config in list(by_id.values()):
        parts = [getattr(config, key, None) for key in config.sub_configs]
        by_id.update((id(part), part) for part in parts if part is not None)
    return list(by_id.values())

"""Tree attention inside transformers models, through their public AttentionInterface, for the length of one pass.

A model whose attention implementation is ``NAME`` calls us in every layer; what it cannot hand over (ancestor
bits, depths, live lengths) is set beside the call. No mask is made: transformers skips its masks for a name that
has no mask function. Models that ignore the setting are found by their flag and by counting calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from ..attention.backends import get, name_of
from ..core.errors import SettingsError

NAME = "lookahead_tree"


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Inside, the model's attention implementation is ``name``. One thread at a time."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, old in before:  # a config sets those inside it, which come behind it
            config._attn_implementation = old


def with_masks(model: Any) -> AbstractContextManager[None]:
    """Inside, the model takes 4-D masks: under sdpa where its own attention (flash, flex) takes none."""
    none = str(model.config._attn_implementation).startswith(("flash", "flex", "kernels"))
    return implementation(model, "sdpa") if none else nullcontext()


class TreeAttention:
    """The tree attention of one model, which stays as it was outside of ``within``.

    Args:
        model: a causal language model.
        backend: "auto", "sdpa", "triton" or "reference".

    Attributes:
        attend: the backend.
        calls: layers evaluated so far.
        lock: held while the model is switched over.

    Raises:
        SettingsError: the model ignores attention functions, or attends in chunks.
    """

    def __init__(self, model: Any, backend: str = "auto") -> None:
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
        self.attend = get(backend, model.device)
        self.calls = 0
        self.lock = threading.RLock()
        one = torch.ones(1, 1, 1, dtype=torch.int32, device=model.device)
        try:
            with torch.no_grad(), self.within(model, one, 0 * one[0], 0 * one[0, 0]):
                model(input_ids=one[0].long(), use_cache=False)
        except SettingsError:
            self.calls = 0
        layers = len(getattr(config, "layer_types", None) or range(config.num_hidden_layers))
        if self.calls != layers:
            raise SettingsError(
                f"{name} called the tree attention in {self.calls} of its {layers} layers, so its steps would be "
                "silently wrong; use sdpa"
            )

    @property
    def backend(self) -> str:
        """The backend that computes; sdpa where a kernel did not compile."""
        return name_of(self.attend)

    @contextmanager
    def within(
        self, model: Any, words: torch.Tensor, depths: torch.Tensor, lengths: torch.Tensor
    ) -> Iterator[None]:
        """The model's passes call this attention inside, for rows given as tensors on its device (see the package).

        One thread at a time: nothing else may run on the model meanwhile.
        """
        with self.lock, implementation(model, NAME):
            token = _rows.set((self, words, depths, lengths))
            try:
                yield
            finally:
                _rows.reset(token)


_Rows = tuple[TreeAttention, torch.Tensor, torch.Tensor, torch.Tensor]
_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)


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
    rows = _rows.get()
    if rows is None or attention_mask is not None or others.get("position_bias") is not None:
        raise SettingsError(
            f"the attention {NAME!r} takes no mask and no position bias, and serves the steps of lookahead only; "
            "use sdpa or eager"
        )
    attention, words, depths, lengths = rows
    attention.calls += 1
    out = attention.attend(
        query, key, value, lengths, words, depths,
        scale=scaling, window=sliding_window or 0, softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _configs(model: Any) -> list[Any]:
    """The configs of a model and its parts, outer ones first, each once."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    for config in list(found.values()):
        for key in config.sub_configs:
            part = getattr(config, key, None)
            if part is not None:
                found.setdefault(id(part), part)
    return list(found.values())

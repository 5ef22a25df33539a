"""Tree attention inside transformers models, through their public AttentionInterface.

A model whose attention implementation is ``NAME`` calls us in every layer; what it cannot hand over (ancestor
bits, depths, live lengths) is set for the length of one pass. No mask is made at all: transformers skips its
masks for a name that has no mask function. Models that ignore the setting are found by their flag and by
counting calls, because ``set_attn_implementation`` says nothing there.

``enable`` changes the model until it is set otherwise; ``prepare`` leaves it as it is, for passes that take the
tree attention for their own length (``TreeAttention.switched``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention.backends import Attend, get, name_of
from ..attention.bits import pack_bits
from ..core.errors import SettingsError

NAME = "lookahead_tree"
#: Rows per block of a prefill that torch's own kernels cannot take (soft-capping, sinks, windows).
BLOCK = 256


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


@dataclass(slots=True)
class TreeAttention:
    """One model's tree attention.

    Attributes:
        attend: the backend.
        calls: layers evaluated so far.
        lock: held while the model is switched over.
    """

    attend: Attend
    calls: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    @property
    def backend(self) -> str:
        """The backend that computes; sdpa where a kernel did not compile."""
        return name_of(self.attend)

    @contextmanager
    def switched(self, model: Any) -> Iterator[None]:
        """The model calls this attention inside, and the one that it had before and after.

        One thread at a time: what runs on the model elsewhere at the same time must not need a mask.
        """
        with self.lock, implementation(model, NAME):
            last, _known[model] = _known.get(model), self
            try:
                yield
            finally:
                if last is not None:
                    _known[model] = last

    @contextmanager
    def step(
        self,
        ancestors: Sequence[Sequence[int]],
        depths: torch.Tensor,
        lengths: Sequence[int],
        device: torch.device,
    ) -> Iterator[None]:
        """The rows of one forward pass.

        Args:
            ancestors: per sequence and row, a number whose bit c says whether the row sees row c.
            depths: (B, Q).
            lengths: T_b.
            device: of the model.
        """
        words = pack_bits(ancestors, depths.shape[1]).to(device)
        live = torch.tensor(list(lengths), dtype=torch.int32, device=device)
        with self.within(words, depths.to(device, torch.int32), live):
            yield

    @contextmanager
    def within(self, words: torch.Tensor, depths: torch.Tensor, lengths: torch.Tensor) -> Iterator[None]:
        """The rows of one forward pass, as tensors on the model's device; see the package for the shapes."""
        self._step = words, depths, lengths
        token = _active.set(self)
        try:
            yield
        finally:
            self._step = None
            _active.reset(token)


_known: weakref.WeakKeyDictionary[Any, TreeAttention] = weakref.WeakKeyDictionary()
_active: ContextVar[TreeAttention | None] = ContextVar("tree_attention", default=None)


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
    if attention_mask is not None or others.get("position_bias") is not None:
        raise SettingsError(f"the attention {NAME!r} takes no mask and no position bias; use sdpa or eager")
    options: dict[str, Any] = {
        "scale": scaling,
        "window": sliding_window or 0,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    active = _active.get()
    if active is None or active._step is None:
        out = causal(query, key, value, **options)
    else:
        words, depths, lengths = active._step
        active.calls += 1
        out = active.attend(query, key, value, lengths, words, depths, **options)
    return out.transpose(1, 2).contiguous(), None


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last Q of the cache's tokens, in order: prefills and plain steps."""
    rows, width, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if not softcap and sinks is None and (not window or width <= window) and rows in (1, width):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, scale=scale, enable_gqa=group > 1
        )
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    pieces = []
    for start in range(0, rows, BLOCK):
        at = torch.arange(width - rows + start, width - rows + min(start + BLOCK, rows), device=query.device)
        first = max(0, int(at[0]) - window + 1) if window else 0
        where = torch.arange(first, int(at[-1]) + 1, device=query.device)
        seen = where[None] <= at[:, None]
        if window:
            seen &= at[:, None] - where[None] < window
        scores = (query[:, :, start : start + BLOCK] @ keys[:, :, where].transpose(2, 3)).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(where)].to(values.dtype)
        pieces.append(weights @ values[:, :, where])
    return torch.cat(pieces, dim=2)


def enable(model: Any, backend: str = "auto") -> TreeAttention:
    """Make a transformers model call the tree attention, and see that it does.

    Args:
        model: a causal language model.
        backend: "auto", "sdpa", "triton" or "reference".

    Raises:
        SettingsError: the model ignores attention functions, or attends in chunks; it is left as it was.
    """
    tree_attention = prepare(model, backend)
    model.set_attn_implementation(NAME)
    _known[model] = tree_attention
    return tree_attention


def prepare(model: Any, backend: str = "auto") -> TreeAttention:
    """The tree attention for a model that stays as it is; see ``TreeAttention.switched``. Arguments as above.

    Raises:
        SettingsError: the model ignores attention functions, or attends in chunks.
    """
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
    tree_attention = TreeAttention(get(backend, model.device))
    layers = len(getattr(config, "layer_types", None) or range(config.num_hidden_layers))
    try:
        with (
            torch.no_grad(),
            tree_attention.switched(model),
            tree_attention.step([[1]], torch.zeros(1, 1), [0], model.device),
        ):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        calls = tree_attention.calls
    except SettingsError:
        calls = 0
    if calls != layers:
        raise SettingsError(
            f"{name} called the tree attention in {calls} of its {layers} layers, so its steps would be silently "
            "wrong; use sdpa"
        )
    tree_attention.calls = 0
    return tree_attention


def enabled(model: Any) -> TreeAttention | None:
    """The tree attention of a model that has it in force, else None."""
    return _known.get(model) if model.config._attn_implementation == NAME else None


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

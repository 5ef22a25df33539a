"""Whether a model's passes can be captured: its attention, its device, what it reads on the host, and a comparison.

On a CUDA device ``make_target`` asks this by itself. What cannot be captured, or computes other logits than the
model's own pass, goes the ordinary way, and the reason is said once.
"""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from ..core import OutOfMemory, SettingsError, TokenTree
from .attention_hook import TreeAttention
from .cuda_graphs import CudaGraphTarget, drop_arena
from .equivalence import compare, first_line
from .facts import ModelFacts
from .fingerprint import forget, remember


def captured_attention(
    model: PreTrainedModel, facts: ModelFacts, backend: str = "auto", say: bool = False
) -> tuple[TreeAttention | None, str]:
    """The attention for ``CudaGraphTarget``, None where that path is not taken; and one line that says why.

    Args:
        facts: from the probe that found the transformers target good.
        backend: of the attention; "auto" takes triton on an NVIDIA GPU that has it, and sdpa elsewhere.
        say: warn where the path is not taken, once per model.
    """

    def find() -> tuple[TreeAttention | None, str]:
        attention, reason = _judge(model, facts, backend)
        forget(model, "trial")
        if attention is None:
            drop_arena(model)
        if attention is None and say:
            warnings.warn(
                f"steps are not captured: {reason}; taking the transformers path, with the same result",
                RuntimeWarning,
                stacklevel=5,
            )
        return attention, reason

    return remember(model, f"cuda-graph {backend}", find)


def _judge(model: PreTrainedModel, facts: ModelFacts, backend: str) -> tuple[TreeAttention | None, str]:
    name = type(model).__name__
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return None, f"{name} is spread over {', '.join(sorted(devices))}, and a graph knows one device"
    if facts.alibi is not None or facts.rope_type:
        what = "a bias by distance (ALiBi)" if facts.alibi is not None else f"{facts.rope_type} positions"
        return None, f"{name} has {what}, which change from step to step"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None, f"{name} has hooks, which a captured pass would not call again"
    try:
        attention = TreeAttention(model, backend)
        if reads := host_reads(CudaGraphTarget(model, facts, attention)):
            return None, f"{name} reads values on the host in its pass ({reads})"
        found = compare(model, facts, lambda: CudaGraphTarget(model, facts, attention))
    except OutOfMemory:
        raise
    except SettingsError as error:
        return None, str(error)
    except Exception as error:  # whatever a model does in a pass that it was not made for
        return None, f"{name} cannot be captured ({first_line(error)})"
    if not found.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({found.reason})"
    how = "captured passes" if model.device.type == "cuda" else "passes in buckets of rows, without capture"
    where = f"{name} on {model.device.type}: {how}, attention by {attention.backend}"
    return attention, f"{where} ({found.reason})"


def host_reads(target: CudaGraphTarget) -> str:
    """What a pass waits for on the host first, which no graph can hold; "" on a CPU, where nothing is captured.

    Looked for before anything is captured, because a capture that fails leaves the device's random numbers unusable.
    """
    if target.model.device.type == "cpu":
        return ""
    target.prefill([(0, [1, 2, 3])])
    target.forward([(0, TokenTree(1))])  # kernels are compiled and libraries set up
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.passes[0, 1].evaluate(target)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
        target.release(0)
    return ""

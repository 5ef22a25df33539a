"""Whether a model's passes can be captured: its attention, its device, what it reads on the host, and a comparison.

On a CUDA device ``make_target`` asks this by itself. What cannot be captured, or computes other logits than the
model's own pass, goes the ordinary way, and the reason is said once.
"""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from ..attention import get
from ..core import OutOfMemory, SettingsError
from .attention_hook import TreeAttention
from .cuda_graphs import BUCKETS, CapturedPass, CudaGraphTarget, uncapturable
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
    if why := uncapturable(model, facts):
        return None, why
    try:
        attention = TreeAttention(model, get(backend, model.device))
    except SettingsError as error:
        return None, str(error)
    try:
        if reads := host_reads(CudaGraphTarget(model, facts, attention)):
            return None, f"{name} reads values on the host in its pass ({reads})"
        found = compare(model, facts, lambda: CudaGraphTarget(model, facts, attention))
    except OutOfMemory:
        raise
    except Exception as error:  # whatever a model or a compiler does in a pass that it was not made for
        if isinstance(error, torch.AcceleratorError):
            torch.cuda.synchronize(
                model.device
            )  # raises where the device is beyond use, so that this is no refusal
        if attention.backend == "triton":
            warnings.warn(
                f"the attention kernel does not run here ({first_line(error)}); using sdpa, with the same result",
                RuntimeWarning,
                stacklevel=7,
            )
            return _judge(model, facts, "sdpa")
        return None, f"{name} cannot be captured ({first_line(error)})"
    if not found.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({found.reason})"
    how = "captured passes" if model.device.type == "cuda" else "passes in buckets of rows, without capture"
    where = f"{name} on {model.device.type}: {how}, attention by {attention.backend}"
    return attention, f"{where} ({found.reason})"


def host_reads(target: CudaGraphTarget) -> str:
    """What a pass waits for on the host first, which no graph can hold; "" on a CPU, where nothing is captured.

    Looked for before anything is captured, because a capture that fails leaves the device's random numbers unusable.
    Every bucket is evaluated once before, so that what is compiled for it is, or fails, before the first text.
    """
    device = target.model.device
    if device.type == "cpu":
        return ""
    before = torch.cuda.get_sync_debug_mode()
    with target.in_arena("a step", [(0, BUCKETS[-1])]):
        passes = [CapturedPass(0, bucket, device) for bucket in BUCKETS]
        try:
            for mode in (before, "error"):
                torch.cuda.set_sync_debug_mode(mode)
                for one in passes:
                    one.evaluate(target)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return first_line(error)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return ""

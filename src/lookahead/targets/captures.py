"""Whether a model's passes can be captured: its attention, its device, what it reads on the host, and a comparison.

On a CUDA device ``make_target`` asks this by itself. What cannot be captured, or computes other logits than the
model's own pass, goes the ordinary way, and the reason is said once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ..core import OutOfMemory, SettingsError, TokenTree
from .attention_hook import TreeAttention, prepare
from .cuda_graphs import CudaGraphTarget
from .equivalence import compare, first_line, forget, remember
from .facts import ModelFacts
from .fingerprint import fingerprint


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a capture does not allow: values read on the host, or made there, and copies between devices.

    Looked for before anything is captured, because a capture that fails leaves the device's random numbers unusable.
    """

    NAMES = frozenset(
        {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        devices = {
            x.device for x in (*args, result) if torch.is_tensor(x) and (x.dim() or name == "_to_copy")
        }
        if name in self.NAMES or (name in ("_to_copy", "copy_") and len(devices) > 1):
            self.found.append(name)
        return result


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

    return remember(model, f"cuda-graph {backend}", fingerprint(model), find)


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
    targets: list[CudaGraphTarget] = []

    def target() -> CudaGraphTarget:
        targets.append(CudaGraphTarget(model, facts, attention=attention))
        return targets[-1]

    def several() -> CudaGraphTarget:
        target().arena.sound = False  # not kept: it has room for two
        return targets[-1]

    try:
        attention = prepare(model, backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this model's step cannot be captured")
            if found := host_reads(target()):
                return None, f"{name} reads values on the host in its pass ({', '.join(found)})"
            alone = compare(model, facts, target, together=False)
            together = compare(model, facts, several)
    except OutOfMemory:
        raise
    except SettingsError as error:
        return None, str(error)
    except Exception as error:  # whatever a model does in a pass that it was not made for
        return None, f"{name} fails in such a pass ({first_line(error)})"
    if refused := next((one.refused for one in targets if one.refused), ""):
        return None, f"{name} cannot be captured ({refused})"
    for equivalence in (alone, together):
        if not equivalence.ok:
            return None, f"{name}'s logits there differ from those of its own passes ({equivalence.reason})"
    how = "captured passes" if model.device.type == "cuda" else "passes in buckets of rows, without capture"
    where = f"{name} on {model.device.type}: {how}, attention by {attention.backend}"
    return attention, f"{where} ({alone.reason})"


def host_reads(target: CudaGraphTarget) -> list[str]:
    """What a pass does that no graph can hold; on a CPU, where nothing is captured, it is not looked for.

    The watch sees torch's operators; what they read inside themselves, torch's own check of synchronisation sees.
    """
    if target.model.device.type == "cpu":
        return []
    target.prefill([(0, [1, 2, 3])])
    target.forward([(0, TokenTree(1))])  # kernels are compiled and libraries set up
    one = target.passes[0, 1]
    with HostReads() as watch:
        one.evaluate(target)
    found = sorted(set(watch.found))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.evaluate(target)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        found.append("a synchronising kernel")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    target.release(0)
    return found

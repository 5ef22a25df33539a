"""What transformers needs to know about a GGUF file beyond what its own reader takes from it.

transformers decodes quantized weights once, into the requested dtype. Its reader ignores some settings of some
architectures (Llama 3's frequency factors, sliding windows, soft caps); they are corrected here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..core import SettingsError
from ..gguf.families import FREQUENCY_FACTORS
from ..gguf.file import GGUFFile
from ..gguf.settings import GGUFSettings, RotaryTable

#: Types of tensors that are not quantized, and torch's names for them.
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def missing_packages() -> list[str]:
    """The packages that transformers needs for GGUF files and that are not installed."""
    return [name for name in ("gguf", "accelerate") if find_spec(name) is None]


def check_packages(file: GGUFFile) -> None:
    """Raise SettingsError if transformers lacks a package for this file."""
    if missing := missing_packages():
        raise SettingsError(
            f"to read {file.path.name} the packages gguf and accelerate must be installed, and {missing[0]} "
            "is not; pip install gguf accelerate"
        )


class GGUFCheckpoint:
    """A GGUF file that contains a complete model.

    Args:
        file: the file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        types = file.matrix_types
        self._dtypes = [dtype for name, dtype in PLAIN.items() if name in types]

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of its matrices; bfloat16 if they are quantized."""
        return self._dtypes[-1] if self._dtypes and not self.file.is_quantized else "bfloat16"

    def scale_frequencies(self, model: Any) -> None:
        """Divide a transformers model's rotary frequencies by the factors of the file, if it has them (Llama 3)."""
        stored = self.file.tensors.get(FREQUENCY_FACTORS)
        if stored is None:
            return
        import gguf
        import torch

        data = self.file.bytes(FREQUENCY_FACTORS)
        factors = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[stored.type]).copy())
        for module in model.modules():
            # Gemma 3 has frequencies for each kind of layer; the factors are those of full attention.
            for name, frequencies in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and not name.startswith("sliding"):
                    frequencies.div_(factors.to(frequencies.device))


def correct_config(config: Any, settings: GGUFSettings) -> None:
    """Give a config from transformers' reader the settings of the file that this reader ignores.

    It ignores the scaling of rotary positions and, for some or all architectures, their base, the number of elements
    that rotate, sliding windows, soft caps and the scale of the scores.
    """

    def rotary(table: RotaryTable) -> dict[str, Any]:
        fields: dict[str, Any] = {"rope_type": "default", "rope_theta": table.base}
        if table.factor != 1:
            fields |= {"rope_type": "linear", "factor": table.factor}
        if settings.rotary_size != settings.head_size:
            fields["partial_rotary_factor"] = settings.rotary_size / settings.head_size
        return fields

    values: dict[str, Any] = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in settings.windows],
        "sliding_window": max(settings.windows) or None,
        "attn_logit_softcapping": settings.attention_cap or None,
        "final_logit_softcapping": settings.head_cap or None,
        "query_pre_attn_scalar": round(settings.scale**-2),
    }
    tables = [rotary(table) for table in settings.tables]
    if len(tables) == 1:
        values["rope_parameters"] = tables[0]
    elif tables:  # Gemma 3
        values["rope_parameters"] = dict(full_attention=tables[0], sliding_attention=tables[1])
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)

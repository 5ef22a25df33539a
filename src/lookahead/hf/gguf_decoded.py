"""Reads GGUF files with transformers, which decodes quantized weights once, into the requested dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ..core import SettingsError
from ..gguf.families import FREQUENCY_FACTORS
from ..gguf.file import GGUFFile
from ..gguf.settings import GGUFSettings, RotaryTable

#: Types of tensors that are not quantized, and torch's names for them.
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def missing_packages() -> list[str]:
    """The packages that transformers needs for GGUF files and that are not installed."""
    return [name for name in ("gguf", "accelerate") if find_spec(name) is None]


class GGUFCheckpoint:
    """A GGUF file that contains a complete model.

    Args:
        path: the file.

    Attributes:
        file: its header, and its tensors as they are stored.
        is_quantized: whether any of its matrices is quantized.

    Raises:
        SettingsError: the file is damaged, or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        parts = self.file.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise SettingsError(
                f"a GGUF model must be one file, and {path.name} is one of {parts} parts; "
                "merge them with llama-gguf-split --merge"
            )
        types = {tensor.type for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        self._dtypes = [dtype for name, dtype in PLAIN.items() if name in types]
        self.is_quantized = not types <= PLAIN.keys()
        # Parsing takes seconds, and transformers parses once for the configuration and again for the weights.
        self._parse = lru_cache(maxsize=1)(_parse)

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of its matrices; bfloat16 if they are quantized."""
        return self._dtypes[-1] if self._dtypes and not self.is_quantized else "bfloat16"

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

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which transformers parses the file once, logs nothing and shows one progress bar.

        Other threads that enter it wait.

        Raises:
            SettingsError: a package is missing.
        """
        if missing := missing_packages():
            raise SettingsError(
                f"to read {self.file.path.name} the packages gguf and accelerate must be installed, and {missing[0]} "
                "is not; pip install gguf accelerate"
            )
        import gguf
        from transformers import modeling_gguf_pytorch_utils as theirs

        console = Console(stderr=True)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        shown = bar.add_task(f"reading {self.file.path.name}", total=None)

        def track(tensors: Iterable[Any], **_: Any) -> Iterable[Any]:
            return bar.track(list(tensors), task_id=shown)

        # transformers has no arguments for these replacements. The first two save time: loading SmolLM2-135M in
        # float32 takes 4.1 s of user time, 8.6 s without the first and 10.2 s without the second (dev/LOG.md,
        # 2026-11-26). Upstream: ggml-org/llama.cpp pull request 10159 made the parser fast and was closed;
        # transformers makes the name map in a recursion over modules since its pull request 34385.
        # The third saves no time, but its original writes to stderr even if that is not a terminal.
        replacements: list[tuple[Any, str, Any]] = [
            (gguf, "GGUFReader", self._parse),
            (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),  # called once for each module
            (theirs, "tqdm", track),
        ]
        # numpy need not warn about damaged blocks, because they show up in the logits.
        with _replaced(replacements), _silenced(), bar, np.errstate(all="ignore"):
            yield


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


#: Held while functions of other libraries are replaced, so that two threads cannot restore them in the wrong order.
_replacing = threading.RLock()


@contextmanager
def _replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which attributes of modules that have them get other values: (module, name, value)."""
    with _replacing:
        present = [each for each in replacements if hasattr(*each[:2])]
        originals = [(module, name, getattr(module, name)) for module, name, _ in present]
        try:
            for module, name, value in present:
                setattr(module, name, value)
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)


@contextmanager
def _silenced() -> Iterator[None]:
    """A context in which transformers logs only errors and shows no progress bars. Enter it inside ``_replaced``."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _parse(path: str) -> Any:
    """Read a file with gguf's reader, on a plain array: slices of a memmap take ten times as long."""
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, file: Any) -> None:
            self._array = np.asarray(file)

    return Reader(path)

"""GGUF files. transformers' own reader turns their weights, quantised or not, into an ordinary model.

What the file's quantised weights stand for is the model: they are multiplied out once, in the dtype asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ..core import SettingsError

#: Kinds of numbers that are not quantised.
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """A file that has been found whole.

    Attributes:
        path: where it lies.
        dtype: bfloat16 for quantised weights, else the file's own.
        tokenizer: whether it holds one.

    Raises:
        SettingsError: a package is missing, or the file is damaged, or one part of several.
    """

    def __init__(self, path: Path) -> None:
        missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
        if missing:
            raise SettingsError(
                f"to read {path.name} the packages gguf and accelerate must be installed, and {missing[0]} is not; "
                "pip install 'lookahead-decoding[gguf]'"
            )
        self.path = path
        # Parsing takes seconds, and transformers does it anew for the config, the weights and the tokenizer.
        self._parse = lru_cache(maxsize=1)(_reader())
        try:
            with self.reading():
                file = self._parse(str(path))
        except Exception as error:  # the reader indexes into whatever bytes there are
            what = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise SettingsError(
                f"a GGUF file must be whole; {path} ({path.stat().st_size} bytes) cannot be read ({what}); "
                "copy or download it again"
            ) from None
        parts = file.get_field("split.count")
        if parts is not None and parts.contents() > 1:
            raise SettingsError(
                f"a GGUF model must be one file, and {path.name} is one of {parts.contents()} parts; "
                "merge them with llama-gguf-split --merge"
            )
        kinds = {tensor.tensor_type.name for tensor in file.tensors if len(tensor.shape) > 1}
        dtypes = [dtype for name, dtype in PLAIN.items() if name in kinds]
        self.dtype = dtypes[-1] if dtypes and kinds <= PLAIN.keys() else torch.bfloat16
        self.tokenizer = file.get_field("tokenizer.ggml.tokens") is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While it lasts transformers parses the file once, is silent, and shows its progress in a bar of ours."""
        import gguf
        from transformers import modeling_gguf_pytorch_utils as theirs
        from transformers.utils import logging

        console = Console(stderr=True)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        shown = bar.add_task(f"reading {self.path.name}", total=None)

        def track(tensors: Iterable[Any], **_: Any) -> Iterable[Any]:
            return bar.track(list(tensors), task_id=shown)

        parse_value: Any = vars(theirs)["_gguf_parse_value"]
        string = gguf.GGUFValueType.STRING

        def value_of(value: Any, kinds: list[int]) -> Any:  # theirs goes over a string byte by byte in Python
            return value.tobytes().decode() if kinds[-1] == string else parse_value(value, kinds)

        names = lru_cache(gguf.get_tensor_name_map)  # made anew for every module of the model
        ours = (
            (gguf, "GGUFReader", self._parse), (gguf, "get_tensor_name_map", names), (theirs, "tqdm", track),
            (theirs, "_gguf_parse_value", value_of),
        )  # fmt: skip
        before = [getattr(module, name) for module, name, _ in ours]
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        for module, name, value in ours:
            setattr(module, name, value)
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            with bar:
                yield
        finally:
            for (module, name, _), value in zip(ours, before, strict=True):
                setattr(module, name, value)
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _reader() -> Any:
    """gguf's reader on a plain array: each of some 150,000 slices of a memmap costs ten of an array."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, file: Any) -> None:
            self._array = np.asarray(file)

    return Reader

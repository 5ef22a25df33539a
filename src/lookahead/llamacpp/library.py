"""The llama.cpp library: supported versions, models, contexts, batches, and errors in one line."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from packaging.specifiers import SpecifierSet

from ..core import LookaheadError, OutOfMemory, SettingsError
from ..gguf.file import BLOCK_TYPES
from ..options import MachineOptions

PACKAGE = "llama-cpp-python"
#: Supported versions.
VERSIONS = ">=0.3.36,<0.4"
GET = f"pip install '{PACKAGE}{VERSIONS}' (it compiles llama.cpp, which takes ten minutes and needs cmake and g++)"
#: Sequence ids per context: the maximum that llama.cpp is compiled for (LLAMA_MAX_SEQ).
SEQUENCES = 256
#: The same for models with a recurrent state, which llama.cpp allocates per sequence.
RECURRENT_SEQUENCES = 16
#: Rows per call, and rows that llama.cpp evaluates together (its defaults).
BATCH_ROWS, TOGETHER = 2048, 512
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
#: ggml's types, in lower case -> their numbers. ``options.KV_TYPES`` lists those allowed for cached keys and values.
CACHE_TYPES = {name.lower(): number for number, (name, *_) in BLOCK_TYPES.items()}
#: The default type of cached keys and values.
KV_TYPE = "f16"
#: The default capacity of a context in tokens.
CELLS = 1024
#: Return values of ``llama_decode``: no free cells, out of memory.
NO_ROOM, NO_MEMORY = 1, -2
#: The log level of errors in llama.cpp.
ERROR = 4


class EngineFailed(LookaheadError):
    """llama.cpp could not evaluate a pass."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The module with llama.cpp's functions. Its log is not printed.

    Raises:
        SettingsError: llama-cpp-python is not installed, or its version is not supported.
    """
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        raise SettingsError(f"engine='llama.cpp' needs {PACKAGE}, which is not installed; {GET}") from None
    if not SpecifierSet(VERSIONS).contains(installed, prereleases=True):
        raise SettingsError(f"engine='llama.cpp' needs {PACKAGE}{VERSIONS}, got {installed}; {GET}")
    try:
        from llama_cpp import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"{PACKAGE} {installed} cannot be loaded ({error}); install it again") from None
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_log, None)
    return llama_cpp


_errors: list[str] = []


def _keep_errors(level: int, text: bytes, _: Any) -> None:
    if level == ERROR:
        _errors.append(text.decode(errors="replace").strip())
        del _errors[:-8]


#: Kept alive, because llama.cpp may call it until the process ends.
_log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_errors)


def _logged() -> str:
    """The errors logged by llama.cpp since the last call, in one line."""
    lines = [re.sub(r"^\w+: ", "", line) for line in _errors if line]
    _errors.clear()
    return "; ".join(dict.fromkeys(lines))[:300] or "no reason given"


class Weights:
    """A model loaded by llama.cpp. Any number of contexts may evaluate it.

    Args:
        file: a GGUF file.
        options: how it is loaded, with the option names of llama.cpp's command line.

    Attributes:
        trees: whether a sequence can be truncated, which rejected rows require. A recurrent state cannot.

    Raises:
        SettingsError: llama.cpp cannot load it, or it does not decode text.
    """

    def __init__(self, file: Path, options: MachineOptions) -> None:
        lib = self.library = library()
        parameters = lib.llama_model_default_params()
        if options.n_gpu_layers is not None:
            if options.n_gpu_layers and not lib.llama_supports_gpu_offload():
                raise SettingsError(
                    f"n_gpu_layers must be 0 if llama.cpp is built without GPU support, got {options.n_gpu_layers}; "
                    f"build {PACKAGE} for the GPU (see its README)"
                )
            parameters.n_gpu_layers = options.n_gpu_layers
        _errors.clear()
        self.pointer = lib.llama_model_load_from_file(str(file).encode(), parameters)
        if not self.pointer:
            raise SettingsError(f"llama.cpp cannot load {file.name}: {_logged()}")
        weakref.finalize(self, lib.llama_model_free, self.pointer)
        if lib.llama_model_has_encoder(self.pointer) or lib.llama_model_is_diffusion(self.pointer):
            raise SettingsError(
                f"lookahead decoding needs a decoder-only language model, and {file.name} is not"
            )
        self.file = file
        self.options = options
        self.vocabulary = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.pointer)))
        self.positions = int(lib.llama_model_n_ctx_train(self.pointer))
        self.window = int(lib.llama_model_n_swa(self.pointer))
        self.layers = int(lib.llama_model_n_layer(self.pointer))
        recurrent = lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer)
        self.trees = not recurrent
        self.sequences = RECURRENT_SEQUENCES if recurrent else SEQUENCES

    @property
    def device(self) -> str:
        """The devices that evaluate the model's layers: "GPU", "CPU", or "GPU and CPU"."""
        asked = self.options.n_gpu_layers
        if asked == 0 or not self.library.llama_supports_gpu_offload():
            return "CPU"
        return "GPU" if asked is None or not 0 < asked < self.layers else "GPU and CPU"

    @property
    def runs_on(self) -> str:
        """For cost curves: "gpu" if no layer is on the CPU, else "cpu"."""
        return "gpu" if self.device == "GPU" else "cpu"


class Context:
    """A KV cache whose cells are shared by sequences, and the passes over it.

    A cell may belong to any number of sequences. A row sees the cells of its first sequence up to its own position.

    Args:
        weights: the model.
        cells: minimum number of cells, one per row.

    Attributes:
        cells: number of cells.

    Raises:
        OutOfMemory: the cells do not fit in memory.
        SettingsError: llama.cpp rejects the options.
    """

    def __init__(self, weights: Weights, cells: int) -> None:
        # The parameters; each option that is not given has llama.cpp's default.
        lib = weights.library
        options = weights.options
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_batch = BATCH_ROWS
        parameters.n_ubatch = TOGETHER
        parameters.n_seq_max = weights.sequences
        parameters.kv_unified = True  # sequences share the cells of their common prefix
        # Otherwise llama.cpp drops rows that have left the window, which a truncation may need again.
        parameters.swa_full = True
        parameters.no_perf = True
        parameters.n_threads = parameters.n_threads_batch = options.threads or cpu_count() or 1
        parameters.flash_attn_type = FLASH_ATTENTION[options.flash_attn or "auto"]
        parameters.type_k = CACHE_TYPES[options.cache_type_k or KV_TYPE]
        parameters.type_v = CACHE_TYPES[options.cache_type_v or KV_TYPE]
        # Create the context.
        _errors.clear()
        self.pointer = lib.llama_init_from_model(weights.pointer, parameters)
        if not self.pointer:
            why = _logged()
            if "alloc" in why or "memory" in why:
                raise OutOfMemory(f"llama.cpp has no memory for {cells} cells ({why}); use a shorter prompt")
            raise SettingsError(f"llama.cpp cannot evaluate {weights.file.name} with these settings: {why}")
        self._free = weakref.finalize(self, lib.llama_free, self.pointer)
        self.weights = weights
        self._library = lib  # the model must outlive its contexts
        self.memory = lib.llama_get_memory(self.pointer)
        self.cells = int(lib.llama_n_ctx(self.pointer))
        self._rows = min(BATCH_ROWS, self.cells)  # more rows in one call would abort the process
        # The arrays of a batch, allocated once; llama.cpp reads them by address.
        self._tokens = np.zeros(self._rows, np.int32)
        self._positions = np.zeros(self._rows, np.int32)
        self._counts = np.ones(self._rows, np.int32)
        self._wanted = np.zeros(self._rows, np.int8)
        self._ids = np.zeros(self._rows, np.int32)  # the ids of all rows, row by row
        self._pointers = np.zeros(self._rows, np.uintp)  # to each row's first id
        self._place: Any = None  # shape and address of ``_logits``
        self._logits = np.empty((0, 0), np.float32)
        self._batch = lib.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("logits", self._wanted),
            ("seq_id", self._pointers),
        ):
            kind = dict(self._batch._fields_)[name]
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, kind))

    def close(self) -> None:
        """Free its memory now."""
        self._free()

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Evaluate rows and keep their keys and values. Every row must come after the rows that it sees.

        Args:
            sequences: the ids of each row.
            wanted: whether to compute the logits, by row.

        Returns:
            The computed logits (R, V), which the next call overwrites.

        Raises:
            OutOfMemory: there is no room; some rows may have been added.
            EngineFailed: the pass failed for any other reason.
        """
        if len(tokens) <= self._rows:
            return self._decode(tokens, positions, sequences, wanted)
        parts = [slice(begin, begin + self._rows) for begin in range(0, len(tokens), self._rows)]
        logits = [
            self._decode(tokens[part], positions[part], sequences[part], wanted[part]).copy()
            for part in parts
        ]
        return np.concatenate(logits)

    def _decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        size = len(tokens)
        counts = list(map(len, sequences))
        total = sum(counts)
        if total > len(self._ids):
            self._ids = np.zeros(2 * total, np.int32)
        self._ids[:total] = np.fromiter(chain.from_iterable(sequences), np.int32, total)
        starts = np.fromiter(accumulate(counts[:-1], initial=0), np.uintp, size)
        self._pointers[:size] = starts * np.uintp(4) + np.uintp(self._ids.ctypes.data)
        self._tokens[:size], self._positions[:size] = tokens, positions
        self._counts[:size], self._wanted[:size] = counts, wanted
        return self._run(size, sum(wanted))

    def decode_one(self, token: int, position: int, sequence: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """``decode`` for a single row, in a fifth of the time. Every step of plain decoding calls it.

        Raises:
            OutOfMemory, EngineFailed: as in ``decode``.
        """
        self._tokens[0], self._positions[0], self._ids[0] = token, position, sequence
        self._counts[0] = self._wanted[0] = 1
        self._pointers[0] = self._ids.ctypes.data
        return self._run(1, 1)

    def _run(self, size: int, reads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Evaluate the rows in the batch."""
        lib = self._library
        self._batch.n_tokens = size
        _errors.clear()
        status = lib.llama_decode(self.pointer, self._batch)
        if status in (NO_ROOM, NO_MEMORY):
            raise OutOfMemory(
                f"a pass of {size} rows did not fit in llama.cpp's memory; use a shorter prompt, fewer sequences, "
                "or a smaller cache_type_k and cache_type_v"
            )
        if status:
            raise EngineFailed(f"llama.cpp could not evaluate a pass of {size} rows: {_logged()}")
        shape = (reads, self.weights.vocabulary)
        if not reads:
            return np.empty(shape, np.float32)
        numbers = lib.llama_get_logits(self.pointer)
        # Creating an array from a pointer is slow, and llama.cpp rarely moves its buffer.
        place = shape, ctypes.addressof(numbers.contents)
        if place != self._place:
            self._place = place
            self._logits = np.ctypeslib.as_array(numbers, shape)
        return self._logits

    def clear(self) -> None:
        """Drop all rows."""
        self._library.llama_memory_clear(self.memory, False)

    def copy(self, source: int, sequence: int, begin: int, end: int) -> None:
        """Let a sequence share another sequence's rows at these positions."""
        self._library.llama_memory_seq_cp(self.memory, source, sequence, begin, end)

    def cut(self, sequence: int, length: int) -> None:
        """Drop a sequence's rows from this position on."""
        self._library.llama_memory_seq_rm(self.memory, sequence, length, -1)

    def first(self, sequence: int) -> int:
        """The lowest remaining position of a sequence; models with sliding windows drop early positions."""
        return int(self._library.llama_memory_seq_pos_min(self.memory, sequence))

    def read(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """A sequence's keys and values, for ``write``."""
        lib = self._library
        size = lib.llama_state_seq_get_size(self.pointer, sequence)
        data: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.pointer, data, size, sequence)
        return data

    def write(self, sequence: int, data: ctypes.Array[ctypes.c_uint8]) -> None:
        """Set the keys and values of a sequence to those that ``read`` returned.

        Raises:
            EngineFailed: they do not fit in this context.
        """
        _errors.clear()
        if not self._library.llama_state_seq_set_data(self.pointer, data, len(data), sequence):
            raise EngineFailed(f"llama.cpp could not move a sequence to more memory: {_logged()}")

    def empty(self, sequences: Iterable[int]) -> None:
        """Drop all rows of these sequences."""
        for sequence in sequences:
            self.cut(sequence, 0)

"""Reads GGUF files: header, metadata and tensor table, in one pass.

Layout of a file (versions 2 and 3, little-endian; the specification is docs/gguf.md in ggml-org/ggml):

    "GGUF"  version u32  tensor count u64  entry count u64
    for each entry:   key string, value type u32, value
    for each tensor:  name string, dimensions u32, size of each u64 (fastest first), block type u32, offset u64
    padding to a multiple of general.alignment (32 unless an entry sets it)
    the tensors; offsets count from here

    a string is its length in bytes (u64) and then UTF-8; an array is a value type (u32), a count (u64) and the values

Every count and length is checked against the remaining bytes before it is used, so a wrong number in a header causes
an error and never a large allocation. Tensors must be contiguous and fill the file (zeros may follow), as llama.cpp
requires, so a wrong shape, block type or offset causes an error too.

Files are read, not mapped: a process that has mapped a file dies (SIGBUS) when another one shortens it.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import weakref
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ..core import SettingsError
from .strings import find_strings

#: Block type number -> (name, elements of a block, bytes of a block), from ggml.h.
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
#: Value type number -> numpy's name. 8 is a string and 9 an array.
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
#: Types of numbers that are not quantized.
PLAIN = frozenset(("F64", "F32", "F16", "BF16"))
#: ``general.type`` -> what such a file is, and what to give instead.
NOT_MODELS = {
    "adapter": "a LoRA adapter; merge it into its model with llama-export-lora, and give the result",
    "imatrix": "an importance matrix, for llama-quantize; give the model",
    "mmproj": "the part of a multimodal model that reads images; give the language model",
}
#: The first bytes of every file.
MAGIC = b"GGUF"
#: Maximum number of dimensions of a tensor in ggml.
MOST_DIMENSIONS = 4
#: Bytes that are read first, which almost every header fits in, and the factor to the next attempt.
PREFIX, LONGER = 1 << 23, 8
#: Bytes in the middle of each tensor that are part of a file's digest.
SAMPLE = 4096
#: From this many strings on, they are first read together.
MANY = 1000
#: Bytes of the smallest entry of each table: an empty name and one value or dimension.
SMALLEST_ENTRY, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


class Tensor(NamedTuple):
    """The type, shape and position of a tensor in its file."""

    type: str
    """The block type, as in "Q4_K"."""
    shape: tuple[int, ...]
    """Rows first, as in numpy and torch. The last dimension is a whole number of blocks."""
    offset: int
    """The position of the first byte, from the beginning of the file."""
    nbytes: int


def open_model(path: Path) -> GGUFFile:
    """Open a file that must contain a complete model.

    Raises:
        SettingsError: the file is damaged, is one part of several, or contains something else.
    """
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not re.fullmatch(r"[\w.-]{1,60}", architecture, re.ASCII):
        raise SettingsError(
            f"general.architecture must be a name of letters and digits, and {path.name} has {architecture!r:.60}; "
            "download or convert the file again"
        )
    general_type = "mmproj" if architecture == "clip" else file.metadata.get("general.type", "model")
    if isinstance(general_type, str) and general_type in NOT_MODELS:
        raise SettingsError(
            f"a GGUF file must contain a language model, and {path.name} is {NOT_MODELS[general_type]}"
        )
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise SettingsError(
            f"a GGUF model must be one file, and {path.name} is one of {parts} parts; "
            "merge them with llama-gguf-split --merge"
        )
    return file


class _Damaged(Exception):
    """The file is damaged. The message explains what is damaged; the caller adds the file's name."""


class _Longer(Exception):
    """The header is longer than what was read of it."""


class GGUFFile:
    """A GGUF file with its header read. It stays open while it is referenced; several threads may read it.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, list of str, or numpy array of numbers.
        tensors: name -> ``Tensor``, in the file's order.

    Raises:
        SettingsError: the file cannot be read, is not a GGUF file, is incomplete, or violates the format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._reading = Lock()
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._state = _state(os.fstat(self._file.fileno()))
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read ({error.strerror or error})") from None
        if not MAGIC.startswith(magic := self._read(0, min(self.size, len(MAGIC))).tobytes()):
            raise SettingsError(
                f"{self.path} is not a GGUF file: its first bytes must be {MAGIC!r}, got {magic!r}; "
                "give a model in GGUF or a directory of safetensors"
            )
        try:
            self.metadata, self.tensors, end = self._read_header()
            self._check_after(end)
        except _Damaged as error:
            raise SettingsError(
                f"a GGUF file must be complete; {self.path} ({self.size:,} bytes) cannot be read ({error}); "
                "copy or download it again"
            ) from None

    @property
    def size(self) -> int:
        """Its size when it was opened, in bytes."""
        return self._state[-1]

    def _read_header(self) -> tuple[dict[str, Any], dict[str, Tensor], int]:
        length = PREFIX
        while True:
            header = self._read(0, min(length, self.size)).tobytes()
            try:
                return _Reader(header, self.size).read()
            except _Longer:
                length *= LONGER

    def _check_after(self, end: int) -> None:
        """Check that only zeros follow the last tensor, which ends at this byte."""
        for begin in range(end, self.size, PREFIX):
            if self._read(begin, min(PREFIX, self.size - begin)).any():
                raise _Damaged(
                    f"only zeros may follow its last tensor, but {self.size - end:,} other bytes do"
                )

    def _read(self, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes of the file, (size,).

        Raises:
            SettingsError: they cannot be read, or the file has become shorter.
        """
        content = np.empty(size, np.uint8)
        left = memoryview(content)  # type: ignore[arg-type]  # numpy's arrays are buffers
        try:
            with self._reading:
                self._file.seek(offset)
                while left:
                    read = self._file.readinto(left)
                    if not read:
                        raise OSError(None, "it has become shorter")
                    left = left[read:]
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read ({error.strerror or error})") from None
        return content

    @property
    def matrix_types(self) -> set[str]:
        """The types of the matrices."""
        return {tensor.type for tensor in self.tensors.values() if len(tensor.shape) > 1}

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is quantized."""
        return not self.matrix_types <= PLAIN

    @property
    def weights(self) -> str:
        """The types of the matrices, those with the most bytes first, as in "Q4_K + Q6_K"."""
        sizes = dict[str, int]()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
        return " + ".join(sorted(sizes, key=lambda name: -sizes[name]))

    @property
    def parameter_count(self) -> int:
        """The number of weights."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def bytes(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor, (nbytes,).

        Raises:
            SettingsError: they cannot be read.
        """
        tensor = self.tensors[name]
        return self._read(tensor.offset, tensor.nbytes)

    def rows(self, name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of some rows of a matrix, (n, bytes of a row).

        Args:
            name: the tensor.
            rows: int64 (n,), n > 0, ascending.

        Raises:
            SettingsError: they cannot be read.
        """
        tensor = self.tensors[name]
        size = tensor.nbytes // tensor.shape[0]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)  # of adjacent rows
        parts = [self._read(tensor.offset + int(run[0]) * size, len(run) * size) for run in runs]
        return (
            np.concatenate(parts).reshape(len(rows), size) if len(parts) > 1 else parts[0].reshape(-1, size)
        )

    def digest(self) -> str:
        """Identifies the content: a digest of size, time of the last change, header, and a part of each tensor."""
        _, changed, size = self._state
        found = hashlib.sha256(f"{size} {changed}".encode())
        first = min((tensor.offset for tensor in self.tensors.values()), default=size)
        found.update(self._read(0, first))  # type: ignore[arg-type]
        for tensor in self.tensors.values():
            length = min(SAMPLE, tensor.nbytes)
            found.update(self._read(tensor.offset + (tensor.nbytes - length) // 2, length))  # type: ignore[arg-type]
        return found.hexdigest()

    def check_unchanged(self) -> None:
        """Raise SettingsError if the file was modified since it was opened, because the data read may be
        inconsistent.

        Replacing the file with another of the same name is not an error, because the old file stays open.
        """
        try:
            now = _state(os.stat(self.path))
        except FileNotFoundError:
            return
        if now[0] == self._state[0] and now != self._state:
            raise SettingsError(f"{self.path} must not change while it is read, but it did; load it again")


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    """(inode, time of the last change, size in bytes)."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class _Reader:
    """Reads a header from its first byte to its last.

    Args:
        data: the beginning of the file.
        size: bytes of the whole file.

    Attributes:
        at: the position of the next byte.
    """

    def __init__(self, data: bytes, size: int) -> None:
        self.data = data
        self.size = size
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor], int]:
        """(metadata, tensors, the byte at which the last tensor and its padding end).

        Raises:
            _Damaged: the header is wrong.
            _Longer: ``data`` ends within the header.
        """
        self.at = len(MAGIC)
        version = self.number("<I")
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            raise _Damaged(
                "its numbers must be little-endian, but they are big-endian"
                if big
                else f"its version must be 2 or 3, got {version}"
            )
        # The metadata.
        tensor_count, entry_count = self.number("<Q"), self.number("<Q")
        self.check_count(entry_count, SMALLEST_ENTRY, "metadata entries")
        self.check_count(tensor_count, SMALLEST_TENSOR, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self.string()
            if key in metadata:
                raise _Damaged(f"the key {key!r:.80} must occur once, but occurs again at byte {self.at:,}")
            metadata[key] = self.value(self.number("<I"), key)
        # Offsets count from the end of the table, so they can be resolved only after the whole table is read.
        table: dict[str, Tensor] = {}
        for _ in range(tensor_count):
            name, tensor = self.tensor_entry()
            if name in table:
                raise _Damaged(f"the tensor {name!r:.80} must occur once, but occurs twice")
            table[name] = tensor
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment must be a power of two, got {alignment!r:.60}")
        start = _aligned(self.at, alignment)
        tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in table.items()}
        return metadata, tensors, self.check_positions(tensors, start, alignment)

    def ends(self) -> Exception:
        """The error of a header that ends within what was read."""
        if len(self.data) < self.size:
            return _Longer()
        return _Damaged(f"it ends at byte {self.size:,}, within its header")

    def check_positions(self, tensors: dict[str, Tensor], start: int, alignment: int) -> int:
        """Check that the tensors are contiguous in the file. Returns their end."""
        end = start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            last = tensor.offset + tensor.nbytes
            if last > self.size:
                raise _Damaged(
                    f"the tensor {name!r:.80} must end within the file, but it ends at byte {last:,}"
                )
            if tensor.offset != end:
                raise _Damaged(
                    f"the tensor {name!r:.80} must begin at byte {end:,}, where the one before it ends (rounded "
                    f"up to {alignment} bytes), got {tensor.offset:,}"
                )
            end = _aligned(last, alignment)
        return end

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Check that ``count`` items of at least ``smallest`` bytes fit in the rest of the file."""
        if count * smallest > self.size - self.at:
            raise _Damaged(f"its header claims {count:,} {what}, but {self.size - self.at:,} bytes are left")

    def number(self, form: str) -> Any:
        """One number in a format of ``struct``."""
        try:
            (value,) = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise self.ends() from None
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        """One string: its length, then its bytes."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Consecutive strings. A tokenizer has more than 100,000, so this loop calls no method of this class."""
        if count >= MANY and (found := self.many_strings(count)) is not None:
            return found
        data = self.data
        length_at = struct.Struct("<Q").unpack_from
        texts = list[str]()
        add = texts.append
        begin = self.at + 8
        try:
            for _ in range(count):
                (length,) = length_at(data, begin - 8)
                end = begin + length
                if end > len(data):
                    if end > self.size:
                        left = self.size - begin
                        raise _Damaged(
                            f"the string at byte {begin:,} claims {length:,} bytes, but {left:,} are left"
                        )
                    raise _Longer
                add(data[begin:end].decode())
                begin = end + 8
        except struct.error:
            raise self.ends() from None
        except UnicodeDecodeError as error:
            raise _Damaged(f"the string at byte {begin:,} must be UTF-8: {error.reason}") from None
        self.at = begin - 8
        return texts

    def many_strings(self, count: int) -> list[str] | None:
        """Consecutive strings, in a fifth of the time. None if one has a zero, or anything is wrong."""
        begins = np.empty(count, np.int64)
        try:
            end = find_strings(np.frombuffer(self.data, np.uint8), self.at, begins)
        except SettingsError:  # there is no machine code for this processor
            return None
        if end < 0:
            return None
        # The eight bytes of each length become zeros, which then separate the strings.
        content = np.frombuffer(self.data[self.at : end], np.uint8).copy()
        content[(begins - self.at)[:, None] + np.arange(8)] = 0
        if np.count_nonzero(content) != len(content) - 8 * count:
            return None
        try:
            _, *texts = content.tobytes().decode().split("\0" * 8)
        except UnicodeDecodeError:
            return None
        self.at = end
        return texts

    def value(self, value_type: int, key: str) -> Any:
        """One value of an entry."""
        if value_type == STRING:
            return self.string()
        if value_type == ARRAY:
            return self.array(key)
        return self.numbers(value_type, 1, key)[0].item()

    def array(self, key: str) -> Any:
        """An array of an entry: strings as a list, numbers as a numpy array."""
        value_type, count = self.number("<I"), self.number("<Q")
        if value_type == STRING:
            self.check_count(count, 8, f"strings in {key!r:.80}")
            return self.strings(count)
        return self.numbers(value_type, count, key)

    def numbers(self, value_type: int, count: int, key: str) -> np.ndarray[Any, Any]:
        """Consecutive numbers of one type, (count,)."""
        if value_type not in NUMBERS:
            nested = " (an array of arrays)" if value_type == ARRAY else ""
            raise _Damaged(f"the value of {key!r:.80} has type {value_type}{nested}, which cannot be read")
        dtype = np.dtype(NUMBERS[value_type])
        self.check_count(count, dtype.itemsize, f"numbers in {key!r:.80}")
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise _Longer
        values = np.frombuffer(self.data[self.at : end], dtype)
        self.at = end
        return values

    def tensor_entry(self) -> tuple[str, Tensor]:
        """An entry of the table: a tensor's name, and the tensor with its offset from the first one."""
        name = self.string()
        dimensions = self.number("<I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise _Damaged(
                f"the tensor {name!r:.80} must have 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}"
            )
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        tensor_type = self.number("<I")
        offset = self.number("<Q")
        if tensor_type not in BLOCK_TYPES:
            raise _Damaged(
                f"the tensor {name!r:.80} has block type {tensor_type}, which this version does not support"
            )
        type_name, elements, size = BLOCK_TYPES[tensor_type]
        if 0 in shape:
            raise _Damaged(f"the tensor {name!r:.80} must not be empty, got the shape {shape}")
        if shape[-1] % elements:
            raise _Damaged(
                f"the rows of {name!r:.80} must be a whole number of blocks of {elements} elements for {type_name}, "
                f"got {shape[-1]:,} elements"
            )
        return name, Tensor(type_name, shape, offset, prod(shape) // elements * size)


def _aligned(position: int, alignment: int) -> int:
    """The position, rounded up to a multiple of the alignment."""
    return -(-position // alignment) * alignment

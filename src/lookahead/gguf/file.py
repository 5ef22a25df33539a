"""Reads GGUF files: header, metadata and tensor table, in one pass over a mapped file.

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
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import SettingsError

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
    kind = "mmproj" if architecture == "clip" else file.metadata.get("general.type", "model")
    if isinstance(kind, str) and kind in NOT_MODELS:
        raise SettingsError(
            f"a GGUF file must contain a language model, and {path.name} is {NOT_MODELS[kind]}"
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


class GGUFFile:
    """A GGUF file with its header read and its tensors mapped. It stays open while it is referenced.

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
        try:
            with open(self.path, "rb") as file:
                self._state = _state(os.fstat(file.fileno()))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._state[-1] else b""
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read ({error.strerror or error})") from None
        if not MAGIC.startswith(magic := self._map[: len(MAGIC)]):
            raise SettingsError(
                f"{self.path} is not a GGUF file: its first bytes must be {MAGIC!r}, got {magic!r}; "
                "give a model in GGUF or a directory of safetensors"
            )
        try:
            self.metadata, self.tensors = _Reader(self._map).read()
        except _Damaged as error:
            raise SettingsError(
                f"a GGUF file must be complete; {self.path} ({len(self._map):,} bytes) cannot be read ({error}); "
                "copy or download it again"
            ) from None

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
        return " + ".join(sorted(sizes, key=lambda kind: -sizes[kind]))

    @property
    def parameter_count(self) -> int:
        """The number of weights."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def bytes(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor, (nbytes,), mapped and read-only."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    def release(self) -> None:
        """Release the mapped pages that were read. The system reads them again on the next use."""
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise SettingsError if the file was modified since it was opened, because the data read may be
        inconsistent.

        Replacing the file with another of the same name is not an error, because the old file stays mapped.
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

    Attributes:
        at: the position of the next byte.
    """

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(metadata, tensors)."""
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
        self.check_positions(tensors, start, alignment)
        return metadata, tensors

    def check_positions(self, tensors: dict[str, Tensor], start: int, alignment: int) -> None:
        """Check that the tensors are contiguous in the file and that only padding follows the last one."""
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
        if np.frombuffer(self.data, np.uint8, offset=min(end, self.size)).any():
            raise _Damaged(f"only zeros may follow its last tensor, but {self.size - end:,} other bytes do")

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Check that ``count`` items of at least ``smallest`` bytes fit in the rest of the file."""
        if count * smallest > self.size - self.at:
            raise _Damaged(f"its header claims {count:,} {what}, but {self.size - self.at:,} bytes are left")

    def number(self, form: str) -> Any:
        """One number in a format of ``struct``."""
        try:
            (value,) = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise _Damaged(f"it ends at byte {self.size:,}, within its header") from None
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        """One string: its length, then its bytes."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Consecutive strings. A tokenizer has more than 100,000, so this loop calls no method of this class."""
        data = self.data
        at = self.at
        size = self.size
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                at += 8
                if length > size - at:
                    raise _Damaged(
                        f"the string at byte {at:,} claims {length:,} bytes, but {size - at:,} are left"
                    )
                texts.append(data[at : at + length].decode())
                at += length
        except struct.error:
            raise _Damaged(f"it ends at byte {size:,}, within its header") from None
        except UnicodeDecodeError as error:
            raise _Damaged(f"the string at byte {at:,} must be UTF-8: {error.reason}") from None
        self.at = at
        return texts

    def value(self, kind: int, key: str) -> Any:
        """One value of an entry."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key)
        return self.numbers(kind, 1, key)[0].item()

    def array(self, key: str) -> Any:
        """An array of an entry: strings as a list, numbers as a numpy array."""
        kind, count = self.number("<I"), self.number("<Q")
        if kind == STRING:
            self.check_count(count, 8, f"strings in {key!r:.80}")
            return self.strings(count)
        return self.numbers(kind, count, key)

    def numbers(self, kind: int, count: int, key: str) -> np.ndarray[Any, Any]:
        """Consecutive numbers of one type, (count,)."""
        if kind not in NUMBERS:
            nested = " (an array of arrays)" if kind == ARRAY else ""
            raise _Damaged(f"the value of {key!r:.80} has type {kind}{nested}, which cannot be read")
        dtype = np.dtype(NUMBERS[kind])
        self.check_count(count, dtype.itemsize, f"numbers in {key!r:.80}")
        values = np.frombuffer(self.data[self.at : self.at + count * dtype.itemsize], dtype)
        self.at += count * dtype.itemsize
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
        kind = self.number("<I")
        offset = self.number("<Q")
        if kind not in BLOCK_TYPES:
            raise _Damaged(
                f"the tensor {name!r:.80} has block type {kind}, which this version does not support"
            )
        type_name, elements, size = BLOCK_TYPES[kind]
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

"""Matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, as operations.

A tile's number is a constant. Call ``configure_tiles`` before all others and ``release_tiles`` after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from .operations import CONSTANT, I8, NOTHING, call_intrinsic, int64, memory, operation, pointer_to, void


def _emit(name: str, tiles: int) -> Any:
    """An instruction whose first operands are tiles, the next an address, the others integers."""

    def emit(builder: Any, *operands: Any) -> None:
        numbers = [ir.Constant(I8, number) for number in operands[:tiles]]
        others = list(operands[tiles:])
        if others:
            others[0] = pointer_to(builder, others[0])
        call_intrinsic(builder, f"llvm.x86.{name}", NOTHING, *numbers, *others)

    return emit


#: The tiles in functions run by Python: (rows, 16 words).
_tiles: dict[int, np.ndarray[Any, Any]] = {}
_rows: list[int] = []


@operation(void(int64), _emit("ldtilecfg", 0))
def configure_tiles(address: int) -> None:
    """Configure the tiles by the 64 bytes of ``formats.tile_config`` at ``address``."""
    _rows[:] = memory(address + 48, np.uint8, 8).tolist()


@operation((void,), _emit("tilerelease", 0))
def release_tiles() -> None:
    """End the use of the tiles; their contents are lost."""
    _tiles.clear()


@operation((void, CONSTANT), _emit("tilezero", 1))
def zero_tile(tile: int) -> None:
    """Set a tile of sums, (rows, 16) fp32, to zero."""
    _tiles[tile] = np.zeros((_rows[tile], 16), np.float32)


@operation((void, CONSTANT, int64, int64), _emit("tileloadd64", 1))
def load_tile(tile: int, address: int, stride: int) -> None:
    """Load up to 16 rows of 64 bytes, ``stride`` bytes apart, into a tile."""
    rows = [memory(address + stride * r, np.uint32, 16) for r in range(_rows[tile])]
    _tiles[tile] = np.stack(rows)


@operation((void, CONSTANT, int64, int64), _emit("tilestored64", 1))
def store_tile(tile: int, address: int, stride: int) -> None:
    """Store a tile's rows of 64 bytes, ``stride`` bytes apart."""
    for r, row in enumerate(_tiles[tile]):
        memory(address + stride * r, row.dtype, 16)[:] = row


@operation((void, CONSTANT, CONSTANT, CONSTANT), _emit("tdpbf16ps", 3))
def multiply_tiles(sums: int, rows: int, columns: int) -> None:
    """sums[i, j] += the products of bf16 numbers: rows[i, k] * columns[k // 2, j, k % 2] for each k."""
    a, b = (
        (_tiles[tile].view(np.uint16).astype(np.uint32) << 16).view(np.float32) for tile in (rows, columns)
    )
    _tiles[sums] += a @ b.reshape(-1, 16, 2).transpose(0, 2, 1).reshape(-1, 16)

"""Built kernels: every entry's bits equal those of the same function compiled in this process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead import builder, machine_code, processor
from lookahead.cpu.packed import KINDS, PANEL, RECORD
from test_packed import file_bytes

ENTRIES = builder.all_entries()


def both(name: str, *types: Any) -> list[Callable[..., int]]:
    """An entry from the library, and compiled in this process."""
    library = machine_code.load()
    assert library is not None
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *types)
    return [prototype(ctypes.cast(library[name], ctypes.c_void_p).value), prototype(builder.address(name))]


def ints(count: int) -> list[Any]:
    return [ctypes.c_int64] * count


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("inner", [256, 1280])
def test_packing_decoding_and_multiplying_have_the_same_bits(kind, inner):
    random = np.random.default_rng(inner + kind.bits)
    raw = file_bytes(kind, 37, inner, random)
    panels = np.zeros((2, 3, kind.panel_bytes(inner) + 64), np.uint8)
    order = np.r_[np.arange(37), np.full(11, -1)]
    outputs = []
    for number, pack in enumerate(both(f"pack_{kind.name}", *ints(7))):
        where = raw.ctypes.data, raw.strides[0], order.ctypes.data, 3, inner
        pack(*where, panels[number].ctypes.data, panels.strides[1])
    assert panels.any()
    assert (panels[0] == panels[1]).all()
    for decode in both(f"decode_{kind.name}", *ints(4)):
        rows = np.full((PANEL, inner), np.nan, np.float32)
        for lane in range(PANEL):
            decode(panels[0, 1].ctypes.data, lane, inner, rows[lane].ctypes.data)
        outputs.append(rows)
    assert np.isfinite(outputs[0]).all()
    assert outputs[0].tobytes() == outputs[1].tobytes()

"""Processor features available to compiled code."""

from __future__ import annotations

import ctypes
import platform
import sys

from llvmlite import binding
from numba import config


def _features() -> dict[str, bool]:
    """Features of the processor that numba compiles for, which is this one unless numba's settings name another."""
    if config.CPU_FEATURES is not None:
        return {name[1:]: name.startswith("+") for name in config.CPU_FEATURES.split(",") if name}
    found = {} if config.CPU_NAME == "generic" else dict(binding.get_host_cpu_features())
    # With NUMBA_ENABLE_AVX=0, numba compiles without these.
    return (
        found if config.ENABLE_AVX else {name: on for name, on in found.items() if not name.startswith("avx")}
    )


_FEATURES = _features()
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
#: fp32 numbers per register, number of vector registers, and whether a * b + c is one instruction.
WIDTH = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
REGISTERS = 32 if WIDTH == 16 or ARM else 16
FUSED = ARM or bool(_FEATURES.get("fma")) or WIDTH == 16


def _tiles_permitted() -> bool:
    """Request tile registers from Linux (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA). Returns whether they are
    granted."""
    wanted = ("amx-tile", "amx-bf16")
    if not (X86 and sys.platform == "linux" and all(_FEATURES.get(name) for name in wanted)):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)


#: Whether bf16 products run on matrix tiles (AMX).
TILES = WIDTH == 16 and _tiles_permitted()
#: Whether bf16 products run in vectors, in pairs (AVX512-BF16).
PAIRS = WIDTH == 16 and X86 and bool(_FEATURES.get("avx512bf16"))
#: Whether one instruction sums four products of bytes (AVX512-VNNI, AVX-VNNI), or two (AVX2, AVX512-BW).
VNNI = X86 and (
    (WIDTH == 16 and bool(_FEATURES.get("avx512vnni"))) or (WIDTH == 8 and bool(_FEATURES.get("avxvnni")))
)
PAIRED_BYTES = X86 and not VNNI and (WIDTH == 8 or bool(_FEATURES.get("avx512bw")))
#: Whether one instruction widens fp16 numbers (F16C).
HALVES = WIDTH == 16 or ARM or bool(_FEATURES.get("f16c"))

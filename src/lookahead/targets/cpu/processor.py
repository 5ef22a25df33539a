"""What this processor offers to compiled code: vector lanes, fused multiply-adds, bf16 products, matrix tiles.

Decided once, when the module is loaded. Compiled code is kept on disk under ``STAMP``, so that code made for one
decision, or from another version of these files, is never run under another.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from pathlib import Path

import llvmlite.binding as llvm
from numba.core import config


def _features() -> dict[str, bool]:
    """Of the processor that numba compiles for: this one, unless its own settings name another."""
    if config.CPU_FEATURES is not None:
        return {name[1:]: name.startswith("+") for name in config.CPU_FEATURES.split(",") if name}
    return {} if config.CPU_NAME == "generic" else dict(llvm.get_host_cpu_features())


_FEATURES = _features()
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
#: fp32 numbers in a vector, vectors in the register file, and whether a * b + c is one instruction.
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
REGISTERS = 32 if LANES == 16 or ARM else 16
FUSED = ARM or bool(_FEATURES.get("fma")) or LANES == 16


def _tiles_permitted() -> bool:
    """Linux lends the tile registers to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    wanted = ("amx-tile", "amx-bf16")
    if not (X86 and sys.platform == "linux" and all(_FEATURES.get(name) for name in wanted)):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)
    except (OSError, AttributeError):
        return False


#: bf16 products on matrix tiles (AMX).
TILES = LANES == 16 and _tiles_permitted()
#: bf16 products of pairs in vectors (AVX512-BF16).
PAIRS = LANES == 16 and X86 and bool(_FEATURES.get("avx512bf16"))


def _stamp() -> int:
    """Changes with the decisions above and with the text of any file of this package."""
    digest = hashlib.sha256(repr((LANES, REGISTERS, FUSED, TILES, PAIRS)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


STAMP = _stamp()

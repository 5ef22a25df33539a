"""The levels of processors that machine code is built for, and what this processor has."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """Processors that run the same machine code.

    Attributes:
        name: the name of its library.
        architecture: "x86_64" or "arm64".
        needs: what a processor must have, by Linux's names.
        cpu, features: the same for LLVM.
        width: fp32 numbers in a register.
        products: how bytes are multiplied: "VNNI", "AVX2", "dot" (ARM) or "plain".
        optional: what only some kernels use, which are chosen if the processor has it; as ``features``.
    """

    name: str
    architecture: str
    needs: frozenset[str]
    cpu: str
    features: str
    width: int
    products: str
    optional: str = ""


_V3 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
#: The best first.
LEVELS = (
    Level(
        "x86-64-v4", "x86_64", _V4, "x86-64-v4", "+avx512vnni", 16, "VNNI", "+avx512bf16,+amx-tile,+amx-bf16"
    ),
    Level("x86-64-v3-vnni", "x86_64", _V3 | {"avx_vnni"}, "x86-64-v3", "+avxvnni", 8, "VNNI"),
    Level("x86-64-v3", "x86_64", _V3, "x86-64-v3", "", 8, "AVX2"),
    Level("arm64", "arm64", frozenset({"asimddp"}), "generic", "+dotprod", 4, "dot"),
)
#: What no library is built for. Without an instruction set in common, LLVM's name of the processor is "generic".
OTHERS = (
    Level("x86-64", "x86_64", frozenset(), "x86-64", "", 4, "plain"),
    Level("other", "", frozenset(), "generic", "", 4, "plain"),
)


@cache
def architecture() -> str:
    """ "x86_64", "arm64", or the system's name of another one."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


@cache
def features() -> frozenset[str]:
    """What this processor has, by Linux's names; empty if unknown."""
    if sys.platform == "darwin":  # every ARM processor of Apple's computers has dot products
        return frozenset({"asimddp"} if architecture() == "arm64" else ())
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                name, _, values = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(values.split())
    except OSError:
        pass
    return frozenset()


@cache
def level() -> Level:
    """The best level of this processor, or the one that LOOKAHEAD_LEVEL names, to try the others."""
    named = os.environ.get("LOOKAHEAD_LEVEL")
    for each in (*LEVELS, *OTHERS):
        if named in (None, "", each.name) and fits(each):
            return each
    names = ", ".join(each.name for each in (*LEVELS, *OTHERS) if fits(each))
    raise ValueError(f"LOOKAHEAD_LEVEL must be one of {names} on this processor, got {named!r}")


#: The level and the system that kernels are compiled for, if not this machine's.
_target: tuple[Level, str] | None = None


def compile_for(level: Level, system: str) -> None:
    """Let kernels whose sources are imported from now on be compiled for a level and a system (``sys.platform``)."""
    global _target
    _target = level, system


def target() -> Level:
    """The level that kernels are compiled for in this process."""
    return _target[0] if _target else level()


def target_system() -> str:
    """The system that kernels are compiled for in this process."""
    return _target[1] if _target else sys.platform


def fits(each: Level) -> bool:
    """Whether this processor runs code of a level."""
    return each.architecture in ("", architecture()) and each.needs <= features()


@cache
def has_pairs() -> bool:
    """Whether bf16 products run in vectors, in pairs (AVX512-BF16)."""
    return level().width == 16 and "avx512_bf16" in features()


@cache
def has_tiles() -> bool:
    """Whether bf16 products run on matrix tiles (AMX), and Linux permits this process to use them."""
    if level().width != 16 or not {"amx_tile", "amx_bf16"} <= features():
        return False
    # arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA
    return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)


@cache
def name() -> str:
    """The processor's name, for what was measured on it."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

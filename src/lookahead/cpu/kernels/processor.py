"""The processor that is compiled for."""

from __future__ import annotations

from ...processor import target

TARGET = target()

X86 = TARGET.architecture == "x86_64"
ARM = TARGET.architecture == "arm64"
#: fp32 numbers per register, number of vector registers, and whether a * b + c is one instruction.
WIDTH = TARGET.width
REGISTERS = 32 if WIDTH == 16 or ARM else 16
FUSED = WIDTH > 4 or ARM
#: Whether one instruction widens fp16 numbers (F16C).
HALVES = FUSED
#: Whether one instruction sums four products of bytes (AVX512-VNNI, AVX-VNNI), or two (AVX2).
VNNI = TARGET.products == "VNNI"
PAIRED_BYTES = TARGET.products == "AVX2"
#: Whether one instruction sums four products of signed bytes.
SIGNED_DOT = TARGET.products == "dot"

"""How llama.cpp's programs were built, for the pages that compare with them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

#: Build options in CMake's cache that change the speed on a CPU.
OPTIONS = r"^(CMAKE_(?:BUILD_TYPE|C_FLAGS|CXX_FLAGS)|GGML_(?:NATIVE|OPENMP|LTO|BLAS|CPU_REPACK)):\w+=(.*)$"


@cache
def build_of(program: Path) -> str:
    """Version, compiler and build options of one of llama.cpp's programs; CMake's cache has the options, if there."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    lines = (said.stdout + said.stderr).splitlines()
    found = [line.removeprefix("version: ") for line in lines if line.startswith(("version", "built with"))]
    cache_file = program.resolve().parents[1] / "CMakeCache.txt"
    options = cache_file.read_text(errors="replace") if cache_file.is_file() else ""
    found += [f"{name}={value}" for name, value in re.findall(OPTIONS, options, flags=re.M) if value]
    return "; ".join(found) or "version unknown"

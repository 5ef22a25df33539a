"""How llama.cpp's programs were built, for the pages that compare with them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

#: Build options in CMake's cache that change the speed on a CPU.
OPTIONS = r"^(CMAKE_(?:BUILD_TYPE|C_FLAGS|CXX_FLAGS)|GGML_(?:NATIVE|OPENMP|LTO|BLAS|CPU_REPACK)):\w+=(.*)$"
#: The folder of the source in CMake's cache, if it is that of a source package of llama-cpp-python.
PACKAGE = r"^CMAKE_HOME_DIRECTORY:INTERNAL=.*/llama_cpp_python-(\d[\w.]*)/vendor/llama\.cpp$"


@cache
def build_of(program: Path) -> str:
    """Version, compiler and build options of one of llama.cpp's programs.

    CMake's cache, if there, has the options, and the source if it is in a package of llama-cpp-python.
    """
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    lines = (said.stdout + said.stderr).splitlines()
    found = [line.removeprefix("version: ") for line in lines if line.startswith(("version", "built with"))]
    cache_file = program.resolve().parents[1] / "CMakeCache.txt"
    options = cache_file.read_text(errors="replace") if cache_file.is_file() else ""
    package = re.search(PACKAGE, options, flags=re.M)
    if package is not None:
        found.insert(1, f"the source in llama-cpp-python {package.group(1)}")
    found += [f"{name}={value}" for name, value in re.findall(OPTIONS, options, flags=re.M) if value]
    return "; ".join(found) or "version unknown"

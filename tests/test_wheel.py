"""The wheel that users install is built, installed into an empty environment, and imported there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_it_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lookahead", "lookahead_decoding"}
    assert {"lookahead/py.typed", "lookahead/cli/demo_prompts/1-copy.txt"} <= set(names)
    assert not [name for name in names if name.endswith((".pyc", ".nbc", ".nbi", ".pkl", ".bin"))]


#: The model, the corpus and the head of the package.
LARGE = [
    "lookahead/bundled/model.safetensors",
    "lookahead/learning/corpus.jsonl.xz",
    "lookahead/heads/v49152-h576-l30.safetensors",
]


def test_it_is_small(wheel):
    """Every installation downloads all of it. All but a megabyte are three files, so a further file of such a size
    would be there by accident, or should be a download."""
    with zipfile.ZipFile(wheel) as files:
        large = sum(files.getinfo(name).compress_size for name in LARGE)
    assert wheel.stat().st_size - large < 1.1e6
    assert wheel.stat().st_size < 15e6


def interpreters():
    """Every Python from 3.11 on that is found here: this one, those on PATH, and pyenv's."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for minor in range(11, 15):
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3"))
        other = str(beside[-1]) if beside else shutil.which(f"python3.{minor}")
        if other is not None and subprocess.run([other, "-c", ""], capture_output=True).returncode == 0:
            found.setdefault(f"3.{minor}", other)
    return found


@pytest.mark.parametrize("version", interpreters())
def test_it_imports_in_an_empty_environment(wheel, tmp_path, version):
    """Nothing else is installed: modules that need torch are imported only on demand."""
    command = [interpreters()[version], "-m", "venv", "--without-pip", str(tmp_path / "env")]
    subprocess.run(command, check=True, capture_output=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, cwd=tmp_path)
    code = (
        "import lookahead, lookahead.core as core, lookahead.drafters as drafters, lookahead.testing as testing;"
        "request = core.Request([1, 2, 3, 1, 2], drafters.as_drafter('3,3,3'), 12);"
        "[sequence] = testing.run(testing.FakeTarget(), [request]);"
        "print(lookahead.__version__, len(sequence.tokens))"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "12"

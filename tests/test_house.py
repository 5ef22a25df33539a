"""The house: who loads what, the names that are exported, and files that keep one purpose."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lookahead

SOURCE = Path(lookahead.__file__).parent


def loaded_by(statement):
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lookahead.core", {"torch", "numpy", "transformers", "typer", "rich", "matplotlib"}),
        ("import lookahead", {"torch", "triton", "fastapi", "matplotlib", "numba", "scipy"}),
        ("import lookahead.testing", {"torch", "transformers"}),
        ("import lookahead.cli", {"torch", "matplotlib"}),
    ],
)
def test_what_an_import_loads(statement, absent):
    assert not loaded_by(statement) & absent


def test_the_core_is_the_standard_library_only():
    foreign = {
        name.split(".")[0]
        for name in loaded_by("import lookahead.core")
        if name.split(".")[0] not in sys.stdlib_module_names | {"lookahead", "__main__"}
    }
    # What an interpreter's site directory loads by itself at every start is not the core's doing.
    assert foreign <= {name.split(".")[0] for name in loaded_by("pass")}


def test_exported_names():
    assert {"load", "generate", "LookaheadConfig", "__version__"} <= set(lookahead.__all__)
    for name in lookahead.__all__:
        assert getattr(lookahead, name) is not None


def test_every_module_opens_with_its_contract():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text().lstrip()
        assert text.startswith('"""'), f"{path.relative_to(SOURCE)} has no docstring"


def test_rooms_stay_small():
    sizes = {str(p.relative_to(SOURCE)): len(p.read_text().splitlines()) for p in SOURCE.rglob("*.py")}
    large = {name: size for name, size in sizes.items() if size > 420}
    assert not large, f"does each still have one purpose? {large}"

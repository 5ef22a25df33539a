"""Worked examples in CONTRIBUTING.md run; its links and CHANGELOG.md's point to existing files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.datasets import SOURCES
from lookahead.hf.module_families import REGISTRY

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(
    r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M
)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_worked_examples_run(title, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registries = (SOURCES, REGISTRY)
    before = [dict(registry) for registry in registries]
    try:
        exec(compile(code, f"CONTRIBUTING.md, {title}", "exec"), {"__name__": "documentation"})
        changed = before != [dict(registry) for registry in registries]
        assert changed == (title not in ("A drafter", "An option")), (
            "an example registers something, but for drafters and options, which are passed"
        )
    finally:
        for registry, known in zip(registries, before, strict=True):
            registry.clear()
            registry.update(known)


def test_the_example_drafter_passes_the_linters_as_a_file_of_the_library():
    """``make types`` checks its types."""
    (code,) = [code for title, code in EXAMPLES if title == "A drafter"]
    file = ROOT / "src" / "lookahead" / "drafters" / "bigram.py"
    assert ast.get_docstring(ast.parse(code))  # test_structure.py requires one in every module
    programs = [
        ["ruff", "check", "--stdin-filename", str(file), "-"],
        ["ruff", "format", "--check", "--stdin-filename", str(file), "-"],
    ]
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-m", *program], input=code, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_point_to_existing_files(name):
    for link in re.findall(r"\]\(([^)#\s]+)\)", (ROOT / name).read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), f"{name} links to {link}"

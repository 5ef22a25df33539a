"""Worked examples in CONTRIBUTING.md run; its links and CHANGELOG.md's point to existing files."""

import ast
import os
import re
import shutil
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


SOURCE = "A source of guesses"
RUN = [(title, code) for title, code in EXAMPLES if title != SOURCE]


@pytest.mark.parametrize(("title", "code"), RUN, ids=[title for title, _ in RUN])
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


#: Decodes with the source alone, compares with plain decoding, and prints the tokens accepted because of it.
WITH_SOURCE = """
from lookahead import Adaptive
from lookahead.testing import FakeTarget, assert_same_as_autoregressive, repetitive_text
target = FakeTarget(vocabulary=32, next_token=repetitive_text(32))
for sources in (("bigrams",), ("bigrams", "logits")):
    (sequence,) = assert_same_as_autoregressive(target, [[1, 2, 3]], Adaptive(rows=4, sources=sources))
    print(sequence.stats.drafter["accepted_by_bigrams"], sequence.stats.compression_ratio)
"""


def test_a_source_is_one_file_and_its_place_in_two_lists(tmp_path):
    """In a copy of the library, without machine code, which would take long to compile."""
    (code,) = [code for title, code in EXAMPLES if title == SOURCE]
    assert len(code.splitlines()) < 60
    copy = tmp_path / "lookahead"
    shutil.copytree(ROOT / "src" / "lookahead", copy, ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
    adaptive = copy / "drafters" / "adaptive"
    (adaptive / "sources" / "bigrams.py").write_text(code)
    registered = (
        ("sources/__init__.py", "from .jacobi", "from .bigrams import Bigrams\n"),
        ("sources/__init__.py", "Logits, ", "Bigrams, "),
        ("settings.py", '    "logits":', '    "bigrams": "the token that followed the same token last",\n'),
    )
    for name, before, added in registered:
        file = adaptive / name
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, added + before))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITH_SOURCE], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        accepted, ratio = map(float, line.split())
        assert accepted > 0
        assert ratio > 1


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

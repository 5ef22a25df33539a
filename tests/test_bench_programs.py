"""Programs that no test runs still import only names that the library has."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = [
    file for folder in ("benchmarks", "docs", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
]


def imported(file):
    """(module, name) of each name that a file imports from the library."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("lookahead."):
            yield from ((node.module, alias.name) for alias in node.names)


def has(module, name):
    """Whether a name of a module, or a module of a package, is there."""
    return hasattr(module, name) or (
        hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None
    )


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_program_imports_only_names_that_the_library_has(file):
    missing = [
        f"{module}.{name}"
        for module, name in imported(file)
        if not has(importlib.import_module(module), name)
    ]
    assert not missing, f"{file.relative_to(ROOT)} imports what is not there: {', '.join(missing)}"

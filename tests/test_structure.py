"""The structure of the library: no import cycles, what an import loads, a docstring in every module."""

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import lookahead

SOURCE = Path(lookahead.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path):
    """a/b/__init__.py -> lookahead.a.b"""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports_of(name, tree, modules):
    """Our modules that module ``name`` imports anywhere in its file, including for type checkers."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                imported.add(submodule if submodule in modules else base)
    return {module for module in imported if module in modules and module != name}


def circles(graph):
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    order, low, stack, groups = {}, {}, [], []

    def visit(name):
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return groups


def test_no_import_circles():
    """Imports inside functions and under TYPE_CHECKING count, as a reader has to follow them too."""
    graph = {name: imports_of(name, ast.parse(path.read_text()), MODULES) for name, path in MODULES.items()}
    assert circles(graph) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from .c import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .c import x",
    ],
    ids=["inside a function", "for type checkers"],
)
def test_a_circle_would_be_found(text):
    modules = {"a": Path("a/__init__.py"), "a.b": Path("a/b.py"), "a.c": Path("a/c.py")}
    texts = {"a": "", "a.b": text, "a.c": "from . import b"}
    graph = {name: imports_of(name, ast.parse(text), modules) for name, text in texts.items()}
    assert circles(graph) == [["a.b", "a.c"]]


def test_import_contracts_see_every_import():
    """Only the package root, the command line (its own commands) and ``machine_code`` import modules dynamically:
    import contracts miss such imports."""
    hidden = []
    known = "lookahead", "lookahead.cli", "lookahead.machine_code"
    for name, path in MODULES.items():
        words = {token.string for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)}
        if words & {"import_module", "__import__"} and name not in known:
            hidden.append(name)
    assert not hidden


def loaded_by(statement):
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lookahead.core", {"torch", "numpy", "transformers", "typer", "rich", "matplotlib"}),
        ("import lookahead", {"torch", "numpy", "numba", "triton", "fastapi", "matplotlib", "scipy"}),
        ("import lookahead.drafters; lookahead.drafters.Adaptive()", {"torch", "numpy", "numba"}),
        ("import lookahead.testing", {"torch", "transformers"}),
        ("import lookahead.cli; lookahead.cli.app", {"torch", "matplotlib"}),
        ("import lookahead.loading", {"transformers", "torch._dynamo", "matplotlib"}),
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
    # Some installations load their own modules whenever the interpreter starts; those do not count.
    assert foreign <= {name.split(".")[0] for name in loaded_by("pass")}


def test_every_module_opens_with_its_contract():
    without = [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not without, "these modules have no docstring"

"""Prompts from the running Python's standard library, so that there is real input on every machine.

A prompt is a function's signature and docstring; the reference is the rest of it. One function of a file at most,
chosen by a seed: the same Python and the same seed give the same prompts.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..core import SettingsError

#: Folders that hold tests, tables, or other people's packages.
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo",
    "encodings", "pydoc_data", "ensurepip", "__pycache__", "__phello__",
}  # fmt: skip


def stdlib_prompts(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Fields of at most ``count`` prompts.

    Raises:
        SettingsError: the standard library's sources are not on this machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise SettingsError(f"this Python has no library sources in {root}; use another workload")
    generator = random.Random(seed)
    generator.shuffle(files)
    found = ((path.relative_to(root).as_posix(), _functions(path)) for path in files)
    for file, functions in islice(filter(lambda pair: pair[1], found), count):
        name, head, body = generator.choice(functions)
        yield {
            "id": f"{file}:{name}",
            "turns": (f"Complete this Python function. Answer with the code only.\n\n{head}",),
            "plain": head.rstrip(),
            "reference": body,
        }


def _functions(path: Path) -> list[tuple[str, str, str]]:
    """(name, signature and docstring, the rest) of the functions worth completing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 3 or not ast.get_docstring(node):
            continue
        first, middle, end = node.lineno, node.body[0].end_lineno or 0, node.end_lineno or 0
        if 4 <= end - middle <= 60 and middle - first <= 30:
            # The indent goes: the head's common one, and as much of the body.
            indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
            head = textwrap.dedent("".join(lines[first - 1 : middle]))
            body = "".join(line[indent:] if line.strip() else line for line in lines[middle:end])
            found.append((f"{node.name}:{first}", head, body))
    return found

"""Draws the tree of docs/architecture.md: packages and modules with the first sentence of their docstrings.

python docs/draw_architecture.py --write
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lookahead"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- tree -->\n```\n)(.*?)(```\n)", re.S)
WIDTH = 118


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`])\. ", first)[0].rstrip(".")


def tree(folder: Path = SOURCE, indent: int = 0) -> list[str]:
    """One line per package and module; packages come after the modules beside them."""
    space = "  " * indent
    init = folder / "__init__.py"
    drawn = [f"{space + folder.name + '/':<38}{purpose(init)}"[:WIDTH].rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path != init:
            drawn.append(f"{space + '  ' + path.name:<38}{purpose(path)}"[:WIDTH].rstrip())
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        drawn += tree(inner, indent + 1)
    return drawn


def page(text: str) -> str:
    """The page with its tree drawn anew."""
    drawn = "\n".join(tree()) + "\n"
    return BLOCK.sub(lambda match: match.group(1) + drawn + match.group(3), text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(tree()))

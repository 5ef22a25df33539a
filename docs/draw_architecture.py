"""Draws the tree of docs/architecture.md: every package with the names of its modules.

python docs/draw_architecture.py             # on the terminal, each module with the first sentence of its docstring
python docs/draw_architecture.py --write     # the names alone, into the page
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lookahead"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- tree -->\n```\n)(.*?)(```\n)", re.S)
WIDTH = 118


def packages(folder: Path = SOURCE, indent: int = 0) -> Iterator[tuple[int, Path, list[Path]]]:
    """(depth, package, its modules); a package comes before those inside it."""
    yield indent, folder, [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from packages(inner, indent + 1)


def tree() -> list[str]:
    """One line per package, longer ones folded."""
    drawn = []
    for indent, folder, modules in packages():
        head = f"{'  ' * indent + folder.name + '/':<18}"
        names = ", ".join(path.stem for path in modules)
        drawn += textwrap.wrap(head + names, WIDTH, subsequent_indent=" " * len(head), drop_whitespace=True)
    return drawn


def page(text: str) -> str:
    """The page with its tree drawn anew."""
    drawn = "\n".join(tree()) + "\n"
    return BLOCK.sub(lambda match: match.group(1) + drawn + match.group(3), text)


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`])\. ", first)[0].rstrip(".")


def listing() -> list[str]:
    """One line per package and module, each with its purpose."""
    lines = []
    for indent, folder, modules in packages():
        lines.append(f"{'  ' * indent + folder.name + '/':<38}{purpose(folder / '__init__.py')}")
        lines += [f"{'  ' * (indent + 1) + path.name:<38}{purpose(path)}" for path in modules]
    return lines


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(listing()))

"""Documentation that runs: Python blocks are executed, drawn blocks are drawn again, links lead somewhere."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page run one after the other, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for number, block in enumerate(python_blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


def test_drawn_blocks_are_what_the_code_draws():
    draw = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "draw.py")))
    text = draw.PAGE.read_text()
    assert draw.page(text) == text, "run python docs/draw.py --write"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not link.startswith(("http", "mailto:")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"

"""The lists of measured pages: a table in docs/benchmarks.md, and the site's navigation.

Both are made from the pages in docs/results, so a page that `make results` makes only on some machines (bench-bf16,
vllm, trained) is listed where it was made, and no link leads to a page that was not.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from .blocks import made, with_block
from .report import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
#: Page with the table -> headings of its columns.
TABLES = {
    ROOT / "docs" / "benchmarks.md": ("page", "machine", "commit"),
    ROOT / "docs" / "zh" / "benchmarks.md": ("结果页", "机器", "commit"),
}
NAVIGATION = ROOT / "mkdocs.yml"
#: A line of the navigation.
ENTRY = re.compile(r" +- results/(.*)\.md\n")


def write() -> None:
    """Write the table into both languages' pages, and the list into the navigation."""
    for path in TABLES:
        path.write_text(with_table(path, path.read_text(encoding="utf-8")), encoding="utf-8")
    NAVIGATION.write_text(with_entries(NAVIGATION.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(path: Path, text: str) -> str:
    """The text of a page with the table of all measured pages.

    Args:
        path: where the page is; links are relative to its folder.
        text: the page, with one block <!-- measured: pages -->.
    """
    folder = Path(os.path.relpath(RESULTS, path.parent)).as_posix()
    rows = [_row(page, f"{folder}/{page.name}") for page in sorted(RESULTS.glob("*.md"))]
    block = markdown_table(TABLES[path], rows, texts=3)
    return with_block(text, path.name, "pages", block)


def _row(page: Path, link: str) -> list[str]:
    """Cells of a page: its title as a link, the machine, and the commit; a dash where the page has no figures."""
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    path = page.with_suffix(".json")
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [f"[{title}]({link})", *made(facts)]


def with_entries(text: str) -> str:
    """The navigation with all measured pages: known ones in their order, then the others by name.

    Args:
        text: mkdocs.yml.
    """
    names = {page.stem for page in RESULTS.glob("*.md")}
    known = [name for name in ENTRY.findall(text) if name in names]
    entries = [f"      - results/{name}.md\n" for name in [*known, *sorted(names - set(known))]]
    return re.sub(rf"(?:{ENTRY.pattern})+", "".join(entries), text, count=1)

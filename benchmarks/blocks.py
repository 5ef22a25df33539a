"""Blocks of Markdown pages that programs write: the lines between <!-- KIND: NAME --> and <!-- end -->."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def with_block(text: str, page: str, name: str, block: str, kind: str = "measured") -> str:
    """The text of a page with new lines in one of its blocks.

    Args:
        text: the page.
        page: its name, for the error.
        name: of the block.
        block: the new lines.
        kind: "measured", from pages in docs/results, or "computed", by a model.

    Raises:
        SystemExit: the page has no such block, or several.
    """
    pattern = rf"(<!-- {kind}: {name} -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}{block}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"error: {page} must have one block <!-- {kind}: {name} -->, found {count}")
    return text


def made(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The machine and the commit of a measured page, from its figures; dashes where it names none."""
    found = re.match(r"(.*?), \d+ threads?,.* commit ([^,]+),", facts.get("where", ""))
    return (found[1], found[2]) if found else ("–", "–")

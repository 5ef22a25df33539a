"""The drawings in parallel.md and attention.md are what the code draws."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["parallel.md", "zh/parallel.md", "attention.md"])
def test_drawn_blocks_are_what_the_code_draws(name):
    spec = importlib.util.spec_from_file_location("draw_parallel", DOCS / "draw_parallel.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    text = (DOCS / name).read_text()
    assert draw.page(text) == text, "run python docs/draw_parallel.py --write"
    drawn = re.findall(r"<!-- drawn: (\S+) -->\n```text\n\S", text)
    assert len(drawn) == 2
    assert set(drawn) <= set(draw.blocks())

"""The worked examples of CONTRIBUTING.md run, and its links lead somewhere; CHANGELOG.md's too."""

import re
from pathlib import Path

import pytest

from lookahead.bench.workloads import SOURCES
from lookahead.drafters import METHODS
from lookahead.targets.cpu import REGISTRY

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(
    r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M
)


def test_every_kind_of_contribution_has_an_example():
    assert [title for title, _ in EXAMPLES] == [
        "A drafter", "A model family on the compiled CPU path", "A workload",
    ]  # fmt: skip


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_worked_examples_run(title, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registries = (METHODS, SOURCES, REGISTRY)
    before = [dict(registry) for registry in registries]
    try:
        exec(compile(code, f"CONTRIBUTING.md, {title}", "exec"), {"__name__": "documentation"})
        assert before != [dict(registry) for registry in registries], "an example registers something"
    finally:
        for registry, known in zip(registries, before, strict=True):
            registry.clear()
            registry.update(known)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#\s]+)\)", (ROOT / name).read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), f"{name} links to {link}"

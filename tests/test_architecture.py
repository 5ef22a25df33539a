"""docs/architecture.md matches the code: import rules, the files that it names, and the stages of one prompt."""

import re
import sys
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

import lookahead

SOURCE = Path(lookahead.__file__).parent
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def section(heading):
    """The text under a heading."""
    return PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def table(heading):
    """The rows of the table under a heading, as lists of cells."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section(heading).splitlines()
        if line[:1] == "|"
    ]
    return rows[2:]


def test_the_layers_are_those_that_the_page_shows():
    """import-linter checks that the code respects the layers (``make lint``)."""
    shown = [set(re.findall(r"`(\w+)`", row[0])) for row in table("Who may import whom")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    assert shown == [set(re.findall(r"lookahead\.(\w+)", layer)) for layer in layers]
    packages = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert packages - {"__init__", "__main__"} == set().union(*shown)


def test_files_and_folders_that_the_page_names_are_there():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.read_text()))
    assert len(named) > 30
    files = [f"{path.as_posix()}{'/' * path.is_dir()}" for path in SOURCE.rglob("*")]
    there = {
        name for name in named if (ROOT / name).exists() or any(file.endswith(f"/{name}") for file in files)
    }
    assert named == there


def hops_of(heading):
    """(file, function) of each main hop in the table under a heading."""
    hops = [(file.strip("`"), function.strip("`")) for _, file, function, _ in table(heading)]
    assert 5 <= len(hops) == len({file for file, _ in hops}) <= 6
    return hops


@contextmanager
def watched_calls():
    """Calls to library functions in this and newly started threads, in order: (file, qualified name)."""
    called = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            called.append((str(Path(frame.f_code.co_filename).relative_to(SOURCE)), frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def not_called_in_order(hops, called):
    """The hops not called after the previous hop."""
    rest = iter(called)
    return [hop for hop in hops if hop not in rest]


def files_of(heading):
    """All files that the text and the table under a heading name."""
    return set(re.findall(r"`([\w/]+\.py)`", section(heading)))


def test_one_prompt_takes_the_way_that_the_page_shows(monkeypatch, capsys):
    heading = "One prompt, from the shell to the forward pass"
    hops = hops_of(heading)
    command = ["lookahead", "generate", "tiny", "--prompt", "def is_prime(n):", "--max-new-tokens", "24"]
    monkeypatch.setattr(sys, "argv", command)
    from lookahead.cli import main

    lookahead.load("tiny")  # imports are slow while calls are recorded
    with watched_calls() as called, pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    capsys.readouterr()
    assert not_called_in_order(hops, called) == []
    assert files_of(heading) - {file for file, _ in called} == set()

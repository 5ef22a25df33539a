"""Run the documentation: execute Python blocks and the notebook, redraw drawings, and follow links."""

import contextlib
import io
import json
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.testing import CliRunner

from benchmarks.page import spelled_out
from lookahead.cli import app
from lookahead.cli.bench import MEASURE
from lookahead.drafters import as_drafter

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted(DOCS.rglob("*.md"))]
LINKS = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def module(name):
    return SimpleNamespace(**runpy.run_path(str(DOCS / f"{name}.py")))


@pytest.fixture(scope="module")
def draw():
    return module("draw")


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def has_own_code(page):
    """Chinese pages repeat the English code byte for byte, see tests/test_docs_zh.py."""
    return python_blocks(page) and not (page.name == "README.zh.md" or page.is_relative_to(DOCS / "zh"))


@pytest.mark.parametrize("page", [p for p in PAGES if has_own_code(p)], ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page run in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for number, block in enumerate(python_blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


def test_the_notebook_runs_and_prints_what_it_shows():
    cells = json.loads((DOCS / "lesson" / "jacobi.ipynb").read_text())["cells"]
    namespace = {"__name__": "notebook"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    for cell in code:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        assert printed.getvalue() == "".join("".join(output["text"]) for output in cell["outputs"]), cell[
            "id"
        ]


def test_drawn_blocks_are_what_the_code_draws(draw):
    for name in draw.BLOCKS:
        text = (DOCS / name).read_text()
        assert draw.page(name, text) == text, "run python docs/draw.py --write"


def test_images_and_moving_pages_are_what_the_code_draws(draw):
    for name, make in draw.IMAGES.items():
        assert (DOCS / name).read_text() == make(), f"{name}: run python docs/draw.py --write"


def command_lines(page):
    """Each lookahead command in a page's shell blocks, as words."""
    for block in re.findall(r"^```(?:sh|bash|console)[^\n]*\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            ours = re.match(r"(?:\$ )?(?:torchrun .*? -m |python -m )?lookahead (.*)", line)
            if ours:
                yield shlex.split(ours[1], comments=True)


@pytest.mark.parametrize("page", [p for p in PAGES if list(command_lines(p))], ids=name_of)
def test_commands_have_the_options_that_pages_give_them(page):
    """Commands are parsed but not run; scripts/test_readme.py runs those of the README."""
    for words in command_lines(page):
        command, rest = typer.main.get_command(app), list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0) if rest and rest[0] in command.commands else MEASURE]
        if command.name != "serve":  # parses its own options
            command.make_context(command.name, rest)


#: Options that shorten commands. Pages that need a server, ranks or llama.cpp have their own tests.
SHORT = {
    "generate": ["--max-new-tokens", "16"],
    "bench": ["--limit", "1", "--max-new-tokens", "8", "--repeats", "1"],
    "step-cost": ["--contexts", "16", "--rows", "1,4"],
    "show": [],
}


def test_drafters_that_pages_name_can_be_read():
    texts = [page.read_text() for page in PAGES]
    named = [words for text in texts for words in re.findall(r"\badaptive:[a-z_]+=[\w+.:=]+", text)]
    assert len(named) >= 6
    for words in named:
        assert as_drafter(words).name == "adaptive"


@pytest.mark.parametrize("name", ["start.md", "trace.md", "benchmarks.md"])
def test_commands_of_pages_run(name, tmp_path, monkeypatch):
    """Commands run in order in one folder, on the tiny model unless the page names one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    Path("prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    commands = list(command_lines(DOCS / name))
    assert commands
    for words in commands:
        kind = words[1] if words[1:2] == ["step-cost"] else words[0]
        words = [*words, *SHORT[kind]]
        if "MODEL" in words:
            words[words.index("MODEL")] = "tiny"
        elif kind != "show":
            words.insert(words.index(kind) + 1, "tiny")
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"lookahead {shlex.join(words)}\n{done.output}"


def anchors_of(page):
    """Anchors of a page's headings, as a site generates them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINKS.findall(page.read_text()):
        if not link.startswith(("http", "mailto:")):
            path, _, anchor = link.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name} links to {link}"
            assert not anchor or there.suffix != ".md" or anchor in anchors_of(there), f"{page.name}: {link}"


def test_the_page_of_benchmarks_lists_every_program_and_every_result():
    text = (DOCS / "benchmarks.md").read_text()
    programs = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
        and path.stem != "vllm_run"  # started by benchmarks.vllm
    }
    assert len(programs) > 15
    for name in programs:
        assert re.search(rf"`(?:python -m benchmarks\.)?{name}\b", text), name
    studies = (ROOT / "benchmarks" / "paper" / "__main__.py").read_text()
    for name in [*re.findall(r'"([\w-]+)"', re.search(r"^STUDIES = (.*)", studies, re.M)[1]), "settings"]:
        assert f"| `{name}` |" in text, name
    for page in (DOCS / "results").glob("*.md"):
        assert f"(results/{page.name})" in text, page.name


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """(docs/site.py, the folder of the pages that it gathers for both sites)."""
    site, folder = module("site"), tmp_path_factory.mktemp("site")
    site.gather(folder / "docs")
    return site, folder


def test_measured_pages_spell_out_their_letters():
    """Tables have letters as headings: without this line, S could be taken for the speed-up."""
    page = "# Title\n\nW is 5 and `G` code.\n\n| T | S |\n\nT: temperature.\n"
    line = "S: tokens per step, the bonus token included; W: columns of the window; T: temperature."
    assert spelled_out(page) == page.replace("# Title\n", f"# Title\n\n{line}\n")
    assert (
        spelled_out("# Title\n\nS is tokens per pass.\n\n| S |\n")
        == "# Title\n\nS is tokens per pass.\n\n| S |\n"
    )


def test_the_site_has_every_page(gathered):
    """``make docs`` lists every page once, and links into the repository become links on the site."""
    _, root = gathered
    out = root / "docs"

    def pages(entries):
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            else:
                (below,) = entry.values()
                yield from [below] if isinstance(below, str) else pages(below)

    for folder, settings in ((out, "mkdocs.yml"), (root / "docs-zh", "mkdocs.zh.yml")):
        listed = list(pages(yaml.safe_load((ROOT / settings).read_text())["nav"]))
        assert len(listed) == len(set(listed))
        made = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
        assert {page for page in made if not page.startswith("files/")} == set(listed)
        for page in sorted(made):
            text = re.sub(r"^(`{3,}).*?^\1", "", (folder / page).read_text(), flags=re.S | re.M)
            assert page.startswith("files/") or not re.search(r"^\[(中文|English)\]\(", text, re.M), page
            for link in LINKS.findall(text):
                if not link.startswith(("http", "mailto:", "#")) and not page.startswith("files/"):
                    assert ((folder / page).parent / link.partition("#")[0]).exists(), f"{page}: {link}"
    commands = (out / "reference/cli.md").read_text()
    assert "## lookahead bench step-cost" in commands
    assert "`--trace FILE`" in commands
    assert "```python no-run" not in (out / "guides/server.md").read_text()

"""Gathers the pages of the site in build/docs and build/docs-zh, from where ``make docs`` builds it.

    python docs/site.py            once
    python docs/site.py --serve    and show the site while pages are written

The site has the pages of docs/, the command line's own help, and the files of the repository that pages link to: a
link out of docs/ becomes a link to a page that is made here. The Chinese pages are a site of their own below the
English one, whose tabs, buttons and search are Chinese. Pages read the same in the repository and on the site, with
two exceptions: the line with the other language becomes a button in the header, and a picture that links to an
animated page becomes that page.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import click
import typer

from lookahead.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: Files of the repository that are pages of the site, by their address there.
PAGES = {"CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md", "dev/LOG.md": "LOG.md"}
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
#: A picture that links to an animated page, alone in its paragraph.
ANIMATED = re.compile(r"^\[!\[([^\[\]]*)\]\([^)\s]+\)\]\(([^)#\s]+\.html)(#[^)\s]*)?\)$", re.M)
#: The line with the page in the other language.
OTHER_LANGUAGE = re.compile(r"^\[(?:中文|English)\]\(([^)\s]+)\.md\)\n\n", re.M)
#: Words that tests read behind the language of a block; a highlighter takes such a line for no fence.
MARKED = re.compile(r"^```(\w+) [\w -]+$", re.M)
#: Where the page of the command line has its commands.
COMMANDS = "<!-- commands -->"
#: What of docs/ the site does not have.
LEFT_OUT = shutil.ignore_patterns("*.py", "records", "__pycache__", "traces", "theme", "zh")


def gather(out: Path) -> None:
    """Write all sources of the two sites to two folders that do not exist yet: ``out`` and ``out``-zh."""
    shutil.copytree(DOCS, out, ignore=LEFT_OUT)
    chinese = out.with_name(f"{out.name}-zh")
    shutil.copytree(DOCS / "zh", chinese)
    shutil.copy(DOCS / "site.css", chinese)
    sources = {here: DOCS / here.relative_to(out) for here in out.rglob("*.md")}
    sources |= {out / there: ROOT / here for here, there in PAGES.items()}
    sources |= {here: DOCS / "zh" / here.relative_to(chinese) for here in chinese.rglob("*.md")}
    for here, source in sources.items():
        here.write_text(on_the_site(source, out), encoding="utf-8")
    page = out / "reference" / "cli.md"
    page.write_text(page.read_text(encoding="utf-8").replace(COMMANDS, command_line()), encoding="utf-8")


def on_the_site(source: Path, out: Path) -> str:
    """A page of the repository as the site has it; pages for files that it links to are written to ``out``."""
    text = MARKED.sub(r"```\1", source.read_text(encoding="utf-8"))
    address = address_of(source, out)
    folder, chinese = posixpath.dirname(address) or ".", address.startswith("zh/")
    other = OTHER_LANGUAGE.search(text)
    if other is not None:
        text = text.replace(other[0], "", 1)
        # The home has no neighbours: its navigation would be an empty column.
        hidden = "hide: [navigation]\n" * (source.name == "index.md")
        text = f"---\nalternate: {other[1]}.html\n{hidden}---\n{text}"
    language = "?lang=zh" if chinese else ""
    frame = rf'<iframe class="animated" src="\2{language}\3" title="\1"></iframe>'
    text = ANIMATED.sub(frame, text)

    def turn(match: re.Match[str]) -> str:
        picture, words, link, mark = match[1], match[2], match[3], match[4] or ""
        path = (source.parent / link).resolve()
        if not path.exists():
            raise SystemExit(f"error: {source.relative_to(ROOT)} links to {link}, which is not there")
        if path.is_dir() or path.suffix == ".gz":
            return f"{words} (`{path.relative_to(ROOT)}`)"
        there = address_of(path, out)
        target = posixpath.relpath(there, folder)
        if there.startswith("zh/") == chinese:
            return f"{picture}[{words}]({target}{mark})"
        # The other site's page: its build would not find this file, so it is no link of Markdown.
        if picture:
            return f'<img src="{target}" alt="{escape(words)}">'
        built = re.sub(r"\.md$", ".html", target)
        return f'<a href="{built}{language if built.endswith("replay.html") else ""}{mark}">{words}</a>'

    return LINK.sub(turn, text)


def address_of(path: Path, out: Path) -> str:
    """Where the site has a file of the repository. A file that it has not got yet becomes a page."""
    inside = path.relative_to(ROOT).as_posix()
    own = PAGES.get(inside, inside.removeprefix("docs/"))
    if (
        inside in PAGES
        or inside.startswith("docs/zh/")
        or (inside.startswith("docs/") and (out / own).exists())
    ):
        return own
    kind = {".py": "python", ".md": "markdown", ".json": "json", ".jsonl": "json"}.get(path.suffix, "text")
    page = out / f"files/{inside}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8")
    page.write_text(
        f"---\nsearch:\n  exclude: true\n---\n# {inside}\n\n````{kind}\n{text}\n````\n", encoding="utf-8"
    )
    return page.relative_to(out).as_posix()


def command_line() -> str:
    """All commands, from their own help."""
    parts: list[str] = []
    for name, command in commands(typer.main.get_command(app), "lookahead"):
        parts += [f"## {name}", (command.help or "").replace("\f", "")]
        tables: dict[str, list[str]] = {}
        with click.Context(command, info_name=name) as context:
            for parameter in command.get_params(context):
                if not getattr(parameter, "hidden", False):
                    panel = getattr(parameter, "rich_help_panel", None)
                    heading = panel or ("Options" if parameter.opts[0].startswith("-") else "Arguments")
                    tables.setdefault(heading, []).append(row_of(parameter))
        parts += ["\n".join([f"| {heading} | |", "|---|---|", *rows]) for heading, rows in tables.items()]
    return "\n\n".join(parts)


def row_of(parameter: Any) -> str:
    """One argument or option: its names and its help, with the default where the help does not say it."""
    help_text, default = getattr(parameter, "help", None) or "", parameter.default
    if not parameter.opts[0].startswith("-"):
        return f"| `{parameter.metavar or parameter.name}` | {cell(help_text)} |"
    names = (
        [*parameter.opts]
        if getattr(parameter, "is_flag", False)
        else [*parameter.opts, parameter.metavar or ""]
    )
    if (
        default not in (None, False)
        and isinstance(default, (str, int, float))
        and "default:" not in help_text
    ):
        help_text += f" [default: {default}]"
    return f"| `{cell(' '.join(names))}` | {cell(help_text)} |"


def commands(group: Any, name: str) -> list[tuple[str, Any]]:
    """Every command with its full name."""
    found = []
    for word, command in group.commands.items():
        found.append((f"{name} {word}", command))
        if hasattr(command, "commands"):
            found += commands(command, f"{name} {word}")
    return found


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def refresh(out: Path) -> int:
    """Bring the sources of both sites up to date; unchanged files are left alone. Returns how many files changed."""
    changes = 0
    with tempfile.TemporaryDirectory() as name:
        new = Path(name) / out.name
        gather(new)
        for made, kept in ((new, out), (new.with_name(f"{new.name}-zh"), out.with_name(f"{out.name}-zh"))):
            wanted = {path.relative_to(made): path for path in made.rglob("*") if path.is_file()}
            stale = [
                path for path in kept.rglob("*") if path.is_file() and path.relative_to(kept) not in wanted
            ]
            changed = [
                inside
                for inside, path in wanted.items()
                if not (kept / inside).is_file() or (kept / inside).read_bytes() != path.read_bytes()
            ]
            for path in stale:
                path.unlink()
            for inside in changed:
                (kept / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(wanted[inside], kept / inside)
            changes += len(stale) + len(changed)
    return changes


def watch(out: Path) -> None:
    """Serve the site and gather its sources again whenever a page changes, until Ctrl-C."""
    server = subprocess.Popen([sys.executable, "-m", "zensical", "serve"], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(2)
            try:
                if refresh(out) or not (ROOT / "build" / "site" / "zh").exists():
                    # The server shows what is in build/site, and builds the English pages only.
                    command = [sys.executable, "-m", "zensical", "build", "-f", "mkdocs.zh.yml"]
                    subprocess.run(command, cwd=ROOT, check=True)
            except (
                SystemExit,
                OSError,
                subprocess.CalledProcessError,
            ) as error:  # a page that is being written
                print(error, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()


if __name__ == "__main__":
    built = ROOT / "build" / "docs"
    refresh(built)
    pages = sum(1 for folder in (built, built.with_name("docs-zh")) for _ in folder.rglob("*.md"))
    print(
        f"{pages} pages in {os.path.relpath(built, ROOT)} and {os.path.relpath(built, ROOT)}-zh", flush=True
    )
    if "--serve" in sys.argv:
        watch(built)

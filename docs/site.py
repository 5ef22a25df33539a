"""Gathers the pages of the site in build/docs, from where ``make docs`` builds it.

    python docs/site.py            once
    python docs/site.py --serve    and show the site while pages are written

The site has the pages of docs/, the command line's own help, and the files of the repository that pages link to: a
link out of docs/ becomes a link to a page that is made here. Pages read the same in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import typer

from lookahead.cli import app

ROOT = Path(__file__).parent.parent
#: Files of the repository that are pages of the site, by their address there.
PAGES = {"CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md", "dev/LOG.md": "LOG.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
#: Words that tests read behind the language of a block; a highlighter takes such a line for no fence.
MARKED = re.compile(r"^```(\w+) [\w -]+$", re.M)
#: Where the page of the command line has its commands.
COMMANDS = "<!-- commands -->"
#: What of docs/ the site does not have.
LEFT_OUT = shutil.ignore_patterns("*.py", "records", "__pycache__", "traces")


def gather(out: Path) -> None:
    """Write all sources of the site to an empty folder."""
    shutil.copytree(ROOT / "docs", out, ignore=LEFT_OUT)
    sources = {
        here.relative_to(out).as_posix(): ROOT / "docs" / here.relative_to(out) for here in out.rglob("*.md")
    }
    sources |= {there: ROOT / here for here, there in PAGES.items()}
    for address, source in sources.items():
        text = MARKED.sub(r"```\1", source.read_text(encoding="utf-8"))

        def turn(match: re.Match[str], address: str = address, source: Path = source) -> str:
            words, link, mark = match[1], match[2], match[3] or ""
            path = (source.parent / link).resolve()
            if not path.exists():
                raise SystemExit(f"error: {source.relative_to(ROOT)} links to {link}, which is not there")
            if path.is_dir() or path.suffix == ".gz":
                return f"{words} (`{path.relative_to(ROOT)}`)"
            return f"[{words}]({posixpath.relpath(address_of(path, out), posixpath.dirname(address) or '.')}{mark})"

        (out / address).write_text(LINK.sub(turn, text), encoding="utf-8")
    page = out / "reference" / "cli.md"
    page.write_text(page.read_text(encoding="utf-8").replace(COMMANDS, command_line()), encoding="utf-8")


def address_of(path: Path, out: Path) -> str:
    """Where the site has a file of the repository. A file that it has not got yet becomes a page."""
    inside = path.relative_to(ROOT).as_posix()
    own = PAGES.get(inside, inside.removeprefix("docs/"))
    if inside in PAGES or (inside.startswith("docs/") and (out / own).exists()):
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
    """Bring the sources of the site up to date; unchanged files are left alone. Returns how many files changed."""
    with tempfile.TemporaryDirectory() as name:
        new = Path(name) / "docs"
        gather(new)
        wanted = {path.relative_to(new): path for path in new.rglob("*") if path.is_file()}
        stale = [path for path in out.rglob("*") if path.is_file() and path.relative_to(out) not in wanted]
        changed = [
            inside
            for inside, path in wanted.items()
            if not (out / inside).is_file() or (out / inside).read_bytes() != path.read_bytes()
        ]
        for path in stale:
            path.unlink()
        for inside in changed:
            (out / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(wanted[inside], out / inside)
    return len(stale) + len(changed)


def watch(out: Path) -> None:
    """Serve the site and gather its sources again whenever a page changes, until Ctrl-C."""
    server = subprocess.Popen([sys.executable, "-m", "zensical", "serve"], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(2)
            try:
                refresh(out)
            except (SystemExit, OSError) as error:  # a page that is being written
                print(error, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()


if __name__ == "__main__":
    built = ROOT / "build" / "docs"
    refresh(built)
    print(f"{sum(1 for _ in built.rglob('*.md'))} pages in {built.relative_to(ROOT)}", flush=True)
    if "--serve" in sys.argv:
        watch(built)

"""``lookahead show``: turns a trace into an HTML page that replays it step by step.

The page is ``trace.html`` with the trace's lines embedded. It needs neither network nor server.
"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..core import SettingsError
from ..trace import Trace, read_trace
from .console import note

PAGE = Path(__file__).with_name("trace.html")
#: The page element that contains the trace.
TRACE_TAG = '<script type="application/jsonl" id="trace">'
#: Size in bytes above which a page takes seconds to open, so its size is printed.
LARGE = 50_000_000


def show(
    file: Annotated[Path, typer.Argument(help="A file written by lookahead generate --trace.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the page here and do not open it. [default: next to FILE, and open it in the browser]",
            metavar="PAGE.html",
        ),
    ] = None,
) -> None:
    """Replay a trace in the browser: the window, the pool, the tree and its mask, step by step."""
    trace = read_trace(file)
    path = output or file.with_suffix(".html")
    if path.exists() and path.samefile(file):
        raise SettingsError(f"--output must differ from the trace, got {path}")
    if path.is_file() and path.stat().st_size and TRACE_TAG not in path.read_text("utf-8", errors="replace"):
        raise SettingsError(f"{path} exists and is not a page of a trace; give another --output")
    if trace.problem:
        note(
            f"note: {file} is not complete ({trace.problem}): the page has its first {trace.steps} steps",
            "yellow",
        )
    text = page_of(trace)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"the page must be a writable file, got {path} ({error.strerror})") from None
    size = f"; {len(text) / 1e6:.0f} MB, so it takes seconds to open" if len(text) > LARGE else ""
    note(f"{trace.steps} steps in {path}{size}")
    if output is None and not webbrowser.open(path.absolute().as_uri()):
        note(f"no browser found here; open {path} in one", "yellow")


def page_of(trace: Trace) -> str:
    """The page that replays a trace."""
    before, tag, after = PAGE.read_text(encoding="utf-8").partition(TRACE_TAG)
    # Only these two sequences would end a script early; both are escaped as JSON allows.
    lines = "\n".join(trace.lines).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return f"{before}{tag}{lines}{after}"

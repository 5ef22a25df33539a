"""The report of a measurement, printed as Markdown, and its figures as JSON. Both name command, machine and commit.

The pages of docs/results are made from the figures by ``pages``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.record import describe, was_busy
from lookahead.core import SettingsError

from .quiet import machine_text, processor
from .report import command_line

#: Letters of measured pages, and what they stand for.
LETTERS = {
    "S": "tokens per step, the bonus token included",
    "W": "columns of the window",
    "N": "tokens of an n-gram",
    "G": "candidates of a step",
    "T": "temperature",
    "V": "size of the vocabulary",
}
#: The longest reason of a failure, in characters.
REASON = 160
#: Code, in blocks and in sentences, and the addresses of links.
NO_PROSE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]+`|(?<=\])\([^)\s]*\)", re.S | re.M)


def spelled_out(page: str) -> str:
    """A Markdown page with a line below its title that spells out its letters.

    A letter whose first use is its own definition ("S: ...", "S is ...") needs no line.
    """
    prose = NO_PROSE.sub("", page)
    found = []
    for letter, words in LETTERS.items():
        first = re.search(rf"(?<![\w.'/-]){letter}(?![\w'.-]|/s)", prose)
        if first is not None and not re.match(r": | is [a-z]", prose[first.end() :]):
            found.append(f"{letter}: {words}")
    title, _, rest = page.partition("\n")
    return f"{title}\n\n{'; '.join(found)}.\n{rest}" if found else page


def reason_of(error: Exception) -> str:
    """An error in one short line, without folders of this machine."""
    text = " ".join(re.sub(r"(?<![\w./])(?:/[^\s'\":,;()/]+)+/", "", str(error)).split())
    line = text if isinstance(error, SettingsError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return line if len(line) <= REASON else f"{line[: REASON - 1].rstrip()}…"


def write_report(
    out: Path,
    title: str,
    record: Mapping[str, Any],
    figures: Any,
    body: Sequence[str],
    loads: Iterable[float | None] | None = None,
    **more: Any,
) -> str:
    """Write ``out``.json, and print the report with the processor and the load averages. Returns the report.

    Args:
        out: path without suffix.
        title: heading of the report.
        record: machine and versions as in ``bench.record.environment``, with ``model`` and ``dtype``.
        figures: the field "figures" of the JSON.
        body: lines of the report below the command and the machine.
        loads: load averages of the measurements; None for that of the record and the one now.
        more: further fields of the JSON.
    """
    parts = Path(sys.argv[0]).with_suffix("").parts
    own = parts[parts.index("benchmarks") :] if "benchmarks" in parts else ("benchmarks", parts[-1])
    program = f"python -m {'.'.join(own)}"
    command = command_line(sys.argv[1:], program)
    where = describe(record)
    loads = [record.get("load"), os.getloadavg()[0]] if loads is None else loads
    sentences = [f"{where}.", machine_text(processor(), loads), was_busy([dict(record)])]
    about = " ".join(filter(None, sentences))
    text = spelled_out("\n".join([f"# {title}", "", f"`{command}`", "", about, "", *body, ""]))
    facts = {"command": command, "where": where, "processor": processor(), "figures": figures, **more}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(text)
    return text

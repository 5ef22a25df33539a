"""The table of ``lookahead verify``: one line for each prompt, the same for local models and for servers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..referee import Finding, Verdict

COLOURS = {
    Verdict.EQUAL: "green",
    Verdict.ALIKE: "green",
    Verdict.ROUNDING: "yellow",
    Verdict.NOT_JUDGED: "magenta",
    Verdict.WRONG: "bold red",
}


def show(findings: Sequence[Finding]) -> None:
    """Print the table, and both texts around each difference."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    sampled = any(finding.p is not None for finding in findings)
    for name in ("prompt", "verdict", "tokens", "differs at", "gap", *(["p"] if sampled else [])):
        table.add_column(name, justify="left" if name in ("prompt", "verdict") else "right", no_wrap=True)
    for finding in findings:
        gap = "" if finding.gap is None else f"{'>= ' if finding.at_least else ''}{finding.gap:.3g}"
        numbers = [finding.new_tokens, finding.first_divergence]
        cells = ["" if number is None else str(number) for number in numbers] + [gap]
        if sampled:
            cells.append("" if finding.p is None else f"{finding.p:.2g}")
        prompt = Text(" ".join(finding.prompt.split())[:32])
        table.add_row(prompt, Text(finding.verdict, COLOURS[finding.verdict]), *cells)
    console = Console(highlight=False)
    console.print(table)
    for finding in findings:
        if finding.why or finding.plain != finding.other:
            console.print(_difference(finding), soft_wrap=True)


def counted(findings: Sequence[Finding]) -> str:
    """The numbers of each verdict, as in "7 equal, 1 rounding"."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _difference(finding: Finding) -> Text:
    """Both texts around a difference, in one line."""
    line = Text.assemble((f"{finding.verdict}: ", COLOURS[finding.verdict]))
    if finding.plain != finding.other:
        line.append(f"…{finding.before[-20:]!r} then plain ")
        line.append(repr(finding.plain_token or finding.plain[:20]), "green")
        line.append(", other ")
        line.append(repr(finding.other_token or finding.other[:20]), COLOURS[finding.verdict])
    if finding.why:
        line.append(f" ({finding.why})")
    return line

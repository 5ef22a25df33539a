"""Pictures drawn from records and from nothing else. PNG and SVG, axes with units, colours that all can tell apart.

Colours are Okabe and Ito's (2008), without the yellow that is faint on white; lines differ in their markers
too, so that a grey copy can be read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import SettingsError
from .record import Record, Records, describe, newest_setup
from .summary import summarise

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lookahead",
}


def colour(index: int) -> dict[str, Any]:
    """Colour and marker of the line number ``index``."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def new_figure(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
    """(figure, axes), drawn without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise SettingsError('plots need matplotlib: pip install "lookahead-decoding[bench]"') from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()


def label(axes: Any, title: str, x: str, y: str = "", legend: bool = True) -> None:
    """Title, axes with their units, and a legend."""
    axes.set(title=title, xlabel=x, ylabel=y)
    if legend:
        axes.legend(fontsize=8)


def powers_of_two(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])


def save(figure: Any, path: Path, caption: str = "") -> list[Path]:
    """Write ``path``.png and ``path``.svg; the caption says where the numbers were measured."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.supxlabel(textwrap.fill(caption, 130), fontsize=6, color="#555555")
        written = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        figure.savefig(written[0])
        figure.savefig(written[1], metadata={"Date": None})
    return written


def tokens_per_second(records: Sequence[Record]) -> Any:
    """A bar per method and workload; the line spans the repeats. Unequal texts are named and hatched."""
    lines = [line for line in summarise(records).lines if line.all.rate == line.all.rate]
    several = len({line.workload for line in lines}) > 1
    names = list(dict.fromkeys(line.label for line in lines))
    labels = []
    figure, axes = new_figure(7.0, 1.2 + 0.3 * len(lines))
    for place, line in enumerate(lines):
        figures, same = line.all, line.all.equal == line.all.compared
        shade = COLOURS[names.index(line.label) % len(COLOURS)]
        axes.barh(place, figures.rate, 0.72, color=shade, edgecolor="white", hatch=None if same else "///")
        axes.plot([figures.rate_low, figures.rate_high], [place, place], color="#888888", linewidth=1.2)
        end = (figures.rate_high, place)
        axes.annotate(f"{figures.rate:.0f}", end, (4, 0), textcoords="offset points", va="center", fontsize=8)
        unequal = "" if same else f", {figures.equal} of {figures.compared} equal"
        labels.append(f"{line.workload}: " * several + line.label + unequal)
    axes.set_yticks(range(len(lines)), labels)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    title = "Speed by method" + ("" if several or not lines else f", {lines[0].workload}")
    label(axes, title, "tokens per second (line: range over repeats)", legend=False)
    return figure


def plot(folder: str | Path, out: str | Path | None = None) -> tuple[list[Path], int]:
    """Draw the speeds that the records of a folder say.

    Args:
        folder: with ``records.jsonl``.
        out: where to; the same folder where None.

    Returns:
        (files written, records left out because they were made under another setup than the newest).

    Raises:
        SettingsError: no records, a line that is not one, or matplotlib is missing.
    """
    same, others = newest_setup(Records(folder).read())
    measured = [record for record in same if "skipped" not in record and record["steps"]]
    if not measured:
        raise SettingsError(
            f"{Records(folder).path} holds no measured record; run `lookahead bench --out {folder}` first"
        )
    figure = tokens_per_second(measured)
    return save(figure, Path(out or folder) / "tokens-per-second", describe(measured[-1])), others

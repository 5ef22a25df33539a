"""Pictures drawn from records and from nothing else. PNG and SVG, axes with units, colours that all can tell apart.

Colours are Okabe and Ito's (2008), without the yellow that is faint on white; lines differ in their markers
too, so that a grey copy can be read.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
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
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
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


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by legend name, in the order of their first appearance."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r["repeat"]):
        state = f" ({record['state']})" if record["state"] else ""
        groups[record["method"] + state].append(record)
    return dict(groups)


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
        hatch = None if same else "///"
        axes.barh(place, figures.rate, color=shade, edgecolor="white", hatch=hatch, height=0.72)
        axes.plot([figures.rate_low, figures.rate_high], [place, place], color="#888888", linewidth=1.2)
        end = (max(figures.rate, figures.rate_high), place)
        offset = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{figures.rate:.0f}", end, **offset)
        unequal = "" if same else f", {figures.equal} of {figures.compared} equal"
        labels.append(f"{line.workload}: " * several + line.label + unequal)
    axes.set_yticks(range(len(lines)), labels)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    title = "Speed by method" + ("" if several or not lines else f", {lines[0].workload}")
    label(axes, title, "tokens per second (line: range over repeats)", legend=False)
    return figure


def step_time(records: Sequence[Record]) -> Any:
    """Median time of a step against its rows: where the line is flat, rows are free on this machine."""
    figure, axes = new_figure()
    widest = 1
    for index, (name, group) in enumerate(by_method(records).items()):
        times: dict[int, list[float]] = defaultdict(list)
        for record in group:
            for rows, milliseconds in zip(record["step_rows"], record["step_ms"], strict=True):
                times[rows].append(milliseconds)
        points = {rows: median(values) for rows, values in sorted(times.items()) if len(values) >= 3}
        if points:
            axes.plot([*points], [*points.values()], label=name, linestyle="", alpha=0.8, **colour(index))
            widest = max(widest, *points)
    axes.set_ylim(bottom=0)
    powers_of_two(axes, [2**power for power in range((widest - 1).bit_length() + 1)])
    title = "Step time against rows: which rows are free here"
    label(axes, title, "rows of the step", "time of the step (ms, median)")
    return figure


def acceptance(records: Sequence[Record]) -> Any:
    """Share of steps that accepted at least 1, 2, 3, ... drafted tokens; None where none did."""
    figure, axes = new_figure()
    drawn = 0
    for name, group in by_method(records).items():
        sizes = [tokens for record in group for tokens in record["step_tokens"]]
        if max(sizes, default=1) > 1:
            depths = range(1, min(max(sizes), 17))
            shares = [sum(size > depth for size in sizes) / len(sizes) * 100 for depth in depths]
            axes.plot(depths, shares, label=name, **colour(drawn))
            drawn += 1
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label(
        axes,
        "Acceptance by position",
        "position in the draft (tokens after the root)",
        "steps that accepted it (%)",
    )
    return figure


FIGURES: Mapping[str, Callable[[Sequence[Record]], Any]] = {
    "tokens-per-second": tokens_per_second,
    "step-time": step_time,
    "acceptance": acceptance,
}


def plot(folder: str | Path, out: str | Path | None = None) -> tuple[list[Path], int]:
    """Draw everything that the records of a folder allow.

    Args:
        folder: with ``records.jsonl``.
        out: where to; the same folder where None.

    Returns:
        (files written, records left out because they were made under another setup than the newest).

    Raises:
        SettingsError: no records, a line that is not one, or matplotlib is missing.
    """
    records = Records(folder)
    same, others = newest_setup(records.read())
    measured = [record for record in same if "skipped" not in record and record["steps"]]
    if not measured:
        raise SettingsError(
            f"{records.path} holds no measured record; run `lookahead bench --out {folder}` first"
        )
    written = []
    for name, draw in FIGURES.items():
        figure = draw(measured)
        if figure is not None:
            written += save(figure, Path(out or folder) / name, describe(measured[-1]))
    return written, others

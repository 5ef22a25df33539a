"""Pictures drawn from records and from nothing else. PNG and SVG, axes with units, colours that all can tell apart.

Colours are Okabe and Ito's (2008), without the yellow that is faint on white; lines differ in their markers
too, so that a grey copy can be read.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..core import SettingsError
from .record import Records, describe, newest_setup
from .summary import Record, summarise

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE = {
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
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


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


def save(figure: Any, path: Path, caption: str = "") -> list[Path]:
    """Write ``path``.png and ``path``.svg; the caption says where the numbers were measured."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        if caption:
            figure.supxlabel(textwrap.fill(caption, 130), fontsize=6, color="#555555")
        written = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        figure.savefig(written[0])
        figure.savefig(written[1], metadata={"Date": None})
    return written


def name_of(record: Record) -> str:
    """A method in a legend."""
    return f"{record['method']} ({record['state']})" if record["state"] else record["method"]


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by legend name, in the order of their first appearance."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r["repeat"]):
        groups[name_of(record)].append(record)
    return dict(groups)


def tokens_per_second(records: Sequence[Record]) -> Any:
    """A bar per method and workload; the line spans the repeats. Unequal texts are said, and hatched."""
    lines = summarise(records).lines
    several = len({line.workload for line in lines}) > 1
    bars = []
    for line in lines:
        states = [(line.cold, " (cold)" if line.warm else ""), (line.warm, " (warm)")]
        for figures, state in states:
            if figures is None or figures.rate != figures.rate:
                continue
            equal = (
                f", {figures.equal} of {figures.compared} equal" if figures.equal < figures.compared else ""
            )
            where = f"{line.workload}: " if several else ""
            bars.append((f"{where}{line.method}{state}{equal}", line.method + state, figures))
    names = list(dict.fromkeys(name for _, name, _ in bars))
    figure, axes = new_figure(7.0, 1.2 + 0.3 * len(bars))
    for place, (_, name, figures) in enumerate(bars):
        hatch = None if figures.equal == figures.compared else "///"
        shade = COLOURS[names.index(name) % len(COLOURS)]
        axes.barh(place, figures.rate, color=shade, edgecolor="white", hatch=hatch, height=0.72)
        axes.plot([figures.rate_low, figures.rate_high], [place, place], color="#888888", linewidth=1.2)
        end = (max(figures.rate, figures.rate_high), place)
        offset = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{figures.rate:.0f}", end, **offset)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    axes.set_xlabel("tokens per second (line: range over repeats)")
    axes.set_title("Speed by method" + ("" if several or not lines else f", {lines[0].workload}"))
    return figure


def compression_by_window(records: Sequence[Record]) -> Any:
    """S against W, a line for each N (and G, where it is not W)."""
    lines: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if not record["method"].startswith("lookahead") or not record["steps"]:
            continue
        settings = record["settings"]
        w, n, g = (settings[name] for name in ("window_size", "ngram_size", "guess_set_size"))
        rest = re.sub(r"^lookahead:[\d,]+:?", "", record["method"])
        name = f"N = {n}, G = {'W' if g == w else g}" + (f", {rest}" if rest else "")
        lines[name + (f" ({record['state']})" if record["state"] == "warm" else "")][w].append(record)
    widths = sorted({w for points in lines.values() for w in points})
    if len(widths) < 2:
        return None
    figure, axes = new_figure()
    for index, (name, points) in enumerate(sorted(lines.items())):
        ratios = [
            sum(r["new_tokens"] - r["prefill_tokens"] for r in points[w]) / sum(r["steps"] for r in points[w])
            for w in sorted(points)
        ]
        axes.plot(sorted(points), ratios, label=name, **colour(index))
    axes.set_ylim(bottom=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(w) for w in widths])
    axes.set_xlabel("window size W (columns)")
    axes.set_ylabel("compression ratio S (tokens per step)")
    axes.set_title("Tokens per step by window and n-gram size")
    axes.legend()
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
        points = sorted((rows, median(values)) for rows, values in times.items() if len(values) >= 3)
        if points:
            axes.plot(
                *zip(*points, strict=True), label=name, linestyle="", markersize=4, alpha=0.8, **colour(index)
            )
            widest = max(widest, points[-1][0])
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(widest.bit_length() + (widest & (widest - 1) > 0))]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("rows of the step")
    axes.set_ylabel("time of the step (ms, median)")
    axes.set_title("Step time against rows: which rows are free here")
    axes.legend(fontsize=8)
    return figure


def tokens_per_step(records: Sequence[Record]) -> Any:
    """Histogram: share of steps by the tokens that they emitted."""
    groups = {
        name: group
        for name, group in by_method(records).items()
        if any(r["rows"] > r["steps"] for r in group)
    }
    if not groups:
        return None
    largest = max(t for group in groups.values() for r in group for t in r["step_tokens"])
    last = min(largest, 12)
    figure, axes = new_figure()
    width = 0.84 / len(groups)
    for index, (name, group) in enumerate(groups.items()):
        sizes = [min(tokens, last) for record in group for tokens in record["step_tokens"]]
        shares = [sizes.count(size) / max(1, len(sizes)) * 100 for size in range(1, last + 1)]
        places = [size - 0.42 + width * (index + 0.5) for size in range(1, last + 1)]
        axes.bar(places, shares, width, label=name, color=COLOURS[index % len(COLOURS)])
    axes.set_xticks(range(1, last + 1), [*map(str, range(1, last)), f"{last}{'+' if largest > last else ''}"])
    axes.grid(False, axis="x")
    axes.set_xlabel("tokens emitted by a step")
    axes.set_ylabel("share of steps (%)")
    axes.set_title("Tokens per step")
    axes.legend(fontsize=8)
    return figure


def acceptance(records: Sequence[Record]) -> Any:
    """Share of steps that accepted at least 1, 2, 3, ... drafted tokens."""
    figure, axes = new_figure()
    drawn = 0
    for name, group in by_method(records).items():
        sizes = [tokens for record in group for tokens in record["step_tokens"]]
        if max(sizes, default=1) > 1:
            depths = range(1, min(max(sizes), 17))
            shares = [sum(size > depth for size in sizes) / len(sizes) * 100 for depth in depths]
            axes.plot(depths, shares, label=name, markersize=4, **colour(drawn))
            drawn += 1
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft (tokens after the root)")
    axes.set_ylabel("steps that accepted it (%)")
    axes.set_title("Acceptance by position")
    axes.legend(fontsize=8)
    return figure


FIGURES: Mapping[str, Callable[[Sequence[Record]], Any]] = {
    "tokens-per-second": tokens_per_second,
    "compression-by-window": compression_by_window,
    "step-time": step_time,
    "tokens-per-step": tokens_per_step,
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
        import matplotlib

        with matplotlib.rc_context(STYLE):
            figure = draw(measured)
        if figure is not None:
            written += save(figure, Path(out or folder) / name, describe(measured[-1]))
    return written, others

"""Plots drawn from records: PNG and SVG, axes with units, colour-blind safe colours.

Colours are those of Okabe and Ito (2008), without yellow, which is faint on white.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.core import SettingsError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
#: Printed where plots are left out.
NO_PLOTS = "no plots, because matplotlib is not installed (pip install matplotlib)"
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 10,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lookahead",
}


def can_draw() -> bool:
    """Whether matplotlib is installed. It is not imported."""
    return find_spec("matplotlib") is not None


def colour(index: int) -> dict[str, Any]:
    """Colour and marker of line number ``index``."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def new_figure(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
    """(figure, axes) of this size in inches; needs no display.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    if not can_draw():
        raise SettingsError("plots need matplotlib, which is not installed: pip install matplotlib")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()


def label(axes: Any, title: str, x: str, y: str = "", legend: bool = True) -> None:
    """Set the title, the axes' labels with units, and a legend."""
    axes.set(title=title, xlabel=x, ylabel=y)
    if legend:
        axes.legend(fontsize=8)


def powers_of_two(axes: Any, values: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])


def save(figure: Any, path: Path, caption: str = "") -> list[Path]:
    """Write ``path``.png and ``path``.svg; the caption states where the numbers were measured."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.supxlabel(textwrap.fill(caption, 130), fontsize=6, color="#555555")
        written = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        figure.savefig(written[0])
        figure.savefig(written[1], metadata={"Date": None})
    return written

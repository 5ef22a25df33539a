"""Charts of the pages as SVG, for light and dark pages: bars in groups, and lines over numbers of rows or clients.

They are drawn without a plotting library, so that the same figures give the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, inf, log2, log10
from textwrap import wrap

#: Wide enough for a page, and narrow enough for the words to be read on a phone.
WIDTH = 460
#: Smallest distance between two labels of an axis.
GAP = 4
#: Colours of lines on light and on dark pages: those of Okabe and Ito (2008) that can be read on both grounds.
LINES = (
    ("#1f5fbf", "#8ab4ff"),
    ("#c25a00", "#f0a35e"),
    ("#00795a", "#4cc9a4"),
    ("#a8487f", "#e39ac4"),
    ("#6a655c", "#a59f93"),
    ("#8a6d00", "#d9bd4a"),
)
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','PingFang SC','Microsoft YaHei',"
    "'Noto Sans CJK SC',sans-serif;fill:#1c1b19}.t{font-weight:600;font-size:14px}.g{font-weight:600}"
    ".s{fill:#6a655c;font-size:11px}.best{fill:#1f5fbf}.ours{fill:#7fa8e0}.other{fill:#b9b3a7}"
    "line{stroke:#d9d4ca}polyline{fill:none;stroke-width:2}"
    + "".join(f".l{n}{{stroke:{light};fill:{light}}}" for n, (light, _) in enumerate(LINES))
    + "@media(prefers-color-scheme:dark){text{fill:#eeebe4}.s{fill:#a59f93}.best{fill:#8ab4ff}"
    ".ours{fill:#4a6ea8}.other{fill:#5c574e}line{stroke:#4a463f}"
    + "".join(f".l{n}{{stroke:{dark};fill:{dark}}}" for n, (_, dark) in enumerate(LINES))
    + "}polyline{fill:none!important}"
)
#: A bar: its name, its length, the words at its end, and its kind (best, ours or other).
Bar = tuple[str, float, str, str]


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" {more}>{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>' + "".join(parts) + "</svg>\n"
    )


def _foot(y: float, words: str, parts: list[str]) -> float:
    """Add small print below a chart; returns the height of the picture."""
    for line in wrap(words, 74, break_on_hyphens=False):
        y += 16
        parts.append(_text(8, y, line, "s"))
    return y + 10


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], foot: str = "") -> str:
    """Horizontal bars, in groups with a heading each; an empty heading takes no line."""
    longest = max(length for _, group in groups for _, length, _, _ in group)
    names = max(_width(name) for _, group in groups for name, _, _, _ in group)
    ends = max(_width(end) for _, group in groups for _, _, end, _ in group)
    left = 20 + names
    wide = WIDTH - left - ends - 18
    parts, y = [_text(8, 20, title, "t")], 30.0
    for heading, group in groups:
        if heading:
            y += 20
            parts.append(_text(8, y - 4, heading, "g"))
        for name, length, end, kind in group:
            parts += [
                _text(left - 8, y + 14, name, more='text-anchor="end"'),
                f'<rect x="{left:g}" y="{y + 2:g}" width="{wide * length / longest:.1f}" height="16" rx="3" '
                f'class="{kind}"/>',
                _text(left + wide * length / longest + 6, y + 14, end),
            ]
            y += 22
    return _svg(_foot(y, foot, parts), parts, title)


def lines(
    title: str, x_label: str, y_label: str, series: Mapping[str, Mapping[int, float]], foot: str = ""
) -> str:
    """Lines over a logarithmic x axis from zero up, with the name of each line below."""
    xs = sorted({x for each in series.values() for x in each})
    top = max(y for each in series.values() for y in each.values())
    step = 10 ** floor(log10(top)) / (1 if top / 10 ** floor(log10(top)) >= 4 else 2)
    ticks = [step * n for n in range(ceil(top / step) + 1)]
    low, high = log2(max(1, xs[0])), log2(xs[-1])
    left, right, above, below = 44, WIDTH - 28, 56, 256

    def at(x: float, y: float) -> tuple[float, float]:
        share = (log2(max(1, x)) - low) / (high - low or 1)
        return left + 8 + (right - left - 16) * share, below - (below - above) * y / ticks[-1]

    parts = [_text(8, 20, title, "t"), _text(8, 42, y_label, "s")]
    for tick in ticks:
        y = at(xs[0], tick)[1]
        parts += [
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
            _text(left - 6, y + 4, f"{tick:g}", "s", 'text-anchor="end"'),
        ]
    free = inf
    for x in reversed(xs):  # of labels that would overlap, the last is drawn
        label, middle = f"{x:,}", at(x, 0)[0]
        if middle + _width(label) / 2 < free:
            parts.append(_text(middle, below + 16, label, "s", 'text-anchor="middle"'))
            free = middle - _width(label) / 2 - GAP
    parts.append(_text(right, below + 32, x_label, "s", 'text-anchor="end"'))
    for number, each in enumerate(series.values()):
        points = [at(x, y) for x, y in sorted(each.items())]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="l{number}" points="{joined}"/>')
        parts += [f'<circle class="l{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
    y = below + 36.0
    for number, name in enumerate(series):
        y += 18
        parts += [
            f'<circle class="l{number}" cx="{left + 4}" cy="{y - 4:g}" r="4.5"/>',
            _text(left + 16, y, name),
        ]
    return _svg(_foot(y, foot, parts), parts, title)


def _width(text: str) -> float:
    """Roughly how wide words are, in pixels."""
    return sum(12.5 if ord(letter) > 0x2E80 else 7.0 for letter in text)

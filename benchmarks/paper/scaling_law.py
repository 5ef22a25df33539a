"""The paper's scaling law (arXiv 2402.02057, section 4): equations 4, 5 and 7, and their fit to measurements.

Letters: alpha is the probability that a drafted token is accepted, gamma the number of drafted tokens of one
speculation (N - 1 here), b the number of speculations verified in one step (G = W here), f the number of steps per
good speculation, and S the number of tokens per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

from lookahead.bench.record import Record, was_busy
from lookahead.bench.report import figures, number, plain_of
from lookahead.core import SettingsError
from lookahead.drafters import Lookahead

from ..report import markdown_table
from .committed import Head
from .intervals import differ, drawn_ratios, interval
from .study import (
    WINDOW_ONLY,
    Page,
    Study,
    in_words,
    loop_free_records,
    loop_free_texts,
    model_and_machine,
    ratios,
)

#: Values of W = G.
WINDOWS = (2, 4, 8, 16, 32)
#: Values of N.
NGRAMS = (3, 5, 7)
#: G while W varies alone.
HELD = 16
#: N of the paper's settings (table 4).
PAPER_N = 5


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 4: expected number of tokens from one speculation, including the bonus token.

    E = (1 - alpha^(gamma + 1)) / (1 - alpha), the sum of alpha^i for i = 0..gamma.
    """
    return sum(alpha**i for i in range(gamma + 1))


def expected_tokens_batched(alpha: float, gamma: int, b: float) -> float:
    """Equation 5: the same for the best of b independent speculations.

    E = (gamma + 1) - sum_{i=1..gamma} (1 - alpha^i)^b, where (1 - alpha^i)^b is the probability that none of the b
    speculations is correct up to depth i. With b = 1 this is equation 4.
    """
    return float(gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1)))


def compression_ratio(alpha: float, f: float, gamma: int, b: float) -> float:
    """Equation 7: S = (f - 1 + E) / f, if on average one step in f has a good speculation."""
    return (f - 1 + expected_tokens_batched(alpha, gamma, b)) / f


@dataclass(frozen=True, slots=True)
class Fit:
    """alpha and f fitted by least squares, and R2, the share of the variance that the fit explains."""

    alpha: float
    f: float
    r2: float


def fit(points: Sequence[tuple[int, int, float]], start: tuple[float, float] | None = None) -> Fit:
    """Fit alpha and f to measured (W = G, N, S) by least squares.

    Args:
        points: (W = G, N, S) of each measurement.
        start: initial (alpha, f); None to try several.

    Raises:
        SettingsError: fewer than three points, or scipy is not installed.
    """
    if len(points) < 3:
        raise SettingsError(f"at least 3 points are needed to fit alpha and f, got {len(points)}")
    try:
        from scipy.optimize import least_squares  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("the fit needs scipy, which is not installed: pip install scipy") from None

    def residuals(x: Sequence[float]) -> list[float]:
        return [compression_ratio(x[0], x[1], n - 1, w) - s for w, n, s in points]

    # The loss has flat regions, so take the best of several starts.
    starts = [start] if start else [(alpha, f) for alpha in (0.1, 0.3, 0.6) for f in (1.5, 3.0, 8.0)]
    best = min(
        (least_squares(residuals, start, bounds=([1e-6, 1.0], [1 - 1e-6, 1e4])) for start in starts),
        key=lambda result: result.cost,
    )
    values = [s for *_, s in points]
    mean = sum(values) / len(values)
    total = sum((s - mean) ** 2 for s in values)
    return Fit(float(best.x[0]), float(best.x[1]), 1 - 2 * float(best.cost) / total if total else 1.0)


#: Number of bootstrap draws to which alpha and f are fitted.
FITS = 200
#: The paper's fit on MT-Bench with LLaMA-2-Chat 7B.
PAPER = Fit(0.425, 3.106, nan)
#: Speeds that the authors state for the same model and data set; no values were read off the curves of figure 8.
PAPER_SPEEDS = (
    "No values were read off the paper's figure 8. For LLaMA-2-Chat 7B on MT-Bench, its authors report a speed-up "
    "of 1.8 on an A100 with (15, 5, 15) (figure 6), and of about 1.4 on an RTX 3090 with W = 7 or 10 and N = 5 "
    "([issue 10 of their code](https://github.com/hao-ai-lab/LookaheadDecoding/issues/10))."
)
#: (model size, (W, N, G) from section 5, extra operations of a step in the paper, in units of a one-row step).
EXTRA = (("7B", (15, 5, 15), 120), ("13B", (10, 5, 10), 80), ("34B", (7, 5, 7), 56))


def _method(w: int, n: int, g: int) -> str:
    return f"lookahead:{w},{n},{g}:{WINDOW_ONLY}"


def methods() -> dict[tuple[int, int], str]:
    """Name of the method by (W = G, N)."""
    return {(w, n): _method(w, n, w) for n in NGRAMS for w in WINDOWS}


def by_window_alone() -> dict[int, str]:
    """Name of the method by W, with G = ``HELD`` and the paper's N."""
    return {size: _method(size, PAPER_N, HELD) for size in WINDOWS}


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure S for every W = G and N, and for W alone, on the first turns of MT-Bench."""
    prompts = study.first_turns(20, ["mt-bench"])
    names = dict.fromkeys([*methods().values(), *by_window_alone().values()])
    return study.run(list(names), prompts, replace(study.options, warm=False)), {}


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    # Fit the law to all completions, and to those without loops.
    free, texts = loop_free_texts(records)
    rows = {
        size: figures([r for r in records if r["method"] == name and "skipped" not in r], {}).rows
        for size, name in methods().items()
    }
    body: list[str] = []
    fits: dict[bool, tuple[list[tuple[int, int, float]], Fit, dict[tuple[int, int], Any]]] = {}
    for loop_free, what in ((False, f"All {texts} texts"), (True, f"The {free} loop-free texts of {texts}")):
        measured = ratios(records, loop_free)
        points = [(w, n, measured[name]) for (w, n), name in methods().items() if measured.get(name, nan) > 0]
        if len(points) < 3:
            body += [f"{what}: too few to fit.", ""]
            continue
        if loop_free and free == texts and False in fits:
            body += ["All texts are loop-free.", ""]
            continue
        kept = loop_free_records(records) if loop_free else records
        draws = drawn_ratios(kept, list(methods().values()))
        drawn = {size: draws[:, i] for i, size in enumerate(methods())}
        fits[loop_free] = points, fit(points), drawn
        by_size = {size: measured.get(name, nan) for size, name in methods().items()}
        body += _table(what, by_size, fits[loop_free][1], drawn)
    if not fits:
        raise SettingsError(
            "no prompt gave a text with steps to measure; use more prompts or another workload"
        )

    # The tables that follow use the fit to all completions.
    points, found, drawn = next(iter(fits.values()))
    body += _doublings(found, {(w, n): s for w, n, s in points}, drawn)
    body += _window_alone(records)
    body += [
        f"One speculation at a time (equation 4) with this alpha is bounded by 1 / (1 - alpha) = "
        f"{1 / (1 - found.alpha):.2f} tokens per step, whatever its length.",
        "",
        "The settings of the paper's table 4:",
        "",
        "| the paper's model | (W, N, G) | (W + G)(N - 1), extra operations (paper) | rows of our largest step |",
        "| --- | --- | ---: | ---: |",
        *(
            f"| {size} | {triple} | {extra} | {Lookahead(*triple).max_step_rows} |"
            for size, triple, extra in EXTRA
        ),
        "",
        *_by_window(records, rows, drawn),
    ]

    # What differs from the paper, and the figure.
    differs = [
        model_and_machine(head, records),
        *differences({(w, n): s for w, n, s in points}, found, drawn),
        "The paper measures MT-Bench with LLaMA-2-Chat 7B; here only the first turns are decoded. Small models often "
        f"repeat themselves, which favours n-grams; {loops_text(free, texts, True in fits)}.",
        "The n-grams come from the window alone, as in the paper's algorithm; neither prompt nor output fill the "
        "pool.",
        "The operations of a step are counted in rows: each costs two per parameter; attention adds little here.",
    ]
    title = "Scaling law (section 4, figures 4 and 8, table 4)"
    return Page(title, body, differs)


def loops_text(free: int, texts: int, fitted: bool) -> str:
    """What the page does about loops.

    Args:
        free: number of loop-free texts.
        texts: number of all texts.
        fitted: whether the loop-free texts have a fit of their own.
    """
    if free == texts:
        return "no text here has a loop"
    return "so the loop-free texts are fitted too" if fitted else "too few texts here are loop-free"


def _doublings(
    found: Fit, measured: Mapping[tuple[int, int], float], drawn: Mapping[tuple[int, int], Any]
) -> list[str]:
    """The gain in S when W = G doubles, measured and by equation 7: where does the law bend?"""
    steps = list(itertools.pairwise(WINDOWS))
    lines = [
        "Where the law bends: what S gains when W = G doubles.",
        "",
        "| N | " + " | ".join(f"{a} to {b}" for a, b in steps) + " |",
        "| --- |" + " ---: |" * len(steps),
    ]
    for n in NGRAMS:
        cells = []
        for a, b in steps:
            low, high = interval(drawn[b, n] - drawn[a, n])
            laws = [
                compression_ratio(law.alpha, law.f, n - 1, b) - compression_ratio(law.alpha, law.f, n - 1, a)
                for law in (found, PAPER)
            ]
            gain = measured.get((b, n), nan) - measured.get((a, n), nan)
            cells.append(f"{gain:+.2f} [{low:+.2f} to {high:+.2f}] ({laws[0]:+.2f}; {laws[1]:+.2f})")
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "In square brackets the 95 % interval, in round ones equation 7 as fitted here and with the paper's values.",
        "",
    ]


def _window_alone(records: Sequence[Record]) -> list[str]:
    """S by W alone. Empty if the records have only W = G."""
    measured = ratios(records)
    names = by_window_alone()
    if not set(names.values()) <= measured.keys():
        return []
    draws = drawn_ratios(records, list(names.values()))
    cells = [
        f"{measured[name]:.2f} [{'–'.join(f'{end:.2f}' for end in interval(draws[:, i]))}]"
        for i, name in enumerate(names.values())
    ]
    heads = ["", *map(str, names)]
    table = markdown_table(heads, [[f"S by W, G = {HELD}", *cells]])
    return [f"W alone, N = {PAPER_N}:", "", table, ""]


def _by_window(
    records: Sequence[Record],
    rows: Mapping[tuple[int, int], float],
    drawn: Mapping[tuple[int, int], Any],
) -> list[str]:
    """Gain and cost of a larger window at the paper's N. A busy machine's speed-ups are left out."""
    measured = [r for r in records if "skipped" not in r]
    plain = plain_of(measured)
    timed = not was_busy(records)
    lines = [
        f"The gain and the cost of W at N = {PAPER_N} (figure 8):",
        "",
        "| W = G | S | S by equation 7 with the paper's alpha and f | (W + G)(N - 1) | rows of a step, mean "
        "| speed-up over plain decoding |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (w, n), name in methods().items():
        if n == PAPER_N:
            x = figures([r for r in measured if r["method"] == name], plain)
            ends = "–".join(f"{end:.2f}" for end in interval(drawn[w, n]))
            law = compression_ratio(PAPER.alpha, PAPER.f, n - 1, w)
            speed = number(x.total) if timed else "–"
            lines.append(
                f"| {w} | {number(x.s_steps)} [{ends}] | {law:.2f} | {2 * w * (n - 1)} | {rows[w, n]:.1f} | {speed} |"
            )
    return [*lines, "", PAPER_SPEEDS]


def _table(
    what: str,
    measured: Mapping[tuple[int, int], float],
    found: Fit,
    drawn: Mapping[tuple[int, int], Any],
) -> list[str]:
    fitted = [
        fit([(*size, values[draw]) for size, values in drawn.items()], (found.alpha, found.f))
        for draw in range(min(FITS, min(map(len, drawn.values()))))
        if all(values[draw] > 0 for values in drawn.values())
    ]
    alpha, f = (interval([getattr(one, name) for one in fitted]) for name in ("alpha", "f"))
    lines = [
        f"**{what}**: alpha = {found.alpha:.3f} (95 % of draws of prompts: {alpha[0]:.3f} to {alpha[1]:.3f}), "
        f"f = {found.f:.2f} ({f[0]:.2f} to {f[1]:.2f}), R2 = {found.r2:.3f} "
        f"(the paper: alpha = {PAPER.alpha}, f = {PAPER.f})",
        "",
        "| N | " + " | ".join(f"W = G = {w}" for w in WINDOWS) + " |",
        "| --- |" + " ---: |" * len(WINDOWS),
    ]
    for n in NGRAMS:
        cells = [
            f"{measured.get((w, n), nan):.2f} [{'–'.join(f'{end:.2f}' for end in interval(drawn[w, n]))}] "
            f"({compression_ratio(found.alpha, found.f, n - 1, w):.2f}; "
            f"{compression_ratio(PAPER.alpha, PAPER.f, n - 1, w):.2f})"
            for w in WINDOWS
        ]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "Measured S, its 95 % interval over draws of prompts, and in brackets equation 7 as fitted here and with the "
        "paper's alpha and f.",
        "",
    ]


def differences(
    measured: Mapping[tuple[int, int], float], found: Fit, drawn: Mapping[tuple[int, int], Any]
) -> list[str]:
    """Sentences on how the measurements differ from the paper's equation 7.

    Args:
        measured: S by (W = G, N).
        found: the fit of equation 7 to them.
        drawn: S by (W = G, N) in each draw of prompts.
    """

    def beyond(a: tuple[int, int], b: tuple[int, int]) -> str:
        return "" if differ(drawn[a], drawn[b]) else " (within the interval of the difference)"

    sentences = [
        f"alpha is {found.alpha:.3f} against the paper's {PAPER.alpha}, f is {found.f:.2f} against {PAPER.f}; "
        f"the fit explains {100 * found.r2:.0f} % of the variance."
    ]
    ngrams = sorted({n for _, n in measured})
    reversed_pairs = [
        f"at W = {w}, N = {large} gives {measured[w, large]:.2f} and N = {small} gives {measured[w, small]:.2f}"
        f"{beyond((w, large), (w, small))}"
        for w in sorted({w for w, _ in measured})
        for small, large in itertools.pairwise(ngrams)
        if (w, small) in measured and (w, large) in measured and measured[w, large] < measured[w, small]
    ]
    if reversed_pairs:
        sentences.append(
            f"By equation 7 a longer n-gram never lowers S. Here it does: {'; '.join(reversed_pairs)}."
        )
    else:
        sentences.append("As by equation 7, a longer n-gram never lowers S.")
    falling = [
        f"at N = {n} from W = {a} to {b}{beyond((a, n), (b, n))}"
        for n in ngrams
        for a, b in itertools.pairwise(sorted(w for w, size in measured if size == n))
        if measured[b, n] < measured[a, n]
    ]
    sentences.append(
        f"A larger window lowers S {in_words(falling)}, which equation 7 excludes."
        if falling
        else "As by equation 7, a larger window never lowers S."
    )
    largest = max(measured)
    paper = compression_ratio(PAPER.alpha, PAPER.f, largest[1] - 1, largest[0])
    sentences.append(
        f"At the largest point, W = G = {largest[0]} and N = {largest[1]}, S is {measured[largest]:.2f}; equation 7 "
        f"with the paper's alpha and f gives {paper:.2f}."
    )
    return sentences

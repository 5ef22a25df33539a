"""The paper's scaling law (arXiv 2402.02057, section 4): equations 4, 5 and 7, and their fit to measurements.

Letters: alpha, chance that a drafted token is accepted; gamma, drafted tokens of one speculation (N - 1 here);
b, speculations verified at a time (G = W here); f, steps per good speculation; S, tokens per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

from lookahead.bench.plots import COLOURS, colour, label, new_figure, powers_of_two
from lookahead.bench.record import Record, was_busy
from lookahead.bench.report import figures, number, plain_of
from lookahead.core import SettingsError
from lookahead.drafters import Lookahead

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

WINDOWS, NGRAMS = (2, 4, 8, 16, 32), (3, 5, 7)
#: What W or G is while the other varies.
HELD = 16
#: N of the paper's settings (table 4).
PAPER_N = 5


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 4: tokens that one speculation yields on average, bonus token included.

    E = (1 - alpha^(gamma + 1)) / (1 - alpha), the sum of alpha^i for i = 0..gamma.
    """
    return sum(alpha**i for i in range(gamma + 1))


def expected_tokens_batched(alpha: float, gamma: int, b: float) -> float:
    """Equation 5: the same for the best of b independent speculations.

    E = (gamma + 1) - sum_{i=1..gamma} (1 - alpha^i)^b: all of b miss depth i with chance (1 - alpha^i)^b.
    For b = 1 it is equation 4.
    """
    return float(gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1)))


def compression_ratio(alpha: float, f: float, gamma: int, b: float) -> float:
    """Equation 7: S = (f - 1 + E) / f, where on average one step of f has a good speculation."""
    return (f - 1 + expected_tokens_batched(alpha, gamma, b)) / f


@dataclass(frozen=True, slots=True)
class Fit:
    """alpha and f by least squares, and the share of the variance that they explain."""

    alpha: float
    f: float
    r2: float


def fit(points: Sequence[tuple[int, int, float]], start: tuple[float, float] | None = None) -> Fit:
    """Fit alpha and f to measured (W = G, N, S) by least squares.

    Args:
        start: where the search begins; several places if None.

    Raises:
        SettingsError: fewer than three points, or scipy is missing.
    """
    if len(points) < 3:
        raise SettingsError(f"at least 3 points are needed to fit alpha and f, got {len(points)}")
    try:
        from scipy.optimize import least_squares  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("the fit needs scipy, which is not installed: pip install scipy") from None

    def residuals(x: Sequence[float]) -> list[float]:
        return [compression_ratio(x[0], x[1], n - 1, w) - s for w, n, s in points]

    # The surface has flat parts: the best of several starts counts.
    starts = [start] if start else [(alpha, f) for alpha in (0.1, 0.3, 0.6) for f in (1.5, 3.0, 8.0)]
    best = min(
        (least_squares(residuals, start, bounds=([1e-6, 1.0], [1 - 1e-6, 1e4])) for start in starts),
        key=lambda result: result.cost,
    )
    values = [s for *_, s in points]
    mean = sum(values) / len(values)
    total = sum((s - mean) ** 2 for s in values)
    return Fit(float(best.x[0]), float(best.x[1]), 1 - 2 * float(best.cost) / total if total else 1.0)


#: Draws of prompts that alpha and f are fitted to.
FITS = 200
#: What the paper fits on MT-Bench with LLaMA-2-Chat 7B.
PAPER = Fit(0.425, 3.106, nan)
#: Printed speeds of the same model and data set; no values were read off the curves of figure 8.
PAPER_SPEEDS = (
    "No values were read off the paper's figure 8. For LLaMA-2-Chat 7B on MT-Bench, its authors report a speed-up "
    "of 1.8 on an A100 with (15, 5, 15) (figure 6), and of about 1.4 on an RTX 3090 with W = 7 or 10 and N = 5 "
    "([issue 10 of their code](https://github.com/hao-ai-lab/LookaheadDecoding/issues/10))."
)
#: (W, N, G) by model size (section 5) and the extra operations of a step that the paper names, in one-row steps.
EXTRA = (("7B", (15, 5, 15), 120), ("13B", (10, 5, 10), 80), ("34B", (7, 5, 7), 56))


def _method(w: int, n: int, g: int) -> str:
    return f"lookahead:{w},{n},{g}:{WINDOW_ONLY}"


def methods() -> dict[tuple[int, int], str]:
    """(W = G, N) -> method."""
    return {(w, n): _method(w, n, w) for n in NGRAMS for w in WINDOWS}


def apart() -> dict[str, dict[int, str]]:
    """The letter that varies, W or G -> its size -> method, at the paper's N; the other is ``HELD``."""
    return {
        "W": {size: _method(size, PAPER_N, HELD) for size in WINDOWS},
        "G": {size: _method(HELD, PAPER_N, size) for size in WINDOWS},
    }


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """S of every W = G and N, and of W and G apart, on the first turns of MT-Bench."""
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in study.prompts(20, ["mt-bench"])]
    names = dict.fromkeys(
        [*methods().values(), *(name for sizes in apart().values() for name in sizes.values())]
    )
    return study.run(list(names), prompts, replace(study.options, warm=False)), {}


def page(head: Head, records: Sequence[Record]) -> Page:
    """The page of these records."""
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
    points, found, drawn = next(iter(fits.values()))
    body += _doublings(found, {(w, n): s for w, n, s in points}, drawn)
    body += _apart(records)
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
    differs = [
        model_and_machine(head, records),
        *differences({(w, n): s for w, n, s in points}, found, drawn),
        "The paper measures MT-Bench with LLaMA-2-Chat 7B; here only the first turns are decoded. A small model "
        "repeats itself more, which favours n-grams; so the loop-free texts are fitted too.",
        "The n-grams come from the window alone, as in the paper's algorithm; neither prompt nor output fill the "
        "pool.",
        "The operations of a step are counted in rows: each costs two per parameter; attention adds little here.",
    ]
    title = "Scaling law (section 4, figures 4 and 8, table 4)"
    alt = (
        f"Left, S by W = G for N = 3, 5 and 7, with equation 7 as fitted (alpha = {found.alpha:.3f}, "
        f"f = {found.f:.2f}) and with the paper's alpha and f; right, S by the rows of a step, up to "
        f"{max(s for *_, s in points):.2f}"
    )
    return Page(title, body, differs, lambda: _figure(points, found, rows), alt=alt)


def _doublings(
    found: Fit, measured: Mapping[tuple[int, int], float], drawn: Mapping[tuple[int, int], Any]
) -> list[str]:
    """Where the law bends: what S gains when W = G doubles, beside what equation 7 says that it gains."""
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


def _apart(records: Sequence[Record]) -> list[str]:
    """S by W alone and by G alone; nothing if the records have only W = G."""
    measured = ratios(records)
    sizes = apart()
    if any(name not in measured for column in sizes.values() for name in column.values()):
        return []
    lines = [
        f"W and G apart, N = {PAPER_N}:",
        "",
        "| | " + " | ".join(str(size) for size in WINDOWS) + " |",
        "| --- |" + " ---: |" * len(WINDOWS),
    ]
    for letter, other in (("W", "G"), ("G", "W")):
        names = list(sizes[letter].values())
        draws = drawn_ratios(records, names)
        cells = [
            f"{measured[name]:.2f} [{'–'.join(f'{end:.2f}' for end in interval(draws[:, i]))}]"
            for i, name in enumerate(names)
        ]
        lines.append(f"| S by {letter}, {other} = {HELD} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _by_window(
    records: Sequence[Record],
    rows: Mapping[tuple[int, int], float],
    drawn: Mapping[tuple[int, int], Any],
) -> list[str]:
    """What a larger window brings and costs at the paper's N; no speeds where other work ran."""
    measured = [r for r in records if "skipped" not in r]
    plain, timed = plain_of(measured), not was_busy(records)
    lines = [
        f"What W brings and costs at N = {PAPER_N} (figure 8):",
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
    """Sentences on where the measurement departs from the paper's equation 7.

    Args:
        measured: S by (W = G, N).
        found: equation 7 as fitted to it.
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


def _figure(
    points: Sequence[tuple[int, int, float]], found: Fit, rows: Mapping[tuple[int, int], float]
) -> Any:
    """Left S by the window, right S by the operations of a step."""
    figure, left = new_figure(12.0, 4.4)
    left.remove()
    left, right = figure.subplots(1, 2, sharey=True)
    for index, n in enumerate(NGRAMS):
        seen = [(w, s) for w, size, s in points if size == n]
        left.plot(*zip(*seen, strict=True), linestyle="", label=f"N = {n}, measured", **colour(index))
        fine = [2 ** (step / 8) for step in range(8, 41)]
        for fit, line, whose in ((found, "--", "fitted"), (PAPER, ":", "the paper's")):
            drawn = [compression_ratio(fit.alpha, fit.f, n - 1, w) for w in fine]
            left.plot(fine, drawn, color=COLOURS[index], linestyle=line, label=f"N = {n}, {whose} equation 7")
        cost = sorted((rows[w, n], s) for w, s in seen)
        right.plot(*zip(*cost, strict=True), label=f"N = {n}, measured", **colour(index))
    lengths = range(1, 128)
    bound = [expected_tokens(found.alpha, gamma) for gamma in lengths]
    right.plot(
        [gamma + 1 for gamma in lengths],
        bound,
        color="black",
        linestyle="-.",
        label="one speculation, equation 4",
    )
    powers_of_two(left, WINDOWS)
    powers_of_two(right, [2, 4, 8, 16, 32, 64, 128, 256])
    heading = f"Scaling law: alpha = {found.alpha:.3f}, f = {found.f:.2f}, R2 = {found.r2:.3f}"
    label(left, heading, "window size W = candidates G", "compression ratio S (tokens per step)")
    label(right, "S by operations", "operations of a step, in steps of one row")
    return figure

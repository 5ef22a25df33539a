"""Table 3 of the paper: the contributions of the window, the candidates and the prompt as reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

from lookahead.bench.methods import PLAIN
from lookahead.bench.record import Record
from lookahead.bench.report import Figures, figures, number, plain_of

from .committed import Head
from .intervals import differ, drawn_ratios, interval
from .study import (
    WINDOW_ONLY,
    Page,
    Study,
    in_words,
    loop_free_texts,
    model_and_machine,
    only_first_turns,
    pool_figures,
    ratios,
)

#: Table 3, rows 1 to 9: (name in the paper's order N, W, G; prompt as reference; our method; the paper's S).
TABLE_3 = (
    ("autoregressive", "–", PLAIN, 1.00),
    ("prompt lookup", "yes", "prompt-lookup", 1.55),
    ("(10, 1, 3)", "yes", "lookahead:1,10,3", 1.45),
    ("(5, 1, 10)", "yes", "lookahead:1,5,10", 1.51),
    ("(5, 1, 30)", "no", f"lookahead:1,5,30:{WINDOW_ONLY}", 1.12),
    ("(5, 1, 30)", "yes", "lookahead:1,5,30", 1.59),
    ("(5, 30, 1)", "no", f"lookahead:30,5,1:{WINDOW_ONLY}", 1.79),
    ("(5, 15, 15)", "no", f"lookahead:15,5,15:{WINDOW_ONLY}", 1.96),
    ("(5, 15, 15)", "yes", "lookahead:15,5,15", 2.05),
)
#: A row is reported as higher or lower than the paper's if S differs by more than this share.
NOTABLE = 0.03


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure every row of table 3 on the first turns of MT-Bench's conversations."""
    methods = [method for _, _, method, _ in TABLE_3]
    prompts = study.first_turns(10, ["mt-bench"])
    return study.run(methods, prompts, replace(study.options, warm=False)), {}


def moved(ours: Sequence[float], paper: Sequence[float]) -> list[tuple[int, list[int]]]:
    """Rows (from 1) that are above other rows in the paper but below them here, with these other rows."""
    rows = range(len(paper))
    pairs = [(a, [b + 1 for b in rows if paper[a] > paper[b] and ours[a] < ours[b]]) for a in rows]
    return [(a + 1, below) for a, below in pairs if below]


def order(values: Sequence[float]) -> str:
    """Row numbers by descending S."""
    return " > ".join(str(row + 1) for row in sorted(range(len(values)), key=lambda row: -values[row]))


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    measured = [r for r in records if "skipped" not in r]
    plain = plain_of(measured)
    without_loop = ratios(records, loop_free=True)
    free, texts = loop_free_texts(records)
    drawn = drawn_ratios(measured, [method for _, _, method, _ in TABLE_3])
    lines: list[Figures] = []
    body = [
        "| row | (N, W, G) | prompt as reference | S | 95 % interval | the paper's S | speed-up | rows/step "
        f"| pool hit rate | mean match length | S of the {free} loop-free texts of {texts} | equal |",
        "| ---: | --- | --- |" + " ---: |" * 9,
    ]
    for row, (name, prompt, method, paper) in enumerate(TABLE_3, 1):
        mine = [r for r in measured if r["method"] == method]
        x = figures(mine, plain)
        hits, length = pool_figures(mine)
        lines.append(x)
        low, high = interval(drawn[:, row - 1])
        body.append(
            f"| {row} | {name} | {prompt} | {number(x.s_steps)} | {number(low)}–{number(high)} | {paper:.2f} "
            f"| {number(x.total)} | {number(x.rows, 1)} | {number(hits)} | {number(length)} "
            f"| {number(without_loop.get(method, nan))} | {x.equal}/{x.compared} |"
        )
    ours = [x.s_steps for x in lines]
    theirs = [row[3] for row in TABLE_3]
    free_ratios = [without_loop.get(row[2], nan) for row in TABLE_3]
    body += [
        "",
        f"Rows by S, the paper: {order(theirs)}; here: {order(ours)}. {_order_sentence(ours, theirs)}",
        "",
        _alike(drawn),
    ]
    differs = [
        model_and_machine(head, records),
        *differences(ours, theirs, free_ratios, free),
        *only_first_turns(records),
        "The paper's table is for LLaMA-2-Chat 7B on an A100, where rows are almost free: its speed-ups lie between "
        "1.04 (row 5) and 1.88 (row 9). `lookahead bench step-cost` shows what rows cost on a machine. S does not "
        "depend on the machine, the speed-up does.",
        "Our steps keep the bonus token of a fully accepted candidate, which the authors' code drops.",
        '"Prompt as reference" fills the pool from the prompt and from the text as it is generated.',
    ]
    ", ".join(f"{number(x)} ({paper:.2f})" for x, paper in zip(ours, theirs, strict=True))
    return Page("Ablation (table 3)", body, differs)


def _alike(drawn: Any) -> str:
    """A sentence on the rows whose difference in S is within its interval."""
    rows = range(len(TABLE_3))
    pairs = [
        f"{a + 1} and {b + 1}" for a in rows for b in rows if a < b and not differ(drawn[:, a], drawn[:, b])
    ]
    begin = "Intervals are over draws of prompts with replacement. "
    if not pairs:
        return f"{begin}Every difference between two rows is larger than its 95 % interval."
    return f"{begin}Differences within their 95 % intervals: rows {'; '.join(pairs)}. All others are larger."


def _order_sentence(ours: Sequence[float], theirs: Sequence[float]) -> str:
    others = [f"row {row} is below {in_words(below)}" for row, below in moved(ours, theirs)]
    return f"Unlike in the paper, {'; '.join(others)}." if others else "The order is the paper's."


def differences(
    ours: Sequence[float], theirs: Sequence[float], loop_free: Sequence[float], texts: int
) -> list[str]:
    """Sentences on rows with higher or lower S than in the paper, and on whether loops explain the higher ones.

    Args:
        ours, theirs, loop_free: S by row: here, in the paper, and here on the loop-free completions.
        texts: number of loop-free completions.
    """
    # Rows that differ from the paper.
    sentences = []
    higher = [row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a > b * (1 + NOTABLE)]
    lower = [row for row, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a < b * (1 - NOTABLE)]
    for rows, word in ((higher, "higher"), (lower, "lower")):
        if rows:
            values = [f"{row + 1} ({ours[row]:.2f} against {theirs[row]:.2f})" for row in rows]
            stand = "Row" if len(rows) == 1 else "Rows"
            sentences.append(
                f"{stand} with {word} S than in the paper, by over {100 * NOTABLE:.0f} %: {in_words(values)}."
            )

    # A small model repeats itself, which raises S: how does S change on the completions without loops?
    if higher and texts:
        falling = [row + 1 for row in higher if loop_free[row] < ours[row] * (1 - NOTABLE)]
        rising = [row + 1 for row in higher if loop_free[row] > ours[row] * (1 + NOTABLE)]
        still = [row + 1 for row in higher if loop_free[row] > theirs[row] * (1 + NOTABLE)]
        parts = [f"on the loop-free texts S falls in {_rows(falling)}" if falling else ""]
        parts += [
            f"it rises in {_rows(rising)}"
            if falling
            else f"on the loop-free texts S rises in {_rows(rising)}"
        ]
        parts = [part for part, rows in zip(parts, (falling, rising), strict=True) if rows]
        effect = " and ".join(parts) or "on the loop-free texts S hardly changes in these rows"
        verdict = (
            f"so loops of a small model do not explain {_rows(still)}, which still {_stand(still)} higher than in "
            "the paper"
            if still
            else "so loops explain what stands higher"
        )
        sentences.append(f"Do loops explain the higher rows? {effect[0].upper()}{effect[1:]}, {verdict}.")
    return sentences


def _rows(rows: Sequence[int]) -> str:
    return f"row{'s' if len(rows) > 1 else ''} {in_words(rows)}"


def _stand(rows: Sequence[int]) -> str:
    return "stand" if len(rows) > 1 else "stands"

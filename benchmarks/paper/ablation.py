"""Table 3 of the paper: what the window, the candidates and the prompt as reference each bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

from lookahead.bench.pictures import COLOURS, label, new_figure
from lookahead.bench.summary import figures, number, plain_of

from .study import WINDOW_ONLY, Study, loop_free_texts, pool_figures, ratios

#: Table 3, rows 1 to 9: (name in the paper's order N, W, G; prompt as reference; our method; the paper's S)
TABLE_3 = (
    ("autoregressive", "–", "autoregressive", 1.00),
    ("prompt lookup", "yes", "prompt-lookup", 1.55),
    ("(10, 1, 3)", "yes", "lookahead:1,10,3", 1.45),
    ("(5, 1, 10)", "yes", "lookahead:1,5,10", 1.51),
    ("(5, 1, 30)", "no", f"lookahead:1,5,30:{WINDOW_ONLY}", 1.12),
    ("(5, 1, 30)", "yes", "lookahead:1,5,30", 1.59),
    ("(5, 30, 1)", "no", f"lookahead:30,5,1:{WINDOW_ONLY}", 1.79),
    ("(5, 15, 15)", "no", f"lookahead:15,5,15:{WINDOW_ONLY}", 1.96),
    ("(5, 15, 15)", "yes", "lookahead:15,5,15", 2.05),
)


def moved(ours: Sequence[float], paper: Sequence[float]) -> list[tuple[int, list[int]]]:
    """Rows (from 1) that lie above others in the paper and not here, with these others."""
    rows = range(len(paper))
    pairs = [(a, [b + 1 for b in rows if paper[a] > paper[b] and ours[a] < ours[b]]) for a in rows]
    return [(a + 1, below) for a, below in pairs if below]


def order(ratios: Sequence[float]) -> str:
    """Rows by S, the largest first."""
    return " > ".join(str(row + 1) for row in sorted(range(len(ratios)), key=lambda row: -ratios[row]))


def ablation(study: Study) -> Path:
    """Table 3: what the window, the candidates and the prompt as reference each bring."""
    records = study.run([row[2] for row in TABLE_3], study.prompts(12), replace(study.options, warm=False))
    measured = [r for r in records if "skipped" not in r]
    plain, free = plain_of(measured), ratios(records, True)
    straight, texts = loop_free_texts(records)
    body = [
        "| row | (N, W, G) | prompt as reference | S | the paper's S | speed-up | rows/step | pool hit rate "
        f"| mean match length | S of {straight} loop-free texts of {texts} | equal |",
        "| ---: | --- | --- |" + " ---: |" * 8,
    ]
    bars = []
    for row, (name, prompt, method, paper) in enumerate(TABLE_3, 1):
        mine = [r for r in measured if r["method"] == method]
        x, (hits, length) = figures(mine, plain), pool_figures(mine)
        body.append(
            f"| {row} | {name} | {prompt} | {number(x.s_steps)} | {paper:.2f} | {number(x.total)} "
            f"| {number(x.rows, 1)} | {number(hits)} | {number(length)} | {number(free.get(method, nan))} "
            f"| {x.equal}/{x.compared} |"
        )
        bars.append((f"{name}{' + prompt' if prompt == 'yes' and name[0] == '(' else ''}", x))
    own, theirs = [x.s_steps for _, x in bars], [row[3] for row in TABLE_3]
    others = "; ".join(
        f"row {row} is below {', '.join(map(str, below))}" for row, below in moved(own, theirs)
    )
    body += [
        "",
        f"Rows by S, the paper: {order(theirs)}; here: {order(own)}. "
        + (f"Otherwise than in the paper, {others}." if others else "The order is the paper's."),
    ]
    figure, axes = new_figure(7.0, 4.6)
    for place, (_, x) in enumerate(bars):
        axes.barh(
            place - 0.2, x.s_steps, 0.38, color=COLOURS[0], label="S (tokens per step)" if not place else None
        )
        axes.barh(
            place + 0.2,
            x.total,
            0.38,
            color=COLOURS[1],
            label="speed-up (ratio of tokens/s)" if not place else None,
        )
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    label(axes, "Ablation of lookahead and verification branch", "ratio to plain decoding", "(N, W, G)")
    differs = [
        study.size(),
        "Where rows with the prompt as reference (2, 3, 4, 6) stand higher than in the paper, the likely reason is "
        "that a small model repeats its prompt and itself more, from which their candidates come; the loop-free "
        "texts are the ones to compare.",
        "The paper's speed-ups on its A100 lie between 1.04 and 1.88.",
        "The paper's table is for MT-Bench with LLaMA-2-Chat 7B on an A100, where rows are almost free; "
        "`lookahead bench step-cost` shows what they cost here. S does not depend on the machine, speed-up does.",
        "Our steps keep the bonus token of a fully accepted candidate, which the authors' code drops.",
        '"Prompt as reference" fills the pool from the prompt and from the text as it is generated.',
    ]
    return study.page("ablation", "Ablation (table 3)", body, differs, figure, records)

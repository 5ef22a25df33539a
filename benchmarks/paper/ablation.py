"""Table 3 of the paper: what the window, the candidates and the prompt as reference each bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lookahead.bench.pictures import COLOURS, label, new_figure
from lookahead.bench.summary import figures, number, plain_of

from .study import WINDOW_ONLY, Study, ratios

#: Table 3: (name in the paper's order N, W, G; prompt as reference; our method; the paper's S where we know it)
TABLE_3 = (
    ("autoregressive", "–", "autoregressive", "1.00"),
    ("prompt lookup", "yes", "prompt-lookup", "1.55"),
    ("(10, 1, 3)", "yes", "lookahead:1,10,3", "–"),
    ("(5, 1, 10)", "yes", "lookahead:1,5,10", "–"),
    ("(5, 1, 30)", "no", f"lookahead:1,5,30:{WINDOW_ONLY}", "–"),
    ("(5, 1, 30)", "yes", "lookahead:1,5,30", "1.59"),
    ("(5, 30, 1)", "no", f"lookahead:30,5,1:{WINDOW_ONLY}", "1.79"),
    ("(5, 15, 15)", "no", f"lookahead:15,5,15:{WINDOW_ONLY}", "1.96"),
    ("(5, 15, 15)", "yes", "lookahead:15,5,15", "2.05"),
)


def ablation(study: Study) -> Path:
    """Table 3: what the window, the candidates and the prompt as reference each bring."""
    records = study.run([row[2] for row in TABLE_3], study.prompts(12), replace(study.options, warm=False))
    measured = [r for r in records if "skipped" not in r]
    plain = plain_of(measured)
    body = [
        "| (N, W, G) | prompt as reference | S | the paper's S | speed-up | rows/step | S loop-free | equal |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    bars = []
    for name, prompt, method, paper in TABLE_3:
        x = figures([r for r in measured if r["method"] == method], plain)
        free = ratios(records, True).get(method, float("nan"))
        body.append(
            f"| {name} | {prompt} | {number(x.s_steps)} | {paper} | {number(x.total)} | {number(x.rows, 1)} | "
            f"{number(free)} | {x.equal}/{x.compared} |"
        )
        bars.append((f"{name}{' + prompt' if prompt == 'yes' and name[0] == '(' else ''}", x))
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
        "The paper's table is for MT-Bench with LLaMA-2-Chat 7B on an A100, where rows are almost free; "
        "`lookahead bench step-cost` shows what they cost here. S does not depend on the machine, speed-up does.",
        "Our steps keep the bonus token of a fully accepted candidate, which the authors' code drops.",
        '"Prompt as reference" fills the pool from the prompt and from the text as it is generated.',
    ]
    return study.page("ablation", "Ablation (table 3)", body, differs, figure, records)

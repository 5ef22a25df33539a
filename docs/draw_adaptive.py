"""Draws the pictures of adaptive.md, and the tables of results/adaptive.md, from records and nothing else.

python benchmarks/adaptive_s.py --data DIR --out docs/results/adaptive.jsonl       S, and the ablation
python benchmarks/adaptive_run.py --data DIR --out docs/results/adaptive-run.json  step by step
python docs/draw_adaptive.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from lookahead.bench.pictures import COLOURS, new_figure, save
from lookahead.bench.record import describe

HERE = Path(__file__).parent
RESULTS, IMAGES = HERE / "results", HERE / "images"
#: The window's n-grams were a source when the committed records were made.
SOURCES = ("suffix", "logits", "window", "ngrams", "jacobi", "corpus")
PAPER = ("lookahead 15,5,15 cold", "lookahead 15,5,15 warm")
CREDITED = ("adaptive cold", "adaptive warm", "adaptive warm+corpus")


def rows_over_time(run: dict[str, Any]) -> Any:
    """Rows and tokens of each step of one text of each workload: the one whose rows vary the most."""
    figure, axes = new_figure(7.2, 3.6)
    axes.remove()
    texts = {}
    for one in run["runs"]:
        if one["temperature"] == 0:
            best = texts.get(one["workload"])
            if best is None or len(set(one["rows"])) > len(set(best["rows"])):
                texts[one["workload"]] = one
    for place, (workload, one) in enumerate(texts.items(), 1):
        axes = figure.add_subplot(len(texts), 1, place)
        ends, total = [], 0
        for tokens in one["tokens"]:
            total += tokens
            ends.append(total)
        begins = [0, *ends]
        for number, cooling in enumerate(one["plain_step"][: len(ends)]):
            if cooling:
                label = None if number else "cooldown: plain steps"
                axes.axvspan(begins[number], ends[number], color="#e6e6e6", linewidth=0, label=label)
        axes.step(ends, one["rows"], where="post", color=COLOURS[0], linewidth=1.2, label="rows of the step")
        axes.plot(ends, one["tokens"], "o", color=COLOURS[1], markersize=3, label="tokens it gave")
        axes.set_yscale("log", base=2)
        axes.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        axes.set_ylim(0.8, 150)
        axes.set_title(f"{workload}, greedy", fontsize=9)
        axes.grid(alpha=0.3)
        if place == 1:
            axes.legend(fontsize=7, ncols=3, loc="upper right")
    axes.set_xlabel("tokens of the text so far")
    return figure


def credit_by_source(records: list[dict[str, Any]]) -> Any:
    """Accepted drafted tokens per step, by the source on whose word they were drafted."""
    figure, axes = new_figure(7.2, 3.8)
    bars = []
    for workload, temperature in sorted({(r["workload"], r["temperature"]) for r in records}):
        for method in CREDITED:
            for record in records:
                if (record["workload"], record["temperature"], record["method"]) == (
                    workload,
                    temperature,
                    method,
                ):
                    label = f"{workload}, T = {temperature:g}, {method.removeprefix('adaptive ')}"
                    bars.append((label, record["credit"]))
    left = [0.0] * len(bars)
    for number, source in enumerate(SOURCES):
        parts = [credit.get(source, 0.0) for _, credit in bars]
        axes.barh(range(len(bars)), parts, left=left, color=COLOURS[number], label=source, height=0.7)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("accepted drafted tokens per step, at most 64 rows")
    axes.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.45, 1.12))
    return figure


def calibration(run: dict[str, Any]) -> Any:
    """Estimated probability of a drafted child of an accepted node against how often it was right."""
    figure, axes = new_figure(7.0, 4.4)
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, label="as estimated")
    for number, (temperature, levels) in enumerate(run["calibration"].items()):
        points = [(sure / count, right / count, count) for count, right, sure in levels if count >= 20]
        axes.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            color=COLOURS[number],
            marker="os"[number % 2],
            label=f"T = {float(temperature):g}, {sum(int(c) for _, _, c in points):,} candidates",
        )
    axes.set_xlabel("estimated probability")
    axes.set_ylabel("share that was right")
    axes.legend(fontsize=8)
    return figure


def page(records: list[dict[str, Any]]) -> str:
    """results/adaptive.md."""
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        groups[record["workload"], record["temperature"]][record["method"]] = record
    lines = [
        "# S of the adaptive drafter, and what each source is worth",
        "",
        "`python benchmarks/adaptive_s.py --data DIR --out docs/results/adaptive.jsonl`",
        "",
        describe(records[-1] | {"dtype": "float32"}) + ".",
        "60 prompts of HumanEval (code) and 60 of GSM8K (maths), at most "
        f"{records[-1]['new_tokens']} new tokens.",
        "**Every text of every row is equal to plain decoding, token for token.**",
        "",
        "S is tokens per forward pass after the prefill, bonus token included; it does not depend on the machine.",
        "The budget is off: adaptive may have 64 rows in every step. *cold* keeps nothing between prompts, *warm*",
        "shares what was learnt (the paper's method: its pool), *+corpus* also drafts from the earlier texts.",
        "",
    ]
    if any("ngrams" in record["method"] for record in records):
        lines[-1:] = [
            "`ngrams`, the window's n-grams, were a source when this was recorded; they no longer are.",
            "",
        ]
    for (workload, temperature), methods in groups.items():
        lines += [
            f"## {workload}, {'greedy' if not temperature else f'temperature {temperature:g}'}",
            "",
            "| method | S | rows per step | against the paper's, cold | against the paper's, warm |",
            "|---|---|---|---|---|",
        ]
        cold, warm = (methods[name]["s"] for name in PAPER)
        for name, record in methods.items():
            lines.append(
                f"| {name} | {record['s']:.2f} | {record['rows']:.1f} | {record['s'] / cold:.2f} "
                f"| {record['s'] / warm:.2f} |"
            )
        lines.append("")
    lines += ["![Accepted tokens by source](../images/adaptive-credit.png)", ""]
    return "\n".join(lines)


def main() -> None:
    records = [json.loads(line) for line in (RESULTS / "adaptive.jsonl").read_text().splitlines()]
    (RESULTS / "adaptive.md").write_text(page(records), encoding="utf-8")
    save(credit_by_source(records), IMAGES / "adaptive-credit", describe(records[-1] | {"dtype": "float32"}))
    run = json.loads((RESULTS / "adaptive-run.json").read_text())
    where = describe(run["about"])
    save(rows_over_time(run), IMAGES / "adaptive-rows", where)
    save(calibration(run), IMAGES / "adaptive-calibration", where)


if __name__ == "__main__":
    main()

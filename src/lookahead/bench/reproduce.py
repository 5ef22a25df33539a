"""The paper's results, one function each (Fu et al., 2024, arXiv 2402.02057).

Each measures, draws its figure and writes a page: the command, the machine, the commit, the table, and in
plain words what differs from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..core import SettingsError
from ..drafters import METHODS
from .pictures import COLOURS, colour, new_figure
from .ranks import parallel
from .sampling_quality import as_rows, joint_law, same_tokens
from .scaling import compression_ratio, fit
from .study import Study
from .summary import LEGEND, Record, figures, markdown, number, plain_of, summarise
from .workloads import SOURCES, find_file

WINDOW_ONLY = "pool_from_prompt=0:pool_from_output=0"
WINDOWS, NGRAMS = (2, 4, 8, 16, 32), (3, 5, 7)
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


def scaling_law(study: Study) -> Path:
    """Section 4, figures 4a and 4b: S for W = G and N, and equation 7 fitted to it."""
    methods = {(w, n): f"lookahead:{w},{n},{w}:{WINDOW_ONLY}" for n in NGRAMS for w in WINDOWS}
    options = replace(study.options, warm=False)
    records = study.run(list(methods.values()), study.prompts(8), options)
    body, curves = [], []
    for what, loop_free in (("all texts", False), ("loop-free texts", True)):
        ratios = _ratios(records, loop_free)
        points = [
            (w, n, ratios[name]) for (w, n), name in methods.items() if ratios.get(name, float("nan")) > 0
        ]
        if len(points) < 3:
            body += [f"{what}: too few texts to fit."]
            continue
        found = fit(points)
        curves.append((what, points, found))
        body += [
            f"**{what}**: alpha = {found.alpha:.3f}, f = {found.f:.2f}, R2 = {found.r2:.3f}", "",
            "| N | " + " | ".join(f"W = G = {w}" for w in WINDOWS) + " |", "| --- |" + " ---: |" * len(WINDOWS),
        ]  # fmt: skip
        for n in NGRAMS:
            cells = [
                f"{ratios[methods[w, n]]:.3f} ({compression_ratio(found.alpha, found.f, n - 1, w):.3f})"
                for w in WINDOWS
            ]
            body.append(f"| {n} | " + " | ".join(cells) + " |")
        body += ["", "Measured S, and in brackets the fitted equation 7.", ""]
    if not curves:
        raise SettingsError(
            "no prompt gave a text with steps to measure; use more prompts or another workload"
        )
    figure, axes = new_figure()
    _, points, found = curves[0]
    for index, n in enumerate(NGRAMS):
        measured = [(w, s) for w, size, s in points if size == n]
        axes.plot(*zip(*measured, strict=True), linestyle="", label=f"N = {n}, measured", **colour(index))
        fine = [2 ** (step / 8) for step in range(8, 41)]
        fitted = [compression_ratio(found.alpha, found.f, n - 1, w) for w in fine]
        axes.plot(fine, fitted, color=COLOURS[index], linestyle="--", label=f"N = {n}, equation 7")
    axes.set_xscale("log", base=2)
    axes.set_xticks(WINDOWS, [str(w) for w in WINDOWS])
    axes.set_xlabel("window size W = candidates G")
    axes.set_ylabel("compression ratio S (tokens per step)")
    axes.set_title(f"Scaling law: alpha = {found.alpha:.3f}, f = {found.f:.2f}, R2 = {found.r2:.3f}")
    axes.legend(fontsize=8)
    differs = [
        study.size(),
        "The paper measures MT-Bench with LLaMA-2-Chat 7B. A small model repeats itself more, which flatters "
        "n-grams; so the loop-free texts are fitted too.",
        "The n-grams come from the window alone, as in the paper's algorithm; neither prompt nor output fill "
        "the pool.",
    ]
    return study.page(
        "scaling-law", "Scaling law (section 4, figures 4a and 4b)", body, differs, figure, records
    )


def _ratios(records: Sequence[Record], loop_free: bool) -> dict[str, float]:
    """S by method."""
    straight = {
        (r["workload"], r["prompt"], r["turn"], r["repeat"])
        for r in records
        if r["method"] == "autoregressive" and r.get("loop_free", False)
    }
    kept = [
        r for r in records
        if "skipped" not in r
        and (not loop_free or (r["workload"], r["prompt"], r["turn"], r["repeat"]) in straight)
    ]  # fmt: skip
    return {
        method: figures([r for r in kept if r["method"] == method], {}).s_steps
        for method in dict.fromkeys(r["method"] for r in kept)
    }


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
        free = _ratios(records, True).get(method, float("nan"))
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
    axes.set_xlabel("ratio to plain decoding")
    axes.set_ylabel("(N, W, G)")
    axes.set_title("Ablation of lookahead and verification branch")
    axes.legend(fontsize=8)
    differs = [
        study.size(),
        "The paper's table is for MT-Bench with LLaMA-2-Chat 7B on an A100, where rows are almost free; "
        "`lookahead bench step-cost` shows what they cost here. S does not depend on the machine, speed-up does.",
        "Our steps keep the bonus token of a fully accepted candidate, which the authors' code drops.",
        '"Prompt as reference" fills the pool from the prompt and from the text as it is generated.',
    ]
    return study.page("ablation", "Ablation (table 3)", body, differs, figure, records)


def sampling_quality(study: Study) -> Path:
    """Table 2: greedy and temperature 1, plain against lookahead; and tests that can fail."""
    method = "lookahead:15,5,15"
    prompts = study.prompts(16)
    records: list[Record] = []
    for temperature in (0.0, 1.0):
        options = replace(study.options, temperature=temperature, repeats=1)
        records += study.run(["hf-greedy" if not temperature else "hf-sample", method], prompts, options)
    subject = study.subject
    texts = [p.tokens(subject.tokenizer) for p in prompts[:8]]
    law = joint_law(subject, texts, progress=study.progress)
    rows = as_rows(records)
    body = [
        "| temperature | method | texts | ROUGE-1 | ROUGE-2 | ROUGE-L | S | equal to plain decoding, same seed |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        scores = " | ".join(
            number(row.get(kind, float("nan")) * 100) for kind in ("rouge1", "rouge2", "rougeL")
        )
        equal = f"{row['equal']}/{row['compared']}" if row["compared"] else "another stream"
        body.append(
            f"| {row['temperature']} | `{row['method']}` | {row['texts']} | {scores} | {number(row['S'])} | {equal} |"
        )
    equal, compared = same_tokens([r for r in records if r["method"] == method])
    body += [
        "", f"**Same seed, same tokens**: {equal} of {compared} texts.", "",
        f"**The joint law of the first {law.depth} tokens**, {law.draws} draws at temperature 1 among the 4 "
        f"likeliest, {law.cells} cells, S = {law.compression_ratio:.2f} in these draws (n-grams kept from draw to "
        "draw):", "",
        "| lookahead's draws against | chi-square p value |", "| --- | ---: |",
        f"| the exact law, enumerated from the model | {law.p_exact:.3f} |",
        f"| transformers' plain sampling, as many draws | {law.p_plain:.3f} |",
        f"| the exact law at temperature 1.2 (must be near 0, or the test sees nothing) | {law.p_wrong:.2g} |",
    ]  # fmt: skip
    figure, axes = new_figure()
    kinds = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    for index, row in enumerate(rows):
        places = [place + (index - (len(rows) - 1) / 2) * 0.13 for place in range(3)]
        heights = [row.get(kind, 0.0) * 100 for kind in kinds]
        axes.bar(
            places,
            heights,
            0.12,
            color=COLOURS[index % len(COLOURS)],
            label=f"T = {row['temperature']:g}, {row['method']}",
        )
    axes.set_xticks(range(3), list(kinds.values()))
    axes.grid(False, axis="x")
    axes.set_ylabel("F measure (%)")
    axes.set_xlabel("measure")
    axes.set_title("Text quality, plain against lookahead")
    axes.legend(fontsize=7)
    differs = [
        study.size(),
        "The paper scores summaries (CNN/Daily Mail and XSum). The bundled model cannot summarise: ROUGE is "
        "against the references of the workload above (for stdlib, the function's real body), and only its "
        "equality means anything.",
        "`hf-sample` draws from transformers' own stream, so its texts differ; its ROUGE may differ by chance.",
        "Equality of tokens is stronger than the paper's comparison of scores: where all texts are equal, so is "
        "every score.",
    ]
    facts = {"texts": rows, "joint_law": asdict(law)}
    return study.page("sampling-quality", "Sampling quality (table 2)", body, differs, figure, records, facts)


def end_to_end(study: Study) -> Path:
    """Figure 5: speed-up by workload."""
    found = [name for name in SOURCES if find_file(name, study.data) is not None] or ["stdlib"]
    methods = ["hf-greedy", "hf-prompt-lookup", "prompt-lookup", "lookahead:15,5,15"]
    methods += [
        name for name in METHODS if name not in ("lookahead", "autoregressive", "jacobi", "prompt-lookup")
    ]
    records = study.run(methods, study.prompts(5, found), study.options)
    summary = summarise(records)
    workloads = list(dict.fromkeys(line.workload for line in summary.lines))
    bars: dict[str, dict[str, float]] = {}
    for line in summary.lines:
        states = [
            (line.cold, " (cold)" if line.warm else ""),
            *([(line.warm, " (warm)")] if line.warm else []),
        ]
        for x, state in states:
            if line.method != "autoregressive":
                bars.setdefault(line.method + state, {})[line.workload] = x.total
    figure, axes = new_figure(max(7.0, 1.5 + 1.1 * len(workloads)), 4.4)
    width = 0.84 / max(1, len(bars))
    for index, (name, by_workload) in enumerate(bars.items()):
        places = [place - 0.42 + width * (index + 0.5) for place in range(len(workloads))]
        axes.bar(
            places,
            [by_workload.get(w, 0.0) for w in workloads],
            width,
            color=COLOURS[index % len(COLOURS)],
            label=name,
        )
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(workloads)), workloads)
    axes.grid(False, axis="x")
    axes.set_xlabel("workload")
    axes.set_ylabel("speed-up (tokens/s over plain decoding)")
    axes.set_title("End to end: speed-up by workload")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    differs = [
        study.size(),
        "The paper reports 1.8x on MT-Bench (7B) and 2.3x on HumanEval. On a CPU a step of many rows costs several "
        "one-row steps, so S is not the speed-up.",
        "The baseline is our own plain decoding in the same process; Hugging Face's greedy generate stands beside "
        "it.",
        "The bundled model was trained on Python code, much of the standard library with it, and on GSM8K's training "
        "split; chat workloads are foreign to it.",
    ]
    body = [markdown(summary), "", LEGEND]
    return study.page("end-to-end", "End to end (figure 5)", body, differs, figure, records)


STUDIES: dict[str, Callable[[Study], Path]] = {
    "scaling-law": scaling_law,
    "ablation": ablation,
    "sampling-quality": sampling_quality,
    "end-to-end": end_to_end,
    "parallel": parallel,
}

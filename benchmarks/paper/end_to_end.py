"""Figure 5 of the paper: speed-up by workload."""

from __future__ import annotations

from pathlib import Path

from lookahead.bench.pictures import COLOURS, label, new_figure
from lookahead.bench.summary import LEGEND, markdown, summarise
from lookahead.bench.workloads import SOURCES, find_file
from lookahead.drafters import METHODS

from .study import Study


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
        if line.method != "autoregressive":
            bars.setdefault(line.label, {})[line.workload] = line.all.total
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
    label(axes, "End to end: speed-up by workload", "workload", "speed-up (tokens/s over plain decoding)")
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

"""Figure 5 of the paper: speed-up by workload."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from lookahead.bench.pictures import COLOURS, label, new_figure
from lookahead.bench.summary import LEGEND, markdown, number, summarise
from lookahead.bench.workloads import SOURCES, Prompt, find_file, load_workload
from lookahead.drafters import METHODS

from .study import Study

#: Spec-Bench's categories: its first one is MT-Bench, whose own eight categories its rows name.
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
MULTI_TURN = "multi-turn"
#: Workloads whose speed-ups the paper names for a 7B model, the largest first.
PAPER = ("humaneval", "mt-bench")


def by_category(prompts: Sequence[Prompt], limit: int | None, taken: Collection[str]) -> list[Prompt]:
    """Spec-Bench's prompts as six workloads, so many of each.

    Args:
        taken: first turns of other workloads (MT-Bench's, say): these prompts are left out.
    """
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kind = prompt.category if prompt.category in SPEC_BENCH else MULTI_TURN
        if prompt.turns[0] not in taken:
            kinds.setdefault(kind, []).append(replace(prompt, workload=f"spec-bench {kind}"))
    return [prompt for some in kinds.values() for prompt in some[:limit]]


def prompts_of(study: Study, names: Sequence[str]) -> list[Prompt]:
    """The prompts of these workloads, none twice; Spec-Bench's by category."""
    limit = 5 if study.limit is None else study.limit or None
    found: list[Prompt] = []
    for name in sorted(names, key=lambda name: name.startswith("spec-bench")):  # which takes what is left
        if name.startswith("spec-bench"):
            whole = load_workload(name, None, study.options.seed, study.data)
            found += by_category(whole, limit, {prompt.turns[0] for prompt in found})
        else:
            found += load_workload(name, limit, study.options.seed, study.data)
    return found


def end_to_end(study: Study) -> Path:
    """Figure 5: speed-up by workload."""
    found = [name for name in SOURCES if find_file(name, study.data) is not None] or ["stdlib"]
    methods = ["hf-greedy", "hf-prompt-lookup", "prompt-lookup", "lookahead:15,5,15"]
    methods += [
        name for name in METHODS if name not in ("lookahead", "autoregressive", "jacobi", "prompt-lookup")
    ]
    records = study.run(methods, prompts_of(study, study.workloads or found), study.options)
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
    axes.set_xticks(range(len(workloads)), [name.replace(" ", "\n") for name in workloads])
    axes.grid(False, axis="x")
    label(axes, "End to end: speed-up by workload", "workload", "speed-up (tokens/s over plain decoding)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ours = {
        line.workload: line
        for line in summary.lines
        if line.method == "lookahead:15,5,15" and line.state != "warm"
    }
    ranked = sorted(ours, key=lambda name: -ours[name].all.s_steps)
    by_s = " > ".join(f"{name} ({number(ours[name].all.s_steps)})" for name in ranked)
    differs = [
        study.size(),
        f"Workloads by S of lookahead (15, 5, 15), cold: {by_s}. The paper: {' > '.join(PAPER)}.",
        "The paper reports 1.8x on MT-Bench (7B) and 2.3x on HumanEval. On a CPU a step of many rows costs several "
        "one-row steps, so S is not the speed-up.",
        "The baseline is our own plain decoding in the same process; Hugging Face's greedy generate stands beside "
        "it.",
        "Spec-Bench's multi-turn category is MT-Bench; where both are at hand no prompt is measured twice.",
    ]
    body = [markdown(summary), "", LEGEND]
    return study.page("end-to-end", "End to end (figure 5)", body, differs, figure, records)

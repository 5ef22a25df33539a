"""Figure 5 of the paper: speed-up by workload."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lookahead.bench.record import Record
from lookahead.bench.report import LEGEND, Line, number, summarise
from lookahead.bench.workloads import Prompt
from lookahead.hf.model import HFModel

from ..datasets import SOURCES, find_file, load_workload
from ..report import markdown, markdown_table
from .committed import Head
from .study import Page, Study, descending, in_words, model_and_machine

METHOD = "lookahead:15,5,15"
#: The default drafter with about as many rows, whatever a row costs, so that S does not depend on the machine.
DEFAULT = "adaptive:rows=64"
#: Spec-Bench's categories other than MT-Bench. The rows of MT-Bench have eight categories of their own.
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
MULTI_TURN = "multi-turn"
#: Figure 5: workload -> smallest and largest speed-up over greedy decoding among the model sizes, on one A100 without
#: FlashAttention. The paper's text states 1.5 to 2.3 over all workloads.
FIGURE_5 = {"mt-bench": (1.45, 1.64), "gsm8k": (1.70, 1.89), "mbpp": (1.75, 1.87), "humaneval": (1.40, 2.25)}
#: Figure 6: workload -> speed-up over autoregressive decoding, both with FlashAttention, 7B, one A100.
FIGURE_6 = {"mt-bench": "1.8", "humaneval": "2.7 to 2.8", "classeval": "2.7 to 2.8"}


def by_category(
    prompts: Sequence[Prompt], limit: int | None, taken: Collection[str], multi_turn: bool
) -> list[Prompt]:
    """Spec-Bench's prompts as one workload per category, of at most ``limit`` prompts each.

    Args:
        prompts: all prompts of Spec-Bench.
        limit: maximum number of prompts per category; None for no limit.
        taken: first turns of the prompts of other workloads, such as GSM8K; prompts with these are left out.
        multi_turn: whether to include the category ``MULTI_TURN``, which is MT-Bench.
    """
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        category = prompt.category if prompt.category in SPEC_BENCH else MULTI_TURN
        if prompt.turns[0] not in taken and (multi_turn or category != MULTI_TURN):
            renamed = replace(prompt, workload=f"spec-bench {category}")
            categories.setdefault(category, []).append(renamed)
    return [prompt for some in categories.values() for prompt in some[:limit]]


def prompts_of(study: Study, names: Sequence[str]) -> list[Prompt]:
    """The prompts of these workloads without duplicates; those of Spec-Bench by category."""
    limit = 10 if study.limit is None else study.limit or None
    prompts: list[Prompt] = []
    multi_turn = not any(name.startswith("mt-bench") for name in names)
    # Spec-Bench comes last, so that prompts which it shares with other workloads count as theirs.
    for name in sorted(names, key=lambda name: name.startswith("spec-bench")):
        if name.startswith("spec-bench"):
            whole = load_workload(name, None, study.options.seed, study.data)
            prompts += by_category(whole, limit, {prompt.turns[0] for prompt in prompts}, multi_turn)
        else:
            prompts += load_workload(name, limit, study.options.seed, study.data)
    return prompts


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure the paper's method and the default drafter on every data set, each prompt from an empty state.

    transformers' own methods are measured too, if it can run the model.
    """
    present = [name for name in SOURCES if find_file(name, study.data) is not None] or ["stdlib"]
    methods = [METHOD, DEFAULT]
    if isinstance(study.model.model, HFModel):
        methods = ["hf-greedy", "hf-prompt-lookup", *methods]
    options = replace(study.options, warm=False)
    return study.run(methods, prompts_of(study, study.workloads or present), options), {}


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    summary = summarise(records)
    lookahead = {x.workload: x for x in summary.lines if x.method == METHOD and x.state != "warm"}
    has_hf = any(record["method"] == "hf-greedy" for record in records)
    body = [
        "Lookahead (15, 5, 15), cold, compared with the paper:",
        "",
        _beside_the_paper(lookahead, has_hf),
        "",
        "All methods:",
        "",
        markdown(summary),
        "",
        LEGEND,
    ]
    differs = [
        model_and_machine(head, records),
        *differences({name: line.all.s_steps for name, line in lookahead.items()}),
        "The paper's 1.8x on MT-Bench is its figure 6, where both sides use FlashAttention; figure 5 is without. "
        "Its largest speed-up, 2.3x, is on code completion. On a CPU a step of many rows costs several one-row "
        "steps, so S is not the speed-up.",
        "The baseline is our own plain decoding in the same process"
        + ("; the table also has transformers' greedy generate." if has_hf else "."),
        "Spec-Bench's multi-turn category is MT-Bench; no prompt is measured twice.",
    ]
    in_words([f"{name} {number(line.all.total)}" for name, line in lookahead.items()])
    return Page("End to end (figure 5)", body, differs)


def _beside_the_paper(lines: Mapping[str, Line], has_hf: bool) -> str:
    """The table of lookahead by workload. Without transformers' greedy generate it has no column about it."""
    rows = []
    for workload, line in lines.items():
        figure_5 = FIGURE_5.get(workload)
        paper = f"{figure_5[0]:.2f} to {figure_5[1]:.2f}" if figure_5 else "–"
        over_hf = [number(line.over_hf)] if has_hf else []
        own = [number(line.all.total), *over_hf, number(line.all.s_steps)]
        rows.append([workload, *own, paper, FIGURE_6.get(workload, "–")])
    headings = ["workload", "speed-up", *(["over transformers"] if has_hf else []), "S"]
    headings += ["the paper's speed-up, figure 5 (7B to 70B)", "figure 6 (7B)"]
    return markdown_table(headings, rows)


def differences(ours: Mapping[str, float]) -> list[str]:
    """Sentences that compare the order of the workloads by S with the paper's order by speed-up.

    Args:
        ours: S by workload.
    """
    sentences = [f"Workloads by S of lookahead (15, 5, 15), cold: {descending(dict(ours))}."]
    paper = {name: FIGURE_5[name][1] for name in ours if name in FIGURE_5}
    if len(paper) > 1:
        reversed_pairs = [
            f"{a} is above {b}"
            for a in paper
            for b in paper
            if paper[a] > paper[b] and ours[a] < ours[b] and a != b
        ]
        order = f"The paper's order by its largest speed-ups: {descending(paper)}."
        if reversed_pairs:
            order += f" Reversed here: in the paper {in_words(reversed_pairs)}."
        else:
            order += " The order is the same here."
        sentences.append(order)
    return sentences

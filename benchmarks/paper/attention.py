"""Appendix E of the paper: does an attention kernel for token trees change S?

The same model, prompts and settings are run twice: once with the kernel (compiled code on a CPU, Triton on a GPU),
and once with transformers' own attention and the tree as a 4-D mask. The two round differently, so completions may
diverge where two logits are nearly equal. With a kernel that let rows attend to wrong keys, fewer drafts would be
accepted, and S would be lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

from lookahead.bench.methods import Drafted, ModelUnderTest, Outcome, RunOptions, load_model
from lookahead.bench.record import Record
from lookahead.bench.report import figures, number
from lookahead.core import Drafter, Target
from lookahead.drafters import Lookahead
from lookahead.hf.model import HFModel

from .committed import Head
from .intervals import differ, drawn_ratios, interval
from .study import Page, Study, model_and_machine, only_first_turns

METHOD = "lookahead:15,5,15"
#: Names of the method with the kernel and with the mask.
WITH = f"{METHOD}, attention kernel"
WITHOUT = f"{METHOD}, attention mask"
WORKLOADS = ("humaneval", "mt-bench")


class OnTarget(Drafted):
    """One of our drafters on a given target instead of the model's own."""

    def __init__(self, drafter: Drafter, name: str, target: Target) -> None:
        super().__init__(drafter, name, "")
        self.target = target
        self.settings |= {"path": target.path, "reason": target.reason}

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        return super().decode(replace(model, target=self.target), prompt, options)


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure both kinds of attention on the first turns of conversations.

    Packed weights have no transformers path, so they are loaded in float32.
    """
    model = study.model
    if not isinstance(model.model, HFModel):
        model = load_model(study.model_path, dtype="float32")
    without = model.model.make_target("transformers")
    methods = [
        OnTarget(Lookahead(15, 5, 15), name, target)
        for name, target in ((WITH, model.target), (WITHOUT, without))
    ]
    prompts = study.first_turns(10, WORKLOADS)
    records = replace(study, model=model).run(methods, prompts, replace(study.options, warm=False))
    return records, {"attention": {WITH: model.target.path, WITHOUT: without.path}}


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    measured = [r for r in records if "skipped" not in r]
    workloads = list(dict.fromkeys(r["workload"] for r in measured))
    body = ["| prompts | S with the kernel | S with the mask | difference | texts equal to plain decoding |"]
    body.append("| --- |" + " ---: |" * 4)
    ratios: dict[str, tuple[float, float]] = {}
    alike = True
    for name in [*workloads, *(["all"] if len(workloads) > 1 else [])]:
        own = [r for r in measured if name in ("all", r["workload"])]
        x, y = (figures([r for r in own if r["method"] == method], {}) for method in (WITH, WITHOUT))
        drawn = drawn_ratios(own, [WITH, WITHOUT])
        low, high = interval(drawn[:, 0] - drawn[:, 1])
        ratios[name] = x.s_steps, y.s_steps
        alike = not differ(*drawn.T)
        body.append(
            f"| {name} | {number(x.s_steps)} | {number(y.s_steps)} "
            f"| {x.s_steps - y.s_steps:+.3f} [{low:+.3f} to {high:+.3f}] "
            f"| {x.equal}/{x.compared}, {y.equal}/{y.compared} |"
        )
    paths = head["attention"]
    kernel, mask = ratios["all" if len(workloads) > 1 else workloads[0]]
    if _same_counts(measured):
        verdict = "S is identical on every prompt: both took the same number of steps."
    elif alike:
        verdict = "The difference is within its 95 % interval over draws of prompts."
    else:
        verdict = "The difference is larger than its 95 % interval over draws of prompts."
    body += [
        "",
        f"Lookahead (15, 5, 15). The kernel is that of the {paths[WITH]} path; the mask is that of the "
        f"{paths[WITHOUT]} path. {verdict}",
    ]
    differs = [
        model_and_machine(head, records),
        "The paper compares its FlashAttention kernel with PyTorch's attention; here each side has also its own "
        "matrix products, which round differently too.",
        *only_first_turns(records),
        f"Over all prompts S is {kernel:.3f} with the kernel and {mask:.3f} without, a ratio of "
        f"{kernel / mask if mask else nan:.3f}.",
    ]
    return Page("Attention kernel (appendix E)", body, differs)


def _same_counts(records: Sequence[Record]) -> bool:
    """Whether both kinds of attention took the same number of steps for the same number of tokens, text by text."""
    counts: dict[str, dict[tuple[Any, ...], tuple[int, int]]] = {WITH: {}, WITHOUT: {}}
    for record in records:
        if record["method"] in counts:
            text = record["workload"], record["prompt"], record["turn"], record["repeat"]
            counts[record["method"]][text] = record["new_tokens"], record["steps"]
    return counts[WITH] == counts[WITHOUT]

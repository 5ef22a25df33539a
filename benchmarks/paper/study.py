"""The common part of the reproductions: what a study measures with, and how its page is computed from records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Protocol

from lookahead.bench.methods import PLAIN, Method, ModelUnderTest, RunOptions
from lookahead.bench.record import Record, Records, describe, was_busy
from lookahead.bench.report import figures, loop_free_records, summarise, unequal_text
from lookahead.bench.run import Progress, run
from lookahead.bench.workloads import Prompt
from lookahead.records import finite

from ..datasets import find_file, load_workload
from ..page import spelled_out
from ..peers import guarded_methods
from ..quiet import machine_text, processor
from .committed import Head

#: Settings that fill the pool from the window alone, as in the paper's algorithm.
WINDOW_ONLY = "pool_from_prompt=0:pool_from_output=0"


@dataclass(frozen=True, slots=True)
class Study:
    """The model, prompts and options of a reproduction.

    Attributes:
        model: the model under test.
        workloads: names of workloads; empty for the study's own choice.
        data: folder of data sets, or None.
        limit: prompts per workload; None for the study's own number, 0 for all.
        options: how to decode.
        records: folder for the complete records, so that an interrupted run can continue.
        progress: called with (records finished, number of records, what comes next).
        model_path: where the model was loaded from; None for the default model.
    """

    model: ModelUnderTest
    workloads: tuple[str, ...]
    data: Path | None
    limit: int | None
    options: RunOptions
    records: Path
    progress: Progress
    model_path: str | None = None

    def prompts(self, limit: int, workloads: Sequence[str] = ()) -> list[Prompt]:
        """The prompts of the study.

        Args:
            limit: prompts per workload, unless the study has a limit of its own.
            workloads: the data sets of the paper. Those in the data folder are used, or stdlib if there are none.
        """
        present = [name for name in workloads if find_file(name, self.data) is not None]
        names = self.workloads or present or ["stdlib"]
        count = limit if self.limit is None else self.limit or None
        return [p for name in names for p in load_workload(name, count, self.options.seed, self.data)]

    def first_turns(self, limit: int, workloads: Sequence[str] = ()) -> list[Prompt]:
        """The prompts of ``prompts`` without the later turns of conversations."""
        return [replace(prompt, turns=prompt.turns[:1]) for prompt in self.prompts(limit, workloads)]

    def run(
        self, methods: Sequence[str | Method], prompts: Sequence[Prompt], options: RunOptions
    ) -> list[Record]:
        """Measure, and save the records in the folder."""
        records = Records(self.records)
        make = partial(guarded_methods, folder=self.records)
        return run(methods, prompts, self.model, options, records, self.progress, make)

    def head(self, command: str, **measured: Any) -> Head:
        """The head of the committed records.

        Args:
            command: the command line.
            measured: measurements made once for the whole page.
        """
        about = {"command": command, "processor": processor(), "parameters": self.model.parameter_count}
        return about | measured


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a study's page, computed from its records alone.

    Attributes:
        title: heading of the page.
        body: lines of Markdown.
        differs: differences from the paper, one or more sentences each.
        facts: machine-readable results; None for the summary of the records.
    """

    title: str
    body: Sequence[str]
    differs: Sequence[str]
    facts: Any = None


class Reproduction(Protocol):
    """A module of this package that reproduces a result of the paper."""

    def measure(self, study: Study) -> tuple[list[Record], dict[str, Any]]:
        """Measure. Returns (records, measurements made once for the whole page)."""

    def page(self, head: Head, records: Sequence[Record]) -> Page:
        """Compute the page from the records."""


def where_and_size(head: Head, records: Sequence[Record]) -> str:
    """One line: machine, versions, model, and numbers of prompts and turns."""
    measured = [r for r in records if "skipped" not in r]
    prompts = {(r["workload"], r["prompt"]) for r in measured}
    by_workload = [
        f"{sum(w == workload for w, _ in prompts)} prompts of {workload}"
        for workload in dict.fromkeys(r["workload"] for r in measured)
    ]
    texts = len({(r["workload"], r["prompt"], r["turn"]) for r in measured})
    turns = f" ({texts} turns)" if texts != len(prompts) else ""
    longest = records[-1]["options"]["max_new_tokens"]
    return f"{describe(records[-1])}. {', '.join(by_workload)}{turns}, at most {longest} new tokens each."


def page_text(name: str, head: Head, records: Sequence[Record], page: Page) -> str:
    """The page as Markdown."""
    summary = summarise(records)
    about = machine_text(head.get("processor", ""), (record.get("load") for record in records))
    lines = [f"# {page.title}", "", f"`{head['command']}`", ""]
    lines += [" ".join(filter(None, [where_and_size(head, records), about])), ""]
    lines += [f"Every figure is computed from records/{name}.jsonl.gz.", ""]
    notes = [head.get("note", ""), was_busy(records)]
    notes += [
        f"{n} prompts of {w} were left out: the context is too short." for w, n in summary.skipped.items()
    ]
    notes += [unequal_text(record) for record in summary.unequal] or [
        "Every compared text is equal to plain decoding."
    ]
    lines += [*page.body, "", *filter(None, notes)]
    lines += ["", "## What differs from the paper", "", *(f"- {t}" for t in page.differs), ""]
    return spelled_out("\n".join(lines))


def page_facts(head: Head, records: Sequence[Record], page: Page) -> str:
    """The page's results as JSON."""
    table = [line.facts() for line in summarise(records).lines] if page.facts is None else page.facts
    facts = {"command": head["command"], "where": describe(records[-1])}
    facts |= {name: head[name] for name in ("processor",) if name in head}  # earlier records do not have it
    facts["figures"] = finite(table)
    return json.dumps(facts, indent=1) + "\n"


# ----------------------------------------------------------------------------------- parts of several pages


def model_and_machine(head: Head, records: Sequence[Record]) -> str:
    """A sentence that compares the model and the machine with the paper's."""
    return (
        f"The model is {records[-1]['model']} with {head['parameters'] / 1e6:.0f} million parameters in "
        f"{records[-1]['dtype']}, on the machine above; the paper runs LLaMA-2 and CodeLlama models of 7 to 70 "
        "billion parameters in float16 on A100 and RTX 3090 cards."
    )


def only_first_turns(records: Sequence[Record]) -> list[str]:
    """A sentence about MT-Bench if only the first turns of its prompts were measured, else nothing."""
    turns = {record["turn"] for record in records if record["workload"] == "mt-bench"}
    return ["MT-Bench has two turns; here only the first turns are decoded."] if turns == {0} else []


def pool_figures(records: Sequence[Record]) -> tuple[float, float]:
    """(h, m) of lookahead's records; NaN for other records.

    h is the share of steps in which the pool had candidates; m is the mean number of accepted tokens of the best
    candidate in those steps.
    """
    with_pool = [(r["drafter"], r["steps"]) for r in records if "pool_hit_rate" in r.get("drafter", ())]
    steps = sum(count for _, count in with_pool)
    hits = sum(figures["pool_hit_rate"] * count for figures, count in with_pool)
    matched = sum(x["mean_match_length"] * x["pool_hit_rate"] * count for x, count in with_pool)
    return hits / steps if steps else nan, matched / hits if hits else nan


def loop_free_texts(records: Sequence[Record]) -> tuple[int, int]:
    """(completions of plain decoding without loops, all completions of plain decoding)."""
    plain = [r for r in records if r["method"] == PLAIN and "skipped" not in r]
    return sum(bool(r["loop_free"]) for r in plain), len(plain)


def ratios(records: Sequence[Record], loop_free: bool = False) -> dict[str, float]:
    """S by method, over all completions or over those whose plain decoding has no loop."""
    kept = loop_free_records(records) if loop_free else [r for r in records if "skipped" not in r]
    return {
        method: figures([r for r in kept if r["method"] == method], {}).s_steps
        for method in dict.fromkeys(r["method"] for r in kept)
    }


def in_words(names: Sequence[Any]) -> str:
    """``1``, ``1 and 2``, ``1, 2 and 3``."""
    words = [str(name) for name in names]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def descending(values: dict[str, float]) -> str:
    """Names with their values, in descending order."""
    ranked = sorted(values, key=lambda name: -values[name])
    return " > ".join(f"{name} ({values[name]:.2f})" for name in ranked)

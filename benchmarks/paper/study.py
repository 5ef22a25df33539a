"""What the reproductions of the paper's results share: what they measure with, and the page computed from records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Protocol

from lookahead.bench.methods import PLAIN, Method, ModelUnderTest, RunOptions
from lookahead.bench.record import Record, Records, describe, was_busy
from lookahead.bench.report import figures, summarise, unequal_text
from lookahead.bench.run import Progress, run
from lookahead.bench.workloads import Prompt
from lookahead.records import finite

from ..datasets import find_file, load_workload
from ..peers import make_methods
from .committed import Head

#: N-grams from the window alone, as in the paper's algorithm.
WINDOW_ONLY = "pool_from_prompt=0:pool_from_output=0"


@dataclass(frozen=True, slots=True)
class Study:
    """What a reproduction measures with.

    Attributes:
        model: under test.
        workloads: names; empty for the study's own choice.
        data: folder of data sets, or None.
        limit: prompts per workload; None for the study's own choice, 0 for all.
        options: how to decode.
        records: folder for the whole records, so that an interrupt loses nothing.
        progress: called with (records finished, records in all, what comes next).
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
        """The prompts of the study: ``limit`` of each workload unless the user says otherwise.

        Args:
            workloads: the data sets of the paper; those in the data folder are taken, or stdlib if none is there.
        """
        present = [name for name in workloads if find_file(name, self.data) is not None]
        names = self.workloads or present or ["stdlib"]
        count = limit if self.limit is None else self.limit or None
        return [p for name in names for p in load_workload(name, count, self.options.seed, self.data)]

    def run(
        self, methods: Sequence[str | Method], prompts: Sequence[Prompt], options: RunOptions
    ) -> list[Record]:
        """Measure; records are kept in the folder."""
        records = Records(self.records)
        return run(methods, prompts, self.model, options, records, self.progress, make_methods)

    def head(self, command: str, **measured: Any) -> Head:
        """The head of the committed records.

        Args:
            command: as it was typed.
            measured: what was measured once for the whole page.
        """
        return {"command": command, "parameters": self.model.parameter_count, **measured}


@dataclass(frozen=True, slots=True)
class Page:
    """What a study says, computed from its records alone.

    Attributes:
        title: heading.
        body: lines of Markdown.
        differs: what differs from the paper, a sentence or more each.
        draw: draws the figure; None for a page without one.
        alt: what the figure shows, for readers who do not see it.
        facts: figures for machines; the summary of the records if None.
    """

    title: str
    body: Sequence[str]
    differs: Sequence[str]
    draw: Callable[[], Any] | None = None
    facts: Any = None
    alt: str = ""


class Reproduction(Protocol):
    """A module of this package that reproduces a result of the paper."""

    def measure(self, study: Study) -> tuple[list[Record], dict[str, Any]]:
        """(records, what was measured once)."""

    def page(self, head: Head, records: Sequence[Record]) -> Page:
        """The page of these records."""


def where_and_size(head: Head, records: Sequence[Record]) -> str:
    """One line: machine, versions, model, and how many texts."""
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
    lines = [f"# {page.title}", "", f"`{head['command']}`", "", where_and_size(head, records), ""]
    lines += [f"Every figure of this page is computed from [its records](records/{name}.jsonl.gz).", ""]
    if page.draw is not None:
        lines += [f"![{page.alt or page.title}]({name}.svg)", ""]
    notes = [head.get("note", ""), was_busy(records)]
    notes += [
        f"{n} prompts of {w} were left out: the context is too short." for w, n in summary.skipped.items()
    ]
    notes += [unequal_text(record) for record in summary.unequal] or [
        "Every compared text is equal to plain decoding."
    ]
    lines += [*page.body, "", *filter(None, notes)]
    return "\n".join(
        [*lines, "", "## What differs from the paper", "", *(f"- {t}" for t in page.differs), ""]
    )


def page_facts(head: Head, records: Sequence[Record], page: Page) -> str:
    """The page's figures as JSON."""
    table = [line.facts() for line in summarise(records).lines] if page.facts is None else page.facts
    facts = {"command": head["command"], "where": describe(records[-1]), "figures": finite(table)}
    return json.dumps(facts, indent=1) + "\n"


# ----------------------------------------------------------------------------------- what several pages say


def model_and_machine(head: Head, records: Sequence[Record]) -> str:
    """The model and the machine against the paper's."""
    return (
        f"The model is {records[-1]['model']} with {head['parameters'] / 1e6:.0f} million parameters in "
        f"{records[-1]['dtype']}, on the machine above; the paper runs LLaMA-2 and CodeLlama models of 7 to 70 "
        "billion parameters in float16 on A100 and RTX 3090 cards."
    )


def pool_figures(records: Sequence[Record]) -> tuple[float, float]:
    """(h, m) of lookahead's records: the share of steps in which the pool had candidates, and how many tokens of
    the best of them were right, the mean over those steps; NaN without a pool."""
    with_pool = [(r["drafter"], r["steps"]) for r in records if "pool_hit_rate" in r.get("drafter", ())]
    steps = sum(count for _, count in with_pool)
    hits = sum(figures["pool_hit_rate"] * count for figures, count in with_pool)
    matched = sum(x["mean_match_length"] * x["pool_hit_rate"] * count for x, count in with_pool)
    return hits / steps if steps else nan, matched / hits if hits else nan


def loop_free_texts(records: Sequence[Record]) -> tuple[int, int]:
    """(texts of plain decoding without a loop, all of them)."""
    plain = [r for r in records if r["method"] == PLAIN and "skipped" not in r]
    return sum(bool(r["loop_free"]) for r in plain), len(plain)


def loop_free_records(records: Sequence[Record]) -> list[Record]:
    """The records of texts whose plain text has no loop."""

    def text_of(record: Record) -> tuple[Any, ...]:
        return record["workload"], record["prompt"], record["turn"], record["repeat"]

    kept = [r for r in records if "skipped" not in r]
    without_loop = {text_of(r) for r in kept if r["method"] == PLAIN and r.get("loop_free", False)}
    return [r for r in kept if text_of(r) in without_loop]


def ratios(records: Sequence[Record], loop_free: bool = False) -> dict[str, float]:
    """S by method, of all texts or of those whose plain text has no loop."""
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
    """Names with their values, the largest first."""
    ranked = sorted(values, key=lambda name: -values[name])
    return " > ".join(f"{name} ({values[name]:.2f})" for name in ranked)

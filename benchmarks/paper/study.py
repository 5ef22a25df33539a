"""What every reproduction of a result works with, and the page that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Any

from lookahead.bench.method import RunOptions
from lookahead.bench.methods import PLAIN
from lookahead.bench.model import ModelUnderTest
from lookahead.bench.pictures import save
from lookahead.bench.record import Record, Records, describe, was_busy
from lookahead.bench.run import Progress, run
from lookahead.bench.summary import figures, summarise, unequal_text
from lookahead.bench.workloads import Prompt, load_workload
from lookahead.core.records import finite

#: N-grams from the window alone, as in the paper's algorithm.
WINDOW_ONLY = "pool_from_prompt=0:pool_from_output=0"


@dataclass(frozen=True, slots=True)
class Study:
    """What a reproduction works with.

    Attributes:
        model: under test.
        workloads: names; empty for the study's own choice.
        data: folder with data sets, or None.
        limit: prompts per workload; None for the study's own choice.
        options: how to decode.
        out: folder for the page and its figure.
        records: folder for the records, so that an interrupt loses nothing.
        command: as it was typed.
        progress: told how far it is.
        say: prints a line.
    """

    model: ModelUnderTest
    workloads: tuple[str, ...]
    data: Path | None
    limit: int | None
    options: RunOptions
    out: Path
    records: Path
    command: str
    progress: Progress
    say: Callable[[str], None]

    def prompts(self, limit: int, workloads: Sequence[str] = ("stdlib",)) -> list[Prompt]:
        """The prompts of the study; so many of each workload unless the user says otherwise."""
        names = self.workloads or tuple(workloads)
        many = limit if self.limit is None else self.limit or None
        return [p for name in names for p in load_workload(name, many, self.options.seed, self.data)]

    def run(self, methods: Sequence[str], prompts: Sequence[Prompt], options: RunOptions) -> list[Record]:
        """Measure, with the records kept."""
        return run(methods, prompts, self.model, options, Records(self.records), self.progress)

    def page(
        self,
        name: str,
        title: str,
        body: Sequence[str],
        differs: Sequence[str],
        figure: Any,
        records: Sequence[Record],
        facts: Any = None,
    ) -> Path:
        """Write ``name``.md, .json, .png and .svg. Returns the page.

        Args:
            body: lines of the page. differs: what differs from the paper.
            facts: the page's figures for machines; the summary of the records where None.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        where = describe(records[-1])
        workloads = ", ".join(dict.fromkeys(r["workload"] for r in records))
        prompts = len({(r["workload"], r["prompt"]) for r in records if "skipped" not in r})
        size = f"{prompts} prompts of {workloads}, at most {self.options.max_new_tokens} new tokens each"
        lines = [f"# {title}", "", f"`{self.command}`", "", f"{where}. {size}.", ""]
        if figure is not None:
            save(figure, self.out / name, where)
            lines += [f"![{title}]({name}.png)", ""]
        summary = summarise(records)
        lines += [*body, "", was_busy(records)]
        lines += [
            f"{n} prompts of {w} were left out: the context is too short." for w, n in summary.skipped.items()
        ]
        lines += [unequal_text(record) for record in summary.unequal] or [
            "Every compared text is equal to plain decoding."
        ]
        lines += ["", "## What differs from the paper", "", *(f"- {text}" for text in differs), ""]
        path = self.out / f"{name}.md"
        path.write_text("\n".join(lines), encoding="utf-8")
        table = [asdict(line) for line in summary.lines] if facts is None else facts
        text = json.dumps({"command": self.command, "where": where, "figures": finite(table)}, indent=1)
        (self.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        self.say("\n".join(body))
        return path

    def size(self) -> str:
        """The model and the machine against the paper's, for the pages."""
        millions = sum(p.numel() for p in self.model.model.parameters()) / 1e6
        return (
            f"The model is {self.model.name} with {millions:.0f} million parameters in {self.model.dtype}, on "
            "the machine above; the paper runs LLaMA-2 and CodeLlama models of 7 to 70 billion parameters in "
            "float16 on A100 and RTX 3090 cards."
        )


def pool_figures(records: Sequence[Record]) -> tuple[float, float]:
    """(h, m) of lookahead's records: the share of steps in which the pool had candidates, and how many tokens of
    the best of them were right, on the mean over those steps; NaN where no step had a pool."""
    told = [(r["drafter"], r["steps"]) for r in records if "pool_hit_rate" in r.get("drafter", ())]
    steps = sum(count for _, count in told)
    hits = sum(figures["pool_hit_rate"] * count for figures, count in told)
    matched = sum(figures["mean_match_length"] * figures["pool_hit_rate"] * count for figures, count in told)
    return hits / steps if steps else nan, matched / hits if hits else nan


def loop_free_texts(records: Sequence[Record]) -> tuple[int, int]:
    """(texts of plain decoding without a loop, all of them)."""
    plain = [r for r in records if r["method"] == PLAIN and "skipped" not in r]
    return sum(bool(r["loop_free"]) for r in plain), len(plain)


def ratios(records: Sequence[Record], loop_free: bool) -> dict[str, float]:
    """S by method."""
    straight = {
        (r["workload"], r["prompt"], r["turn"], r["repeat"])
        for r in records
        if r["method"] == PLAIN and r.get("loop_free", False)
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

"""Exact mode on the transformers path: how many drafted completions differ from plain ones, and the cost of
exactness.

    python -m benchmarks.exact_text                  10 completions of 128 tokens, greedy and sampled; 15 minutes
    python -m benchmarks.exact_text --texts 100      more of them

Completions: functions of Python's standard library without their bodies are decoded ``--batch`` at a time, with plain
decoding and with ``--method``, both with ``exact=True``. The first ``--controls`` prompts are decoded again without
it: some of them must differ, or the test has no power. Their seconds are CPU time, which a busy machine hardly
affects. Cost: one prompt at a time in wall-clock time, alternating all variants of a model, the best of ``--rounds``;
the model of the 0.5B shape has random weights, whose sampled output cannot be predicted.

Groups in ``--records`` at this commit are not measured again, so the same command continues after an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import lookahead
from benchmarks.step import build
from lookahead import LLM
from lookahead.bench.record import commit, environment, key_of
from lookahead.bench.workloads import stdlib_prompts
from lookahead.core import first_divergence
from lookahead.drafters import Adaptive, as_drafter
from lookahead.records import RecordWriter, read_records

from .origin import require_one_origin
from .page import write_report
from .report import markdown_table

#: Greedy, and sampled with a seed.
TEMPERATURES = (0.0, 0.8)
#: Methods measured for cost.
METHODS = ("plain", "adaptive")
#: Tokens of a prompt, its last ones.
LONGEST = 120
Job = tuple[str, float, dict[str, Any]]


def take(llm: LLM, exact: bool) -> None:
    """Decode on the transformers path from now on. The check at load runs here, so that it is not timed."""
    llm.target = partial(llm.model.make_target, "exact" if exact else "transformers")  # type: ignore[method-assign]
    llm.target()


def text_jobs(given: argparse.Namespace) -> Iterator[Job]:
    """(key, share of the work, settings) of each group, alternating greedy and sampled, the controls first."""
    for start in range(0, given.texts, given.batch):
        count = min(given.batch, given.texts - start)
        for temperature in TEMPERATURES:
            for exact in (True, False)[: 1 + (start < given.controls)]:
                settings = {
                    "model": str(given.model or "SmolLM2"),
                    "dtype": given.dtype,
                    "texts": [start, start + count],
                    "new_tokens": given.new_tokens,
                    "temperature": temperature,
                    "exact": exact,
                    "method": given.method,
                    "max_rows": given.max_rows,
                }
                yield (
                    key_of("texts", settings | {"commit": commit()}),
                    count * (1.0 if exact else 0.3),
                    settings,
                )


def measure_texts(llm: LLM, settings: dict[str, Any]) -> dict[str, Any]:
    """One group of completions, plain and drafted."""
    first, end = settings["texts"]
    prompts = [llm.encode(prompt["plain"])[-LONGEST:] for prompt in stdlib_prompts(end)][first:]
    take(llm, settings["exact"])
    shared: dict[str, Any] = {
        "max_new_tokens": settings["new_tokens"],
        "ignore_eos": True,
        "temperature": settings["temperature"],
        "seeds": list(range(first, end)),
    }
    drafter = as_drafter(settings["method"])
    if isinstance(drafter, Adaptive):
        drafter = replace(drafter, rows=settings["max_rows"])
    begin = process_time()
    plain = llm.generate(prompts, drafter="plain", **shared)
    middle = process_time()
    drafted = llm.generate(prompts, drafter=drafter, **shared)
    divergences = [first_divergence(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)]
    return {
        "plain_s": middle - begin,
        "drafted_s": process_time() - middle,
        "differ": sum(position is not None for position in divergences),
        "first_differences": divergences,
        "tokens": sum(len(x.tokens) for x in plain),
        "compression": sum(x.stats.compression_ratio for x in drafted) / len(drafted),
        "guarantee": drafted[0].stats.guarantee,
    }


def cost_jobs(given: argparse.Namespace) -> Iterator[Job]:
    for model in ("SmolLM2", "0.5b"):
        for dtype in ("bfloat16", "float32"):
            settings = {
                "cost": model,
                "dtype": dtype,
                "new_tokens": given.cost_tokens,
                "rounds": given.rounds,
            }
            yield (
                key_of("cost", settings | {"commit": commit()}, given.threads),
                1.0 if model == "SmolLM2" else 4.0,
                settings,
            )


def measure_cost(llm: LLM, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of plain and drafted decoding, exact and not, and whether exact completions are equal."""
    real = llm.tokenizer is not None
    prompts = [llm.encode(prompt["plain"])[-LONGEST:] for prompt in stdlib_prompts(3)] if real else []
    generator = torch.Generator().manual_seed(0)
    prompts = prompts or [torch.randint(3, 1000, (60,), generator=generator).tolist() for _ in range(2)]
    seconds: dict[str, list[float]] = {}
    texts: dict[str, list[Any]] = {}
    for turn in range(settings["rounds"]):
        for exact in (True, False) if turn % 2 else (False, True):
            take(llm, exact)
            for method in METHODS:
                name = f"{'exact' if exact else 'ordinary'} {method}"
                begin = perf_counter()
                texts[name] = [
                    llm.generate(
                        prompt,
                        drafter=method,
                        max_new_tokens=settings["new_tokens"],
                        ignore_eos=True,
                        temperature=0.0 if real else 1.0,
                        seed=0,
                    )
                    for prompt in prompts
                ]
                seconds.setdefault(name, []).append(perf_counter() - begin)
    tokens = settings["new_tokens"] * len(prompts)
    plain, drafted = ([x.tokens for x in texts[f"exact {method}"]] for method in METHODS)
    return {
        "rates": {name: tokens / min(spent) for name, spent in seconds.items()},
        "texts": len(prompts),
        "differ": sum(a != b for a, b in zip(plain, drafted, strict=True)),
    }


def body(lines: list[dict[str, Any]]) -> list[str]:
    """The page's tables: completions that differ, by mode and temperature, then the costs by model and method."""
    rows = []
    groups = [line for line in lines if "cost" not in line]
    for temperature, ordinary in sorted({(line["temperature"], not line["exact"]) for line in groups}):
        some = [x for x in groups if (x["temperature"], not x["exact"]) == (temperature, ordinary)]
        count = sum(len(line["first_differences"]) for line in some)
        tokens = sum(line["tokens"] for line in some)
        rows.append(
            [
                "ordinary (the control)" if ordinary else "`exact=True`",
                f"{temperature:g}",
                f"{sum(line['differ'] for line in some)} of {count}",
                str(tokens),
                f"{sum(line['compression'] * line['tokens'] for line in some) / tokens:.2f}",
                *(
                    f"{1000 * sum(line[name] for line in some) / tokens:.1f}"
                    for name in ("plain_s", "drafted_s")
                ),
            ]
        )
    heads = ["mode", "temperature", "texts that differ", "tokens", "tokens per step"]
    heads += ["processor ms per token, plain", "drafted"]
    count = max((line["texts"][1] for line in groups), default=0)
    new_tokens = max((line["new_tokens"] for line in groups), default=0)
    text = [
        f"Prompts: {count} functions of Python's standard library without their bodies, at most {LONGEST} tokens of "
        f"each, and {new_tokens} new tokens. Several texts at a time:",
        "",
        markdown_table(heads, rows),
        "",
    ]

    costs = []
    slower = 0
    for line in lines:
        for method in METHODS if "cost" in line else ():
            exact, other = (line["rates"][f"{mode} {method}"] for mode in ("exact", "ordinary"))
            differ = f"{line['differ']} of {line['texts']}"
            slower += exact < other
            rates = [f"{other:.1f}", f"{exact:.1f}", f"{exact / other:.2f}"]
            costs.append([line["cost"], line["dtype"], method, *rates, differ])
    heads = ["model", "dtype", "method", "tokens/s", "exact", "ratio", "exact texts that differ"]
    new_tokens = max((line["new_tokens"] for line in lines if "cost" in line), default=0)
    return [
        *text,
        f"One text at a time, {new_tokens} tokens each: the first of these prompts greedily, and for the 0.5b shape, "
        "which has random weights, random tokens at temperature 1:",
        "",
        markdown_table(heads, costs, texts=3),
        "",
        "Exact mode is for output that must be equal, not for speed: it is slower than ordinary decoding in "
        f"{slower} of these {len(costs)} lines.",
    ]


def load(given: argparse.Namespace, settings: dict[str, Any]) -> LLM:
    if settings.get("cost") == "0.5b":
        return LLM(build("0.5b", getattr(torch, settings["dtype"]), 2048), None)
    return lookahead.load(given.model, dtype=settings["dtype"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="default: SmolLM2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument(
        "--controls", type=int, default=10, help="prompts that are also decoded without exact"
    )
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--method", default="adaptive")
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cost-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--records", type=Path, default=Path("build/results/exact.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/exact"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    # Find the groups of this commit that the records do not have yet.
    given.records.parent.mkdir(parents=True, exist_ok=True)
    saved = {line["key"]: line for line in read_records(given.records, "key", "this command")}
    jobs = [*text_jobs(given), *cost_jobs(given)]
    todo = [job for job in jobs if job[0] not in saved]
    print(f"{len(todo)} of {len(jobs)} groups to do", flush=True)

    # Measure them.
    spent = 0.0
    size = 0.0
    llm = None
    about: dict[str, Any] = {}
    with RecordWriter(given.records, append=True) as out:
        for number, (key, part, settings) in enumerate(todo):
            model = {name: settings.get(name) for name in ("cost", "dtype")}
            if model != about:
                llm = load(given, settings)
                about = model
            assert llm is not None
            begin = perf_counter()
            measured = measure_cost(llm, settings) if "cost" in settings else measure_texts(llm, settings)
            spent += perf_counter() - begin
            size += part
            saved[key] = {"key": key, "load": os.getloadavg()[0]} | environment() | settings | measured
            out.write(saved[key])
            left = sum(job[1] for job in todo[number + 1 :]) * spent / size
            print(
                f"{number + 1}/{len(todo)} {json.dumps(settings)}: {measured['differ']} differ; "
                f"about {left / 60:.0f} minutes left",
                flush=True,
            )

    # Write the page.
    lines = [saved[key] for key, _, _ in jobs]
    name = Path(given.model or "SmolLM2-135M-Instruct").name
    both = {"model": f"{name} and a 0.5B shape", "dtype": f"{given.dtype}, cost also in float32"}
    loads = [line["load"] for line in lines]
    both["load"] = max(loads)
    require_one_origin(line | both for line in lines)
    title = "Exact mode: completions that differ, and cost"
    write_report(given.out, title, lines[0] | both | {"path": "transformers"}, lines, body(lines), loads)


if __name__ == "__main__":
    main()

"""Our drafting on vLLM alongside its own methods: tokens per step, speed and equality, at several numbers of clients.

    python -m benchmarks.vllm MODEL --data DIR --limit 3 --tokens 48 --clients 1,4,16 --out docs/results/vllm

Run it with a Python that has vLLM and this package. MODEL is a folder that vLLM loads. Each method and number of
clients runs in a separate process (``vllm_run``), so that nothing learned in one run serves another; within a run,
what is learned from one sequence serves the next, as in a server. A client sends its next prompt when its last
completion has ended. Recorded runs of the same commit are not repeated, so an interrupted command continues. Greedy,
eager mode. A last table (``chain_s``) gives the cost of vLLM's interface in S: the same prompts on this library's own
engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from lookahead.bench import Records
from lookahead.bench.record import commit, environment, key_of
from lookahead.cli.shared import numbers
from lookahead.core import LookaheadError, SettingsError
from lookahead.drafters.adaptive.settings import SOURCES

from .chain_s import rows_of, table
from .datasets import SETS, load_workload
from .page import reason_of, write_report
from .report import markdown_table
from .vllm_run import RESULT

PLAIN, NGRAM, OURS = "plain", "ngram", "ours"
_OURS = {"method": "custom_class", "model": "lookahead.integrations.vllm.Proposer"}
#: Name -> vLLM's speculative_config without the number of tokens; None for plain decoding, which is measured twice.
METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "plain, a second run": None,
    NGRAM: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    "ours, always drafting": _OURS,
    OURS: _OURS,
}
#: additional_config of a method. Always drafting shows the value of drafts when rows are free, as on most GPUs.
ADDITIONAL = {"ours, always drafting": {"lookahead": f"adaptive:rows=64:sources={'+'.join(SOURCES)}"}}
#: Numbers of drafted tokens that vLLM recommends for suffix decoding.
RECOMMENDED = (16, 32)
Record = dict[str, Any]


def measure(given: Record) -> Record:
    """One run in a separate process.

    Raises:
        LookaheadError: it ended without a result.
    """
    command = [sys.executable, "-m", "benchmarks.vllm_run"]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            result: Record = json.loads(line.removeprefix(RESULT))
            return result
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    raise LookaheadError(f"a run must end with its result, and it ended with {said[-1]}")


def s_of(record: Record, name: str | None = None) -> float:
    """Tokens per step after the prompts, of one data set or of all."""
    chosen = [place for place, of in enumerate(record["sets"]) if name in (None, of)]
    tokens = sum(len(record["texts"][place]) - 1 for place in chosen)
    return tokens / max(1, sum(record["steps"][place] for place in chosen))


def page(records: Sequence[Record]) -> list[str]:
    """A table for each number of clients."""
    lines: list[str] = []
    by_run = {(record["method"], record["clients"]): record for record in records}
    alone = by_run.get((PLAIN, min(record["clients"] for record in records)))
    for clients in sorted({record["clients"] for record in records}):
        plain, ngram = by_run.get((PLAIN, clients)), by_run.get((NGRAM, clients))
        rows = []
        for name in METHODS:
            record = by_run.get((name, clients))
            if record is None:
                continue
            tokens, seconds = record["decoding"]
            rows.append(
                [
                    name,
                    *(f"{s_of(record, one):.2f}" for one in SETS),
                    f"{s_of(record):.2f}",
                    f"{sum(map(len, record['texts'])) / record['seconds']:.1f}",
                    f"{tokens / seconds:.1f}",
                    f"{1000 * record['step']:.0f}",
                    *(_equal(record, other) for other in (plain, alone)),
                ]
            )
            if ngram is not None and name not in (PLAIN, NGRAM) and s_of(record) > 1:
                ratios = (f"{s_of(record, one) / s_of(ngram, one):.2f}" for one in SETS)
                rows.append(["… against ngram", *ratios, f"{s_of(record) / s_of(ngram):.2f}", *[""] * 5])
        head = ["S", *SETS, "all", "tokens/s", "decoding", "ms per step", "equal", "equal to 1 client"]
        lines += [f"## {clients} client{'s' if clients > 1 else ''}", "", markdown_table(head, rows), ""]
    return lines


def _equal(record: Record, other: Record | None) -> str:
    """Number of equal completions of two runs."""
    if other is None:
        return ""
    same = sum(a == b for a, b in zip(record["texts"], other["texts"], strict=True))
    return f"{same} of {len(record['texts'])}"


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each data set")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, default=5, help="num_speculative_tokens of every method")
    parser.add_argument("--longest", type=int, default=2048, help="max_model_len")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", action="append", choices=list(METHODS), help="all without it; repeatable")
    parser.add_argument("--records", type=Path, default=Path("build/results/vllm"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/vllm"))
    arguments = parser.parse_args(words)
    if arguments.limit < 1:
        parser.error(f"--limit must be at least 1, got {arguments.limit}")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [
        (name, prompt.tokens(tokenizer)[: arguments.longest - arguments.tokens - 1])
        for name in SETS
        for prompt in load_workload(name, arguments.limit, data=arguments.data)
    ]
    # Prompts of one set arrive at different times, as in a server.
    prompts = [pair for _, pair in sorted(enumerate(prompts), key=lambda entry: entry[0] % arguments.limit)]
    store, chosen = Records(arguments.records), []
    failed: dict[str, str] = {}
    known = {record["key"]: record for record in store.read() if record["commit"] == commit()}
    for clients in numbers(arguments.clients, "--clients"):
        for method in arguments.method or METHODS:
            speculative = METHODS[method]
            engine = {
                "model": str(arguments.model),
                "dtype": arguments.dtype,
                "max_model_len": arguments.longest,
                "enable_prefix_caching": False,
                "speculative_config": speculative
                and speculative | {"num_speculative_tokens": arguments.drafted},
                "additional_config": ADDITIONAL.get(method, {}),
            }
            given = {"tokens": arguments.tokens, "clients": clients, "engine": engine}
            given["prompts"] = [ids for _, ids in prompts]
            key = key_of(method, given)
            if key not in known:
                try:
                    measured = measure(given)
                except LookaheadError as error:  # the rest of the page is made
                    failed[f"{method}, {clients} client{'s' if clients > 1 else ''}"] = reason_of(error)
                    continue
                known[key] = {
                    "key": key,
                    "method": method,
                    "clients": clients,
                    "sets": [name for name, _ in prompts],
                    "load": os.getloadavg()[0],
                    **environment(),
                    **measured,
                }
                store.append(known[key])
                print(f"{method}, {clients} clients: S {s_of(known[key]):.2f}", flush=True)
            chosen.append(known[key])
    if not chosen:
        raise SettingsError(f"nothing was measured: {failed}")
    record = chosen[-1] | {"model": arguments.model.name, "dtype": arguments.dtype}
    record["load"] = max(each["load"] for each in chosen)
    figures = [
        {name: each[name] for name in ("method", "clients", "seconds", "decoding", "step", "load")}
        | {"S": {one: s_of(each, one) for one in SETS}, "all": s_of(each)}
        for each in chosen
    ]
    least, most = RECOMMENDED
    more = f"; vLLM recommends {least} or {most} for suffix decoding, which was not measured"
    chains = rows_of(
        str(arguments.model),
        arguments.dtype,
        arguments.data,
        arguments.limit,
        arguments.tokens,
        arguments.drafted,
    )
    body = [
        f"vLLM {record['vllm']}, eager mode, no prefix caching, at most {arguments.drafted} drafted tokens for every "
        f"method{more if arguments.drafted < least else ''}. "
        f"S is tokens per step after the prompt. {len(prompts)} texts of {arguments.tokens} tokens. "
        "tokens/s counts everything; decoding: steps in which no prompt is evaluated. "
        "Each line is one run, in this order: a difference in tokens/s no larger than that between the two runs of "
        "plain decoding is noise. Equal: to plain decoding with as many clients. vLLM rounds a row differently in "
        "batches of other sizes, so texts may differ with drafts, and those of plain decoding with several clients "
        "from those with one.",
        "",
        *page(chosen),
        *(f"- {name} failed: {reason}" for name, reason in failed.items()),
        "",
        "## The same prompts on this library's own engine",
        "",
        "Every step drafts, one text at a time; each line takes away something that vLLM's interface does not allow.",
        "",
        table(chains),
        "",
    ]
    loads = [each["load"] for each in chosen]
    kept = [[name, every] for name, *_, every in chains]
    write_report(arguments.out, "Drafting on vLLM", record, figures, body, loads, failed=failed, chains=kept)


if __name__ == "__main__":
    try:
        main()
    except LookaheadError as error:
        sys.exit(f"error: {error}")

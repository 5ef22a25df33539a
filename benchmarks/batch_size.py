"""Up to how many sequences does drafting pay off? Tokens per second by batch size, and the memory of drafters.

    python -m benchmarks.batch_size [MODEL] --data DIR

Every batch size decodes the same prompts, alternating plain decoding and adaptive, and all completions are compared.
In the last line there are as many prompts as sequences, so that no prompt waits.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lookahead
from lookahead.bench import ModelUnderTest, RunOptions
from lookahead.bench.methods import PLAIN, make_request
from lookahead.bench.record import environment
from lookahead.core import Engine, LookaheadError
from lookahead.drafters import as_drafter

from .datasets import load_workload
from .page import write_report
from .report import markdown_table

WORKLOADS = ("humaneval", "gsm8k", "mbpp", "classeval", "mt-bench", "spec-bench")
METHODS = (PLAIN, "adaptive")
SIZES = (1, 2, 4, 8)
DRAFTERS = (PLAIN, "prompt-lookup", "lookahead", "adaptive")
#: Files whose allocations count as a drafter's.
OF_DRAFTERS = [tracemalloc.Filter(True, f"*/lookahead/{part}") for part in ("drafters/*", "core/drafter.py")]


def speeds(
    llm: Any, prompts: Sequence[list[int]], size: int, repeats: int, new_tokens: int
) -> dict[str, Any]:
    """One line of the table: ``size`` sequences at a time; a waiting prompt replaces one that ends."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    texts: dict[str, list[list[int]]] = {}
    steps = rows = new = 0
    for _ in range(repeats):
        for method in METHODS:
            start = perf_counter()
            found = llm.generate(prompts, drafter=method, max_new_tokens=new_tokens, batch_size=size)
            took = perf_counter() - start
            seconds[method].append(took - sum(result.stats.seconds["prefill"] for result in found))
            texts[method] = [result.tokens for result in found]
            if method == "adaptive":
                steps += sum(result.stats.steps for result in found)
                rows += sum(result.stats.rows for result in found)
                new += sum(len(result.tokens) - 1 for result in found)
    tokens = sum(map(len, texts[PLAIN]))
    ratios = [plain / ours for plain, ours in zip(*(seconds[method] for method in METHODS), strict=True)]
    equal = sum(a == b for a, b in zip(*(texts[method] for method in METHODS), strict=True))
    return {
        "batch": size,
        **{method: round(tokens / median(seconds[method]), 1) for method in METHODS},
        "speedup": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "S": round(new / steps, 3),
        "rows": round(rows / steps, 2),
        "equal": equal,
        "texts": len(prompts),
    }


def memory(llm: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Bytes of the weights (None if packed), of the KV cache per token, and of a drafter's state per sequence.

    A drafter's bytes are those that ``tracemalloc`` attributes to its own files while it is alive: Python objects and
    numpy arrays. The cache, the prompt and the prefill's activations are not included.
    """
    target = llm.target()
    target.prefill([(0, prompt)])
    storage = getattr(getattr(target, "cache", None), "storage", None)
    target.release(0)
    model = ModelUnderTest.of(llm)
    kept = {}
    for name in DRAFTERS:
        for traced in (False, True):  # the first run compiles and imports
            if traced:
                tracemalloc.start()
            drafter = as_drafter(name)
            request = make_request(model, prompt, drafter, RunOptions(new_tokens))
            engine = Engine(lambda: model.target, prepare=lambda drafter, _: model.prepare(drafter))
            sequence = engine.add(request)  # keeps the drafter's state alive
            while engine.busy:
                engine.step()
            if traced:
                gc.collect()
                snapshot = tracemalloc.take_snapshot().filter_traces(OF_DRAFTERS)
                tracemalloc.stop()
                kept[name] = sum(trace.size for trace in snapshot.traces)
    per_token = storage[0].nbytes / storage[0].shape[2] if storage is not None else None
    # Packed weights take as much as in their file, and are not parameters of a module.
    module = getattr(llm.model, "module", None)
    weights = sum(parameter.nbytes for parameter in module.parameters()) if module is not None else None
    tokens = len(prompt) + len(sequence.tokens)
    return {"weights": weights, "cache per token": per_token, "tokens": tokens, "kept": kept}


def body(lines: Sequence[dict[str, Any]], held: dict[str, Any]) -> list[str]:
    """The page's tables."""
    headings = [
        "sequences",
        "plain, tokens/s",
        "adaptive, tokens/s",
        "speed-up",
        "lowest",
        "S",
        "rows per sequence",
    ]
    rows = [
        [
            f"{x['batch']}{', none waiting' if x['texts'] <= x['batch'] else ''}",
            f"{x[PLAIN]:.1f}",
            f"{x['adaptive']:.1f}",
            f"{x['speedup']:.2f}",
            f"{x['least']:.2f}",
            f"{x['S']:.2f}",
            f"{x['rows']:.2f}",
            f"{x['equal']} of {x['texts']}",
        ]
        for x in lines
    ]
    weights = f" (weights {held['weights'] / 1e6:.0f} MB)" if held["weights"] else ""
    sizes = {f"what {name} keeps": size for name, size in held["kept"].items()}
    if held["cache per token"]:
        sizes = {"the KV cache": held["cache per token"] * held["tokens"], **sizes}
    return [
        markdown_table([*headings, "equal"], rows),
        "",
        "Seconds without the prefills. Plain and adaptive alternate: tokens/s are medians over their runs, speed-up "
        "is the median of the ratios of paired runs (not the ratio of the two medians), and lowest the smallest of "
        "these ratios. A waiting text takes the place of one that ends. In the last line none waits: texts that end "
        "early leave the others behind.",
        "",
        f"Memory{weights} at the end of a text of {held['tokens']} tokens:",
        "",
        markdown_table(["", "MB"], [[name, f"{size / 1e6:.3f}"] for name, size in sizes.items()]),
    ]


def about(given: argparse.Namespace, texts: int) -> str:
    """A sentence about the prompts."""
    sets = f"{', '.join(WORKLOADS[:-1])} and {WORKLOADS[-1]}"
    return (
        f"Prompts: {given.limit} of each of {sets}, {texts} in all; at most "
        f"{given.max_new_tokens} new tokens for each. Each line has {given.repeats} pairs of runs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="as for lookahead.load (default: the library's default model)"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each data set")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results/batch-size"), help="figures, without suffix"
    )
    given = parser.parse_args()
    llm = lookahead.load(given.model, dtype=given.dtype)
    sets = [load_workload(name, given.limit, 0, given.data) for name in WORKLOADS]
    prompts = [prompt.tokens(llm.tokenizer) for some in sets for prompt in some]
    for method in METHODS:  # compile, and measure step times
        llm.generate(prompts[:2], drafter=method, max_new_tokens=32)
    load = os.getloadavg()[0]
    lines = []
    for size, some in [*((size, prompts) for size in SIZES), (SIZES[-1], prompts[: SIZES[-1]])]:
        lines.append(speeds(llm, some, size, given.repeats, given.max_new_tokens))
        print(lines[-1], file=sys.stderr, flush=True)
    record = environment() | {"model": llm.name, "dtype": llm.dtype, "path": llm.path, "load": load}
    held = memory(llm, max(prompts, key=len), given.max_new_tokens)
    text = [about(given, len(prompts)), "", *body(lines, held)]
    write_report(given.out, "Batch size and memory", record, lines, text, memory=held)


if __name__ == "__main__":
    try:
        main()
    except LookaheadError as error:
        sys.exit(f"error: {error}")

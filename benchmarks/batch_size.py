"""Where does drafting stop to pay? Tokens per second by the number of sequences that share a pass, and memory.

    python -m benchmarks.batch_size [MODEL] --data DIR --limit 2 --out docs/results/batch-size

The same prompts at every batch size, plain decoding and adaptive in turns, all texts compared; at last as many
prompts as sequences, so that none takes the place of one that ends. Memory: the cache by its own arrays; what a
method keeps for one text by ``tracemalloc``, which sees Python's objects and numpy's arrays.
"""

from __future__ import annotations

import argparse
import os
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.summary import markdown_table
from lookahead.bench.workloads import load_workload
from lookahead.core import LookaheadError

from .page import write_page

WORKLOADS = ("humaneval", "gsm8k", "mbpp", "classeval", "mt-bench", "spec-bench")
PLAIN, METHODS = "autoregressive", ("autoregressive", "adaptive")
SIZES = (1, 2, 4, 8)


def speeds(
    llm: Any, prompts: Sequence[list[int]], size: int, repeats: int, new_tokens: int
) -> dict[str, Any]:
    """One line of the table: ``size`` sequences at a time, whose places others take when they end."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    texts: dict[str, list[list[int]]] = {}
    steps = rows = new = 0
    for _ in range(repeats):
        for method in METHODS:
            start = perf_counter()
            found = llm.generate(prompts, method=method, max_new_tokens=new_tokens, batch_size=size)
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
        "batch": size, **{method: round(tokens / median(seconds[method]), 1) for method in METHODS},
        "speedup": round(median(ratios), 3), "least": round(min(ratios), 3), "S": round(new / steps, 3),
        "rows": round(rows / steps, 2), "equal": equal, "texts": len(prompts),
    }  # fmt: skip


def memory(llm: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Bytes of the cache for each token, and of what each method keeps for one text at its largest."""
    target = llm.target()
    target.prefill([(0, prompt)])
    storage = getattr(getattr(target, "cache", None), "storage", None)
    kept = {}
    for method in ("autoregressive", "prompt-lookup", "lookahead", "adaptive"):
        llm.generate([prompt], method=method, max_new_tokens=new_tokens)  # compiled and imported
        tracemalloc.start()
        (result,) = llm.generate([prompt], method=method, max_new_tokens=new_tokens)
        kept[method] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    per_token = storage[0].nbytes / storage[0].shape[2] if storage is not None else None
    weights = sum(parameter.nbytes for parameter in llm.model.parameters())
    tokens = len(prompt) + len(result.tokens)
    return {"weights": weights, "cache per token": per_token, "tokens": tokens, "peak": kept}


def body(lines: Sequence[dict[str, Any]], kept: dict[str, Any]) -> list[str]:
    """The page's tables."""
    rows = [
        [f"{x['batch']}", f"{x[PLAIN]:.1f}", f"{x['adaptive']:.1f}", f"{x['speedup']:.2f}", f"{x['least']:.2f}",
         f"{x['S']:.2f}", f"{x['rows']:.2f}", f"{x['equal']} of {x['texts']}"] for x in lines
    ]  # fmt: skip
    heads = [
        "at a time",
        "plain, tokens/s",
        "adaptive, tokens/s",
        "speed-up",
        "least",
        "S",
        "rows a sequence",
    ]
    sizes = {f"a run of {method}, all of its Python and numpy": size for method, size in kept["peak"].items()}
    if kept["cache per token"]:
        sizes = {"the cache": kept["cache per token"] * kept["tokens"], **sizes}
    return [
        markdown_table([*heads, "equal"], rows), "",
        "Seconds less the prefills; medians of paired runs. A text that ends makes room for one that waits; in the "
        "last line none waits: texts that end early leave the others behind, which have waited for their drafts.", "",
        f"Memory: weights {kept['weights'] / 1e6:.0f} MB. For a text of {kept['tokens']} tokens, at its peak:", "",
        markdown_table(["", "MB"], [[name, f"{size / 1e6:.2f}"] for name, size in sizes.items()]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="as lookahead.load takes it; the default model if not given")
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets by name")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each data set")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("docs/results/batch-size"), help="page and JSON")
    given = parser.parse_args()
    llm = lookahead.load(given.model, dtype=given.dtype)
    sets = [load_workload(name, given.limit, 0, given.data) for name in WORKLOADS]
    prompts = [prompt.tokens(llm.tokenizer) for some in sets for prompt in some]
    for method in METHODS:  # compiled, and step times learnt
        llm.generate(prompts[:2], method=method, max_new_tokens=32)
    load, lines = os.getloadavg()[0], []
    for size, some in [*((size, prompts) for size in SIZES), (SIZES[-1], prompts[: SIZES[-1]])]:
        lines.append(speeds(llm, some, size, given.repeats, given.max_new_tokens))
        print(lines[-1], file=sys.stderr, flush=True)
    record = environment() | {"model": llm.name, "dtype": llm.dtype, "path": llm.path, "load": load}
    kept = memory(llm, max(prompts, key=len), given.max_new_tokens)
    print(write_page(given.out, "Batch size and memory", record, lines, body(lines, kept), memory=kept))


if __name__ == "__main__":
    try:
        main()
    except LookaheadError as error:
        sys.exit(f"error: {error}")

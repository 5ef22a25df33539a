"""t(k): the time of one step of k rows, on the transformers path and on the compiled CPU path, side by side.

    python -m benchmarks.step                                  every model, dtype, context and row count
    python -m benchmarks.step --models SmolLM2 --dtypes bf16 --contexts 128

SmolLM2, and random weights of a larger Llama shape. The two paths alternate in every round; medians over the rounds
are printed, together with two lower bounds from rates measured in the same run: the bytes of all weights over the
read bandwidth of a buffer of that size, and the operations of the linear layers over the matrix rate, which bounds
many rows on a CPU without AMX. Every row of the tree needs its logits, the most expensive case for the LM head. A
compiled path that the check at load rejects is not timed, nor is one whose logits differ on the timed tree.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead.bench.record import environment
from lookahead.core import TokenTree
from lookahead.hf.paths import make_target

from .page import write_report
from .report import markdown_table

REAL = "SmolLM2"
#: hidden, layers, heads, key heads, head size, feed-forward, vocabulary
SHAPES = {"0.5b": (896, 24, 14, 2, 64, 4864, 151936), "1b": (2048, 16, 32, 8, 64, 8192, 128256)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Largest accepted difference between the two paths' logits, in standard deviations. Correct passes of SmolLM2 with 1
#: to 128 rows differ by up to 0.34 and 5e-5. A single wrong ancestor of one row causes at least 0.75.
AGREE = {"bf16": 0.5, "fp32": 1e-3}


def sample_tree(rows: int, vocabulary: int) -> TokenTree:
    """Branches of four tokens below the root, like candidates; every row needs its logits."""
    tree = TokenTree(1 % vocabulary)
    token = 2
    while len(tree) < rows:
        tree.add_candidate([(token + i) % vocabulary for i in range(min(4, rows - len(tree)))])
        token += 5
    return tree


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, after an uncounted one."""
    call()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 5 or (perf_counter() - begin < 0.2 and len(times) < 1000):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def read_bandwidth(size: int, dtype: torch.dtype) -> float:
    """Bytes per second of reading ``size`` bytes once: the better of a maximum and a matrix-vector product.

    A buffer that fits in a processor cache is read from there, like the weights of a small model.
    """
    matrix = torch.ones(max(8, size // (1024 * dtype.itemsize)), 1024, dtype=dtype)
    flat = matrix.view(-1).view(torch.int32) if dtype.itemsize == 2 else matrix.view(-1)
    calls: list[Callable[[], Any]] = [lambda: torch.mv(matrix, matrix[0]), flat.max]
    return matrix.nbytes / min(timed(call) for call in calls)


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations per second (a multiply-add is two) of the best of some large matrix products."""
    squares = [torch.ones(size, size, dtype=dtype) for size in (512, 1024, 2048)]
    return max(2 * len(a) ** 3 / timed(partial(torch.mm, a, a)) for a in squares)


def build(shape: str, dtype: torch.dtype, positions: int) -> LlamaForCausalLM:
    """A Llama of this shape with random weights and tied embeddings."""
    hidden, layers, heads, key_heads, size, inner, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def measure(
    name: str, dtype: str, contexts: list[int], rows: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """One line for each context and number of rows; times in milliseconds."""
    kind = DTYPES[dtype]
    longest = max(contexts) + 512
    model = lookahead.load(dtype=kind).model if name == REAL else build(name, kind, longest)
    reference = make_target(model, path="transformers")
    compiled = make_target(model)
    if compiled.path != "cpu":
        raise SystemExit(f"error: {name} in {dtype} must take the compiled path: {compiled.reason}")
    elements = sum(p.numel() for p in model.parameters())
    size = kind.itemsize
    floor = elements * size / read_bandwidth(elements * size, kind) * 1e3
    per_row = 2 * elements / matrix_rate(kind) * 1e3
    for context in contexts:
        prompt = [(101 * i + 7) % compiled.vocabulary for i in range(context)]
        for target in (reference, compiled):
            target.prefill([(0, prompt)])
        for k in rows:
            tree = sample_tree(k, compiled.vocabulary)
            difference = _difference(reference, compiled, tree)
            if not difference <= AGREE[dtype]:
                raise SystemExit(f"error: {name} {dtype} {context} {k}: the paths differ by {difference:.3g}")
            slow, quick = _paired(reference, compiled, tree, rounds)
            yield {
                "model": name,
                "dtype": dtype,
                "context": context,
                "rows": k,
                "transformers": slow,
                "cpu": quick,
                "bytes_floor": floor,
                "operations_floor": k * per_row,
            }
        for target in (reference, compiled):
            target.release(0)


def _difference(reference: Any, compiled: Any, tree: TokenTree) -> float:
    """The largest difference of the two paths' logits, in standard deviations of the row."""
    a = reference.forward([(0, tree)])[0]
    b = compiled.forward([(0, tree)])[0]
    return max(
        float((a.row(n).float() - b.row(n).float()).abs().max() / a.row(n).float().std())
        for n in range(len(tree))
    )


def _paired(reference: Any, compiled: Any, tree: TokenTree, rounds: int) -> list[float]:
    """Median milliseconds of a step on each path.

    The paths alternate every few steps. OpenMP's threads spin for a while after torch's parallel calls; the sleep
    between turns keeps the threads of one path from slowing the other.
    """
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for target, mine in zip((reference, compiled), times, strict=True):
            sleep(0.05)
            for turn in range(2 + -(-rounds // 3)):
                start = perf_counter()
                target.forward([(0, tree)])[0].best(0)
                if turn >= 2:
                    mine.append((perf_counter() - start) * 1e3)
    return [statistics.median(mine) for mine in times]


def row(line: dict[str, Any]) -> list[str]:
    """One row of the table."""
    slow = line["transformers"]
    quick = line["cpu"]
    floors = line["bytes_floor"], line["operations_floor"]
    times = [slow, quick, slow / quick, *floors, quick / max(floors)]
    return [
        line["model"],
        line["dtype"],
        str(line["context"]),
        str(line["rows"]),
        *(f"{t:.2f}" for t in times),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    models = [REAL, *SHAPES]
    add("--models", nargs="+", default=models[:2], choices=models)
    add("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    add("--contexts", nargs="+", type=int, default=[128, 1024])
    add("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128])
    add("--rounds", type=int, default=15)
    add("--out", type=Path, default=Path("build/results/step"), help="figures, without suffix")
    given = parser.parse_args()
    lines = []
    load = os.getloadavg()[0]
    for name, dtype in product(given.models, given.dtypes):
        for line in measure(name, dtype, given.contexts, given.rows, given.rounds):
            lines.append(line)
            print(*row(line), flush=True)
    where = {
        **environment(),
        "model": " and ".join(given.models),
        "dtype": " and ".join(given.dtypes),
        "load": load,
    }
    heads = ["model", "dtype", "context", "rows", "transformers, ms", "compiled, ms", "ratio", "floor: bytes"]
    heads += ["floor: operations", "compiled / floor"]
    body = [
        f"Medians of {given.rounds}. SmolLM2's own weights; random ones of the larger shape. A neighbour's traffic "
        "moves the read bandwidth, which is measured once for each model and dtype: a step under its floor met a "
        "better minute.",
        "",
        markdown_table(heads, (row(line) for line in lines), texts=2),
    ]
    write_report(given.out, "The step on a CPU: t(k) on both paths, and its lower bounds", where, lines, body)


if __name__ == "__main__":
    main()

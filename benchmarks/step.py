"""t(k): the time of one step of k rows, on the transformers path and on the compiled CPU path, side by side.

    python benchmarks/step.py                                  every shape, dtype, context and row count
    python benchmarks/step.py --shapes 135m --dtypes bf16 --contexts 128 --rounds 5

Random weights of known Llama shapes, so nothing is downloaded. The two paths take turns in every round, and
medians over the rounds are printed. Two floors stand beside them, from rates measured in the same run: the
bytes of all weights over the read bandwidth of a buffer of that size, and
the operations of the linears over the matrix rate, which is what bounds many rows on a CPU without AMX.
Every row of the tree is read, which is the most expensive case for the LM head. Compiled logits are compared with the
transformers path's before anything is timed, and a wrong result is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead.bench.record import environment
from lookahead.bench.step_cost import sample_tree
from lookahead.core import TokenTree
from lookahead.targets.cpu import CpuTarget
from lookahead.targets.factory import make_target

SHAPES = {
    "bundled": (256, 6, 4, 2, 64, 704, 4096),
    "135m": (576, 30, 9, 3, 64, 1536, 49152),
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AGREE = {"bf16": 0.25, "fp32": 1e-3}


@dataclass
class Line:
    """One measured cell; times in milliseconds, medians of ``rounds``."""

    shape: str
    dtype: str
    context: int
    rows: int
    transformers: float
    cpu: float
    floor: float
    matrix_floor: float
    difference: float
    rounds: int
    layout: str


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
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

    A buffer that fits a processor cache is read from there, as the weights of a small model are.
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
    """A Llama of the shape with random weights, tied embeddings."""
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


def measure(shape: str, dtype: str, contexts: list[int], rows: list[int], rounds: int) -> list[Line]:
    """All cells of one model."""
    model = build(shape, DTYPES[dtype], max(contexts) + 512)
    reference, compiled = make_target(model, path="transformers"), make_target(model, path="cpu")
    assert isinstance(compiled, CpuTarget)
    elements, size = sum(p.numel() for p in model.parameters()), DTYPES[dtype].itemsize
    floor = elements * size / read_bandwidth(elements * size, DTYPES[dtype]) * 1e3
    per_row = 2 * elements / matrix_rate(DTYPES[dtype]) * 1e3
    lines = []
    for context in contexts:
        prompt = [(101 * i + 7) % compiled.vocabulary for i in range(context)]
        for target in (reference, compiled):
            target.prefill([(0, prompt)])
        for k in rows:
            tree = sample_tree(k, compiled.vocabulary)
            difference = _difference(reference, compiled, tree)
            if not difference <= AGREE[dtype]:
                raise SystemExit(f"{shape} {dtype} {context} {k}: the paths differ by {difference:.3g}")
            times = _paired(reference, compiled, tree, rounds)
            line = Line(
                shape,
                dtype,
                context,
                k,
                *times,
                floor,
                k * per_row,
                difference,
                rounds,
                compiled.compiled.layout,
            )
            lines.append(line)
            print(row(line), flush=True)
        for target in (reference, compiled):
            target.release(0)
    return lines


def _difference(reference: Any, compiled: Any, tree: TokenTree) -> float:
    """Of the two paths' logits, in standard deviations of the logits."""
    a, b = reference.forward([(0, tree)])[0], compiled.forward([(0, tree)])[0]
    return max(
        float((a.row(n).float() - b.row(n).float()).abs().max() / a.row(n).float().std())
        for n in range(len(tree))
    )


def _paired(reference: Any, compiled: Any, tree: TokenTree, rounds: int) -> list[float]:
    """Median milliseconds of a step on each path.

    The paths take turns of a few steps. OpenMP's threads go on spinning for a while after torch's parallel calls,
    in decoding as here, but on one path alone they are no concern of the other: the paths sleep in between.
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


HEADER = (
    "| shape | dtype | context | rows | transformers ms | cpu ms | ratio | floor: bytes | floor: operations "
    "| cpu / floor |\n|---|---|---|---|---|---|---|---|---|---|"
)


def row(line: Line) -> str:
    """One line of the table."""
    return (
        f"| {line.shape} | {line.dtype} | {line.context} | {line.rows} | {line.transformers:.2f} "
        f"| {line.cpu:.2f} | {line.transformers / line.cpu:.2f} | {line.floor:.2f} | {line.matrix_floor:.2f} "
        f"| {line.cpu / max(line.floor, line.matrix_floor):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's own choice by default")
    parser.add_argument("--out", type=Path, help="append the lines to this file, as JSON")
    parser.add_argument(
        "--table", type=Path, help="measure nothing: print the lines of such a file as a table"
    )
    options = parser.parse_args()
    if options.table:
        print(HEADER)
        fields = Line.__dataclass_fields__
        for text in options.table.read_text().splitlines():
            record = json.loads(text)
            print(row(Line(**{name: record[name if name in record else "lean"] for name in fields})))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = environment()
    print(f"{facts}\ncommand: {' '.join(sys.argv)}\n\n{HEADER}")
    for shape in options.shapes:
        for dtype in options.dtypes:
            lines = measure(shape, dtype, options.contexts, options.rows, options.rounds)
            if options.out:
                with options.out.open("a") as file:
                    for line in lines:
                        record = {**facts, **asdict(line)}
                        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

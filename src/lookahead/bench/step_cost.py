"""t(k): the time of a step of k rows, with what the machine would need at least beside it.

The floor of a step is the larger of two times, both rates measured in the same run:
    bytes       weights and cache that a step must read, over the read bandwidth of a buffer as large as they
    operations  2 x multiply-adds of the linear layers and of attention, over the rate of a large matrix product
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..core import Target, TokenTree
from ..core.records import RecordWriter
from .model import ModelUnderTest
from .pictures import colour, label, new_figure, powers_of_two, save
from .record import Record, describe, environment
from .run import Progress
from .summary import markdown_table

#: heading of the table -> text of a record
COLUMNS: dict[str, Callable[[Record], str]] = {
    "dtype": lambda r: str(r["dtype"]),
    "context": lambda r: str(r["context"]),
    "rows k": lambda r: str(r["rows"]),
    "t(k) ms": lambda r: f"{r['step_ms']:.2f}",
    "floor ms": lambda r: f"{r['floor_ms']:.3f}",
    "t / floor": lambda r: f"{r['step_ms'] / r['floor_ms']:.1f}",
    "by bytes ms": lambda r: f"{r['floor_bytes_ms']:.3f}",
    "by operations ms": lambda r: f"{r['floor_operations_ms']:.3f}",
    "read GB/s": lambda r: f"{r['bandwidth_gb_s']:.1f}",
    "TFLOP/s": lambda r: f"{r['matrix_tflop_s']:.3f}",
}


def timed(
    call: Callable[[], Any],
    device: torch.device,
    seconds: float = 0.25,
    pick: Callable[[list[float]], float] = median,
) -> float:
    """Seconds of a call, the median unless ``pick`` says otherwise, after one that is not counted."""
    call()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 5 or (perf_counter() - begin < seconds and len(times) < 1000):
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return pick(times)


def read_bandwidth(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes per second of reading ``size`` bytes once: the better of a maximum and a matrix-vector product.

    A buffer that fits a processor cache is read from there, as the weights of a small model are.
    """
    matrix = torch.ones(max(8, size // (1024 * dtype.itemsize)), 1024, dtype=dtype, device=device)
    flat = matrix.view(-1).view(torch.int32) if dtype.itemsize == 2 else matrix.view(-1)
    calls: list[Callable[[], Any]] = [lambda: torch.mv(matrix, matrix[0]), flat.max]
    return matrix.nbytes / min(timed(call, device, 0.15, min) for call in calls)


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second (a multiply-add is two) of the best of some large matrix products."""
    squares = [torch.ones(size, size, dtype=dtype, device=device) for size in (512, 1024, 2048)]
    return max(2 * len(a) ** 3 / timed(partial(torch.mm, a, a), device, 0.2, min) for a in squares)


def sample_tree(rows: int, vocabulary: int) -> TokenTree:
    """Branches of four tokens under the root, as candidates are; every row needs its logits."""
    tree = TokenTree(1 % vocabulary)
    token = 2
    while len(tree) < rows:
        tree.add_candidate([(token + i) % vocabulary for i in range(min(4, rows - len(tree)))])
        token += 5
    return tree


def step_seconds(target: Target, context: int, rows: int, device: torch.device) -> float:
    """Seconds of a step: its tree, its pass, and the argmax of the root. Nothing is committed."""
    vocabulary = target.vocabulary
    target.prefill([(0, [(7 * i + 3) % vocabulary for i in range(context)])])
    try:
        return timed(lambda: target.forward([(0, sample_tree(rows, vocabulary))])[0].best(0), device)
    finally:
        target.release(0)


def measure(
    model: ModelUnderTest, contexts: Sequence[int], rows: Sequence[int], progress: Progress
) -> list[Record]:
    """One record per context and number of rows. Times are in milliseconds.

    Args:
        model: with a transformers model.
        contexts: committed tokens, T; those that the model is too short for are left out.
        rows: k.
        progress: told (points measured, points in all, what comes next).
    """
    device, dtype, target = model.model.device, model.model.dtype, model.target
    linears = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    elements = sum(linear.weight.numel() for linear in linears)
    # KV heads and head sizes of keys and values, by layer
    shapes = [shape for shape in getattr(getattr(target, "facts", None), "shapes", []) if shape]
    heads = int(getattr(model.model.config.get_text_config(decoder=True), "num_attention_heads", 1))
    common = {"model": model.name, "dtype": model.dtype, "path": target.path} | environment()
    operations = matrix_rate(dtype, device)
    records: list[Record] = []
    # A plain target takes one row only.
    sizes = rows if target.path != "plain" else [k for k in rows if k == 1]
    points = [(t, k) for t in contexts for k in sizes if t + k <= model.max_positions]
    for done, (context, k) in enumerate(points):
        progress(done, len(points), f"{model.dtype}, context {context}, {k} rows")
        weight_bytes = elements * dtype.itemsize
        cache_bytes = sum(n * context * (a + b) * dtype.itemsize for n, a, b in shapes)
        bandwidth = read_bandwidth(weight_bytes + cache_bytes, dtype, device)
        work = 2 * k * (elements + context * sum(heads * (a + b) for _, a, b in shapes))
        floors = {
            "floor_bytes_ms": (weight_bytes + cache_bytes) / bandwidth * 1e3,
            "floor_operations_ms": work / operations * 1e3,
        }
        records.append(
            {
                **common,
                "context": context,
                "rows": k,
                "step_ms": step_seconds(target, context, k, device) * 1e3,
                "floor_ms": max(floors.values()),
                **floors,
                "weight_bytes": weight_bytes,
                "cache_bytes": cache_bytes,
                "bandwidth_gb_s": bandwidth / 1e9,
                "matrix_tflop_s": operations / 1e12,
            }
        )
    return records


def _by_setting(records: Sequence[Record]) -> dict[tuple[str, int], list[Record]]:
    found: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        found.setdefault((record["dtype"], record["context"]), []).append(record)
    return found


def findings(records: Sequence[Record]) -> list[str]:
    """How far a step is from its floor, per dtype and context, and how many rows are almost free."""
    lines = []
    for (dtype, context), points in _by_setting(records).items():
        one = points[0]
        free = max(r["rows"] for r in points if r["step_ms"] <= 1.25 * one["step_ms"])
        bound = "reading bytes" if one["floor_bytes_ms"] >= one["floor_operations_ms"] else "operations"
        lines.append(
            f"{dtype}, context {context}: {one['rows']} row takes {one['step_ms']:.2f} ms, "
            f"{one['step_ms'] / one['floor_ms']:.1f} times its floor of {one['floor_ms']:.2f} ms (bound by {bound}). "
            f"Steps of up to {free} rows cost at most a quarter more than one row."
        )
    return lines


def figure(records: Sequence[Record]) -> Any:
    """t(k) with its floor, a line per dtype and context."""
    picture, axes = new_figure()
    for index, ((dtype, context), points) in enumerate(_by_setting(records).items()):
        rows, style = [r["rows"] for r in points], colour(index)
        axes.plot(rows, [r["step_ms"] for r in points], label=f"{dtype}, context {context}", **style)
        axes.plot(rows, [r["floor_ms"] for r in points], linestyle=":", color=style["color"])
    axes.plot([], [], linestyle=":", color="black", label="floor (bandwidth, matrix rate)")
    powers_of_two(axes, sorted({r["rows"] for r in records}))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    label(axes, "Step cost and its floor", "rows of the step, k", "time of the step, t(k) (ms)")
    return picture


def write_report(records: Sequence[Record], out: Path, command: str) -> str:
    """Write the records, a page and its picture as ``step-cost.*``. Returns the page below the command."""
    out.mkdir(parents=True, exist_ok=True)
    with RecordWriter(out / "step-cost.jsonl") as writer:
        for record in records:
            writer.write(record)
    where = describe(records[0])
    table = markdown_table(list(COLUMNS), [[text(r) for text in COLUMNS.values()] for r in records])
    page = "\n".join([where, "", table, "", *findings(records), ""])
    (out / "step-cost.md").write_text(f"`{command}`\n\n{page}", encoding="utf-8")
    save(figure(records), out / "step-cost", where)
    return page

"""t(k): the time of a step of k rows, in milliseconds and beside that of one row. Which rows are almost free?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from ..core import Target, TokenTree
from ..core.records import RecordWriter
from .model import ModelUnderTest
from .pictures import colour, label, new_figure, powers_of_two, save
from .record import Record, describe, environment
from .run import Progress
from .summary import markdown_table


def sample_tree(rows: int, vocabulary: int) -> TokenTree:
    """Branches of four tokens under the root, as candidates are; every row needs its logits."""
    tree = TokenTree(1 % vocabulary)
    token = 2
    while len(tree) < rows:
        tree.add_candidate([(token + i) % vocabulary for i in range(min(4, rows - len(tree)))])
        token += 5
    return tree


def step_seconds(target: Target, context: int, rows: int, device: torch.device) -> float:
    """Seconds of a step, the median: its tree, its pass, and the argmax of the root. Nothing is committed."""
    vocabulary = target.vocabulary
    target.prefill([(0, [(7 * i + 3) % vocabulary for i in range(context)])])
    times: list[float] = []
    begin = perf_counter()
    try:
        while len(times) < 6 or (perf_counter() - begin < 0.25 and len(times) < 1000):
            start = perf_counter()
            target.forward([(0, sample_tree(rows, vocabulary))])[0].best(0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(perf_counter() - start)
    finally:
        target.release(0)
    return median(times[1:])


def measure(
    model: ModelUnderTest, contexts: Sequence[int], rows: Sequence[int], progress: Progress
) -> list[Record]:
    """One record per context and number of rows.

    Args:
        model: with a transformers model.
        contexts: committed tokens, T; those that the model is too short for are left out.
        rows: k.
        progress: told (points measured, points in all, what comes next).
    """
    target = model.target
    common = {"model": model.name, "dtype": model.dtype, "path": target.path} | environment()
    # A plain target takes one row only.
    sizes = rows if target.path != "plain" else [k for k in rows if k == 1]
    points = [(t, k) for t in contexts for k in sizes if t + k <= model.max_positions]
    records: list[Record] = []
    for done, (context, k) in enumerate(points):
        progress(done, len(points), f"{model.dtype}, context {context}, {k} rows")
        milliseconds = step_seconds(target, context, k, model.model.device) * 1e3
        records.append({**common, "context": context, "rows": k, "step_ms": milliseconds})
    return records


def write_report(records: Sequence[Record], out: Path, command: str) -> str:
    """Write the records, a page and its picture as ``step-cost.*``. Returns the page below the command."""
    out.mkdir(parents=True, exist_ok=True)
    with RecordWriter(out / "step-cost.jsonl") as writer:
        for record in records:
            writer.write(record)
    lines: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        lines[record["dtype"], record["context"]].append(record)
    table = []
    picture, axes = new_figure()
    for index, ((dtype, context), points) in enumerate(lines.items()):
        times = [point["step_ms"] for point in points]
        axes.plot([p["rows"] for p in points], times, label=f"{dtype}, context {context}", **colour(index))
        for point, ms in zip(points, times, strict=True):
            table.append([dtype, str(context), str(point["rows"]), f"{ms:.2f}", f"{ms / times[0]:.2f}"])
    powers_of_two(axes, sorted({record["rows"] for record in records}))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    label(axes, "Step cost", "rows of the step, k", "time of the step, t(k) (ms)")
    where = describe(records[0])
    save(picture, out / "step-cost", where)
    headings = ["dtype", "context", "rows k", "t(k) ms", "over the fewest rows"]
    page = f"{where}\n\n{markdown_table(headings, table)}\n"
    (out / "step-cost.md").write_text(f"`{command}`\n\n{page}", encoding="utf-8")
    return page

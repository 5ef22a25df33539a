"""t(k), the time of a step of k rows, and its ratio to t(1). How many rows are almost free?

Times come from ``drafters.adaptive.measure``, as for the adaptive drafter's cost curve: the faster half of several
drafted steps counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from rich import box
from rich.table import Table

from ..drafters.adaptive.measure import measure as measure_steps
from ..drafters.adaptive.measure import positions_needed
from ..records import RecordWriter
from .methods import ModelUnderTest
from .record import Record, environment
from .run import Progress

#: Steps of each number of rows; the faster half counts.
REPEATS = 7


def measure(
    model: ModelUnderTest, contexts: Sequence[int], rows: Sequence[int], progress: Progress
) -> list[Record]:
    """One record per context and number of rows.

    Args:
        model: the model under test.
        contexts: numbers of committed tokens, T; contexts after which the model has too few positions for the timed
            steps are skipped.
        rows: numbers of rows of a step, k.
        progress: called with (points measured, total points, the point measured last).
    """
    # Choose the points that fit into the model's positions.
    target = model.target
    common = {"model": model.name, "dtype": model.dtype, "path": target.path} | environment()
    target.prefill([(0, [0])])
    drafts = target.depth_limit(0) > 0  # else the target evaluates one row per step
    positions = target.positions_left(0) or model.max_positions
    target.release(0)
    counts = [k for k in rows if k == 1 or drafts]
    points: list[tuple[int, int]] = []
    for t in contexts:
        fitting = [k for k in counts if t + k <= model.max_positions]
        if t < positions - positions_needed(target, fitting, REPEATS):
            points += [(t, k) for k in fitting]
    # Measure them, context by context.
    records: dict[tuple[int, int], Record] = {}  # a disturbed point is measured again and replaced

    def keep(batch: int, context: int, k: int, seconds: float) -> None:
        if k not in counts:
            return
        records[context, k] = {**common, "context": context, "rows": k, "step_ms": seconds * 1e3}
        progress(len(records), len(points), f"{model.dtype}, context {context}, {k} rows")

    for context in dict.fromkeys(context for context, _ in points):
        fitting = [k for t, k in points if t == context]
        measure_steps(target, fitting, (context,), (), REPEATS, inf, keep)
    return list(records.values())


def write_records(records: Sequence[Record], out: Path) -> None:
    """Write the records as ``step-cost.jsonl``."""
    out.mkdir(parents=True, exist_ok=True)
    with RecordWriter(out / "step-cost.jsonl") as writer:
        for record in records:
            writer.write(record)


def table(records: Sequence[Record]) -> Table:
    """Each time, also relative to that of the fewest rows of its dtype and context."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("dtype", "context", "rows k", "t(k) ms", "over the fewest rows"):
        shown.add_column(heading, justify="left" if heading == "dtype" else "right")
    first: dict[tuple[str, int], float] = {}
    for x in records:
        ratio = x["step_ms"] / first.setdefault((x["dtype"], x["context"]), x["step_ms"])
        shown.add_row(x["dtype"], f"{x['context']}", f"{x['rows']}", f"{x['step_ms']:.2f}", f"{ratio:.2f}")
    return shown

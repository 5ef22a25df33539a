"""t(k), the time of a step of k rows, and its ratio to t(1). How many rows are almost free?

Times come from ``drafters.adaptive.measure``, as for the adaptive drafter's cost curve: the fastest of several passes
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from ..drafters.adaptive.measure import MOST_STEPS, time_steps
from ..records import RecordWriter
from .methods import ModelUnderTest
from .record import Record, environment
from .run import Progress

#: Seconds of passes of each number of rows; the fastest pass counts.
PATIENCE = 1.0


def measure(
    model: ModelUnderTest, contexts: Sequence[int], rows: Sequence[int], progress: Progress
) -> list[Record]:
    """One record per context and number of rows.

    Args:
        model: the model under test.
        contexts: numbers of committed tokens, T; contexts after which the model has too few positions for the timed
            steps are skipped.
        rows: numbers of rows of a step, k.
        progress: called with (contexts measured, number of contexts, the context measured last).
    """
    target = model.target
    common = {"model": model.name, "dtype": model.dtype, "path": target.path} | environment()
    target.prefill([(0, [0])])
    drafts = target.depth_limit(0) > 0  # else the target evaluates one row per step
    target.release(0)
    counts = sorted(k for k in rows if k == 1 or drafts)
    records = list[Record]()
    for number, context in enumerate(contexts):
        passes = dict[int, list[float]]()
        if context + MOST_STEPS + counts[-1] <= model.max_positions:
            passes, _ = time_steps(target, context, counts, PATIENCE * len(counts))
        for k, seconds in passes.items():
            records.append({**common, "context": context, "rows": k, "step_ms": min(seconds) * 1e3})
        progress(number + 1, len(contexts), f"{model.dtype}, context {context}")
    return records


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

"""t(k): the time of a step of k rows, with what the machine would need at least beside it.

The floor of a step is the larger of two times, both rates measured in the same run:
    bytes       weights and cache that a step must read, over the read bandwidth of a buffer as large as they
    operations  2 x multiply-adds of the linear layers and of attention, over the rate of a large matrix product
What is above it is split by measurement: the linear layers alone (the step's own calls again, nothing
between them), the rest of the model's forward pass (attention, norms, framework), and what is outside the model
(tree, mask, reading the argmaxes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from ..core import TokenTree
from .record import environment
from .subject import Subject

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def timed(
    call: Callable[[], Any],
    seconds: float = 0.25,
    least: int = 5,
    pick: Callable[[list[float]], float] = median,
) -> float:
    """Seconds of a call, the median unless ``pick`` says otherwise, after one that is not counted."""
    call()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < least or perf_counter() - begin < seconds:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
        if len(times) >= 1000:
            break
    return pick(times)


def _synchronised(device: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    if device.type != "cuda":
        return call

    def both() -> None:
        call()
        torch.cuda.synchronize(device)

    return both


def read_bandwidth(size: int, dtype: Any, device: Any) -> float:
    """Bytes per second of reading a buffer of ``size`` bytes once: the better of a sum and a matrix-vector product.

    A buffer that fits a processor cache is read from there, as the weights of a small model are.
    """
    import torch

    columns = 1024
    rows = max(8, size // (columns * dtype.itemsize))
    matrix = torch.ones(rows, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, dtype=dtype, device=device)
    flat = matrix.view(-1).view(torch.int32) if dtype.itemsize == 2 else matrix.view(-1)
    calls: list[Callable[[], Any]] = [lambda: torch.mv(matrix, vector), lambda: flat.max()]
    return (
        matrix.numel()
        * dtype.itemsize
        / min(timed(_synchronised(device, call), 0.15, pick=min) for call in calls)
    )


def matrix_rate(dtype: Any, device: Any) -> float:
    """Operations per second (a multiply-add is two) of the best of some large matrix products."""
    import torch

    best = 0.0
    for size in (512, 1024, 2048):
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = timed(_synchronised(device, lambda a=a: a @ a), 0.2, 3, min)
        best = max(best, 2 * size**3 / seconds)
    return best


def _modules(model: Any) -> list[Any]:
    import torch

    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return [*layers, head] if head is not None else layers


def sample_tree(rows: int, vocabulary: int) -> TokenTree:
    """Branches of four tokens under the root, as candidates are; every row is read."""
    tree = TokenTree(1 % vocabulary)
    token = 2
    while len(tree) < rows:
        tree.add_candidate([(token + i) % vocabulary for i in range(min(4, rows - len(tree)))])
        token += 5
    return tree


def measure(
    subject: Subject,
    contexts: Sequence[int] = (128, 512, 1024),
    rows: Sequence[int] = ROWS,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """One record per context and number of rows. Times are in milliseconds.

    Args:
        subject: with a transformers model.
        contexts: committed tokens, T; those that the model is too short for are left out.
        rows: k.
        progress: told (points measured, points in all, what comes next).
    """
    model = subject.model
    device, dtype = model.device, model.dtype
    shapes = [shape for shape in getattr(getattr(subject.target, "facts", None), "shapes", []) if shape]
    elements = sum(module.weight.numel() for module in _modules(model))
    common = {"model": subject.name, "dtype": subject.dtype, "path": subject.path, **environment()}
    operations = matrix_rate(dtype, device)
    tell = progress or (lambda done, total, what: None)
    records: list[dict[str, Any]] = []
    # A plain target takes one row only.
    sizes = rows if subject.path != "plain" else [k for k in rows if k == 1]
    points = [(t, k) for t in contexts for k in sizes if t + k <= subject.max_positions]
    for done, (context, k) in enumerate(points):
        tell(done, len(points), f"{subject.dtype}, context {context}, {k} rows")
        weight_bytes = elements * dtype.itemsize
        cache_bytes = sum(heads * context * (a + b) * dtype.itemsize for heads, a, b in shapes)
        bandwidth = read_bandwidth(weight_bytes + cache_bytes, dtype, device)
        step, inside, linear = _step(subject, context, k)
        work = 2 * k * (elements + context * sum(_heads(model) * (a + b) for _, a, b in shapes))
        by_bytes, by_work = (weight_bytes + cache_bytes) / bandwidth, work / operations
        records.append(
            {
                **common,
                "context": context,
                "rows": k,
                "step_ms": step * 1e3,
                "linear_ms": linear * 1e3,
                "rest_of_model_ms": max(0.0, inside - linear) * 1e3,
                "outside_ms": max(0.0, step - inside) * 1e3,
                "floor_ms": max(by_bytes, by_work) * 1e3,
                "floor_bytes_ms": by_bytes * 1e3,
                "floor_operations_ms": by_work * 1e3,
                "weight_bytes": weight_bytes,
                "cache_bytes": cache_bytes,
                "bandwidth_gb_s": bandwidth / 1e9,
                "matrix_tflop_s": operations / 1e12,
            }
        )
    tell(len(points), len(points), "")
    return records


def _heads(model: Any) -> int:
    return int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 1))


def _step(subject: Subject, context: int, k: int) -> tuple[float, float, float]:
    """Seconds of a step, of its pass through the model, and of the linear layers alone. Nothing is committed."""
    target, device = subject.target, subject.model.device
    vocabulary = subject.vocabulary
    target.prefill([(0, [(7 * i + 3) % vocabulary for i in range(context)])])
    trees = [sample_tree(k, vocabulary)]

    def one() -> None:
        trees[0] = sample_tree(k, vocabulary)
        target.forward([(0, trees[0])])[0].best(0)

    calls: list[Callable[[], Any]] = []
    inside: list[float] = []

    def keep(plain: Callable[..., Any], *args: Any) -> Any:
        calls.append(lambda: plain(*args))
        return plain(*args)

    def clock(plain: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        start = perf_counter()
        result = plain(*args, **keywords)
        inside.append(perf_counter() - start)
        return result

    try:
        with _watched(_linears(subject), keep):
            one()
        # The pass itself is the model's, or that of its compiled form.
        compiled = getattr(target, "compiled", None)
        with _watched([(subject.model, "forward") if compiled is None else (compiled, "run")], clock):
            seconds = timed(_synchronised(device, one))
    finally:
        target.release(0)

    if compiled is not None:  # a compiled pass has clocks of its own
        return seconds, median(inside[1:]), median(inside[1:]) * compiled.last_pass.gemm

    def alone() -> None:
        for call in calls:
            call()

    import torch

    with torch.inference_mode():
        linear = timed(_synchronised(device, alone))
    return seconds, median(inside[1:]), linear


def _linears(subject: Subject) -> list[tuple[Any, str]]:
    """(owner, method) of every linear layer that a step calls."""
    if hasattr(subject.target, "compiled"):
        return []
    return [(module, "forward") for module in _modules(subject.model)]


@contextmanager
def _watched(methods: Sequence[tuple[Any, str]], watcher: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, ``owner.name(...)`` is ``watcher(the plain method, ...)``."""
    for owner, name in methods:
        setattr(owner, name, partial(watcher, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods:
            delattr(owner, name)


def verdict(records: Sequence[dict[str, Any]]) -> list[str]:
    """Where the gap is, per dtype and context, and how many rows are almost free."""
    lines = []
    for dtype, context in dict.fromkeys((r["dtype"], r["context"]) for r in records):
        points = [r for r in records if (r["dtype"], r["context"]) == (dtype, context)]
        one = points[0]
        free = max(r["rows"] for r in points if r["step_ms"] <= 1.25 * one["step_ms"])
        parts = {
            "the linear layers over their floor": max(0.0, one["linear_ms"] - one["floor_ms"]),
            "the rest of the model (attention, norms, framework)": one["rest_of_model_ms"],
            "work outside the model (tree, mask, argmax)": one["outside_ms"],
        }
        largest = max(parts, key=lambda name: parts[name])
        bound = "reading bytes" if one["floor_bytes_ms"] >= one["floor_operations_ms"] else "operations"
        lines.append(
            f"{dtype}, context {context}: {one['rows']} row takes {one['step_ms']:.2f} ms, "
            f"{one['step_ms'] / one['floor_ms']:.1f} times its floor of {one['floor_ms']:.2f} ms (bound by {bound}); "
            f"most of the gap is {largest} ({parts[largest]:.2f} ms). "
            f"Steps of up to {free} rows cost at most a quarter more than one row."
        )
    return lines


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row per context, dtype and k."""
    heads = ["dtype", "context", "rows k", "t(k) ms", "floor ms", "t / floor", "linear ms", "rest of model ms",
             "outside ms", "read GB/s", "TFLOP/s"]  # fmt: skip
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for r in records:
        rows.append(
            [r["dtype"], str(r["context"]), str(r["rows"]), f"{r['step_ms']:.2f}", f"{r['floor_ms']:.3f}",
             f"{r['step_ms'] / r['floor_ms']:.1f}", f"{r['linear_ms']:.2f}", f"{r['rest_of_model_ms']:.2f}",
             f"{r['outside_ms']:.2f}", f"{r['bandwidth_gb_s']:.1f}", f"{r['matrix_tflop_s']:.3f}"]
        )  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figure(records: Sequence[dict[str, Any]]) -> Any:
    """t(k) with its floor, a line per dtype and context."""
    from .pictures import colour, new_figure

    picture, axes = new_figure()
    for index, (dtype, context) in enumerate(dict.fromkeys((r["dtype"], r["context"]) for r in records)):
        points = [r for r in records if (r["dtype"], r["context"]) == (dtype, context)]
        rows = [r["rows"] for r in points]
        style = colour(index)
        axes.plot(
            rows, [r["step_ms"] for r in points], label=f"{dtype}, context {context}", markersize=5, **style
        )
        axes.plot(rows, [r["floor_ms"] for r in points], linestyle=":", color=style["color"])
    axes.plot([], [], linestyle=":", color="black", label="floor (bandwidth, matrix rate)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({r["rows"] for r in records})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.set_xlabel("rows of the step, k")
    axes.set_ylabel("time of the step, t(k) (ms)")
    axes.set_title("Step cost and its floor")
    axes.legend(fontsize=8)
    return picture

"""What lookahead parallelism gives (figures 6 and 7), from one process: shards of real steps, modelled time.

Steps are recorded while one process decodes; then their trees are cut for R ranks as the ranks would cut
them, recomputed rows included. With t(k), the time of a k-row step, a step on R ranks takes

    t(rows of the widest shard) + exchange

Strong scaling grows (W, N, G) with R: more ranks evaluate a larger window in the same time, and S grows with
the logarithm of the window (paper, section 4).
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from lookahead.bench.model import ModelUnderTest
from lookahead.bench.pictures import colour, label, new_figure, powers_of_two
from lookahead.bench.step_cost import step_seconds
from lookahead.bench.workloads import find_file
from lookahead.core import LookaheadConfig, Request, Target, TokenTree, decode
from lookahead.drafters import make_drafter
from lookahead.parallel.shard import shard
from lookahead.parallel.wire import FRAME, Link

from .study import Study

RANKS = (1, 2, 4, 8)
BASE = (15, 5, 15)
#: Rows that cost as much as one on a device bound by memory: the flat model of the page.
FLAT_ROWS = 128
#: Steps whose exchange is timed, after as many that are not.
EXCHANGES = 200
#: Workloads of the paper's figures 6 and 7, where they are at hand.
WORKLOADS = ("mt-bench", "humaneval", "classeval")


@dataclass(frozen=True, slots=True)
class Shares:
    """One tree sequence cut for R ranks; means over its steps.

    Attributes:
        ranks: R.
        rows: rows of the whole tree.
        widest: rows of the widest shard, recomputed rows included: what a step waits for.
        evaluated: rows of all ranks together.
        recomputed: rows per rank that are evaluated again because another rank had them.
        bytes: exchanged per step, all ranks together.
        widths: the widest shard of every step.
    """

    ranks: int
    rows: float
    widest: float
    evaluated: float
    recomputed: float
    bytes: float
    widths: list[int]


def share_out(steps: Sequence[tuple[TokenTree, Sequence[int]]], ranks: int) -> Shares:
    """Cut the steps (tree, path) of one sequence as R ranks would."""
    missing = [0] * ranks
    widths, evaluated, recomputed, sent = [], [], [], []
    for tree, path in steps:
        cut = shard(tree, ranks, missing)
        rows = [len(own) + count for own, count in zip(cut.rows, missing, strict=True)]
        widths.append(max(rows))
        evaluated.append(sum(rows))
        recomputed.append(sum(missing) / ranks)
        missing = [sum(node not in own for node in path) for own in map(set, cut.rows)]
        sent.append(
            sum(
                _bytes(3 + len(cut.rows[r])) + _bytes(4 + cut.owner.count(r)) + _bytes(3 + len(path))
                for r in range(1, ranks)
            )
        )
    if not widths:
        return Shares(ranks, 0, 0, 0, 0, 0, [])
    whole = fmean(len(tree) for tree, _ in steps)
    return Shares(ranks, whole, fmean(widths), fmean(evaluated), fmean(recomputed), fmean(sent), widths)


def record(
    target: Target, prompts: Sequence[Sequence[int]], config: Any, new_tokens: int, eos: frozenset[int]
) -> list[list[tuple[TokenTree, list[int]]]]:
    """Decode each prompt with lookahead; the (tree, path) of its steps."""
    sequences = []
    for prompt in prompts:
        drafter = make_drafter("lookahead", config, target.vocabulary)
        steps = decode(target, [Request(prompt, drafter, new_tokens, eos=eos)])
        sequences.append([(step.tree, step.path) for step in steps if step.tree is not None])
    return sequences


def step_times(model: ModelUnderTest, rows: Sequence[int], context: int = 64) -> Callable[[float], float]:
    """t(k) in seconds, measured on this target at the given rows and interpolated between them."""
    import numpy as np

    times = [step_seconds(model.target, context, count, model.model.device) for count in rows]
    return lambda k: float(np.interp(k, list(rows), times))


def exchange_seconds(steps: int) -> float:
    """The median time of a step's three messages (shard out, argmaxes back, accepted tokens out) between two
    processes of this machine, over loopback by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_exchange, args=(1, folder, steps), daemon=True)
        other.start()
        spent = _exchange(0, folder, steps)
        other.join()
    return median(spent[steps:])


def _exchange(rank: int, folder: str, steps: int) -> list[float]:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    link, spent = Link(1 - rank, None, 60.0), []
    for _ in range(2 * steps):
        start = perf_counter()
        if rank == 0:
            link.send("forward")
            link.receive()
            link.send("commit")
            link.flush()
        else:
            link.receive()
            link.send("done")
            link.receive()
        spent.append(perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return spent


def parallel(study: Study) -> Path:
    """Figures 6 and 7: what lookahead parallelism gives."""
    configs = {ranks: (BASE[0] * ranks, BASE[1], BASE[2] * ranks) for ranks in RANKS}
    names = {ranks: "lookahead:" + ",".join(map(str, config)) for ranks, config in configs.items()}
    at_hand = [name for name in WORKLOADS if find_file(name, study.data) is not None]
    prompts = study.prompts(4, at_hand or ("stdlib",))
    exchange_time = exchange_seconds(EXCHANGES)
    records = study.run(list(names.values()), prompts, replace(study.options, warm=False))
    model = study.model
    target = model.target
    largest = LookaheadConfig(*configs[RANKS[-1]]).max_rows
    t = step_times(model, [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if k < largest] + [largest])
    lines = [
        "| ranks | W, N, G | S (measured) | rows (measured) | widest shard, grown (computed) "
        "| widest shard, (15, 5, 15) (computed) | recomputed rows per rank (computed) | bytes per step (computed) "
        "| speed-up, grown (modelled, measured t(k)) | the same (modelled, assumed flat t(k)) "
        "| speed-up, (15, 5, 15) (modelled, measured t(k)) |",
        "| ---: " * 11 + "|",
    ]
    new_tokens = study.options.max_new_tokens
    tokens = [prompt.tokens(model.tokenizer) for prompt in prompts]
    tokens = [ids for ids in tokens if len(ids) + new_tokens <= model.max_positions]
    curves: dict[str, list[float]] = {"t(k) of this machine": [], f"flat up to {FLAT_ROWS} rows": []}
    base: list[list[tuple[TokenTree, list[int]]]] = []
    for ranks, config in configs.items():
        mine = [r for r in records if r["method"] == names[ranks] and "skipped" not in r]
        ratio = sum(r["new_tokens"] - 1 for r in mine) / max(1, sum(r["steps"] for r in mine))
        steps = record(target, tokens, config, new_tokens, model.eos)
        base = base or steps
        grown, fixed = _together(steps, ranks), _together(base, ranks)
        base_ratio = _ratio(base)
        exchange = exchange_time if ranks > 1 else 0.0
        own = ratio * t(1) / (fmean(map(t, grown.widths)) + exchange)
        flat = ratio / fmean(max(1.0, width / FLAT_ROWS) for width in grown.widths)
        strong = base_ratio * t(1) / (fmean(map(t, fixed.widths)) + exchange)
        curves["t(k) of this machine"].append(own)
        curves[f"flat up to {FLAT_ROWS} rows"].append(flat)
        sizes = f"{grown.rows:.0f} | {grown.widest:.1f} | {fixed.widest:.1f} | {grown.recomputed:.2f} "
        sizes += f"| {grown.bytes:.0f}"
        triple = ", ".join(map(str, config))
        lines.append(
            f"| {ranks} | {triple} | {ratio:.2f} | {sizes} | {own:.2f} | {flat:.2f} | {strong:.2f} |"
        )
    body = [
        *lines, "",
        f"**Measured**: S, rows and t(k) in one process; the exchange of a step, {exchange_time * 1e6:.0f} us, "
        "between two processes of this machine by gloo. **Computed** from the measured steps: shards, recomputed "
        "rows, bytes (of all ranks together), means over steps. **Modelled**: speed-ups over plain decoding, "
        "S t(1) / (t(widest shard) + exchange), the exchange being that of two ranks for any number of them. "
        f"**Assumed**, in the column that says so: up to {FLAT_ROWS} rows cost as much as one, the exchange nothing. "
        f"No speed-up was measured on several devices. Sending keys and values in place of computing missing rows "
        f"again would take {_kv_bytes(model)} bytes per row.",
    ]  # fmt: skip
    differs = [
        study.size(),
        "One process decodes and the shards are those that R ranks would get; the paper measures 1 to 8 A100.",
    ]
    return study.page(
        "parallel", "Lookahead parallelism (figures 6 and 7)", body, differs, _figure(curves), records
    )


def _together(sequences: Sequence[Sequence[tuple[TokenTree, Sequence[int]]]], ranks: int) -> Shares:
    """Means over the steps of all sequences, each with missing rows of its own."""
    parts = [share_out(steps, ranks) for steps in sequences if steps]
    weights = [len(part.widths) for part in parts]

    def mean(name: str) -> float:
        total = sum(getattr(p, name) * w for p, w in zip(parts, weights, strict=True))
        return float(total / max(1, sum(weights)))

    names = ("rows", "widest", "evaluated", "recomputed", "bytes")
    widths = [width for part in parts for width in part.widths]
    rows, widest, evaluated, recomputed, sent = map(mean, names)
    return Shares(ranks, rows, widest, evaluated, recomputed, sent, widths)


def _ratio(sequences: Sequence[Sequence[tuple[TokenTree, Sequence[int]]]]) -> float:
    steps = sum(map(len, sequences))
    return sum(len(path) for sequence in sequences for _, path in sequence) / max(1, steps)


def _kv_bytes(model: Any) -> str:
    facts = getattr(model.target, "facts", None)
    if facts is None:
        return "more"
    item = facts.dtype.itemsize
    return str(sum(shape[0] * (shape[1] + shape[2]) * item for shape in facts.shapes if shape is not None))


def _bytes(rows: int) -> int:
    """Bytes of a message about so many rows, at most 12 each in JSON."""
    return max(FRAME, 12 * rows)


def _figure(curves: dict[str, list[float]]) -> Any:
    figure, axes = new_figure()
    for index, (name, values) in enumerate(curves.items()):
        axes.plot(RANKS, values, label=name, **colour(index))
    powers_of_two(axes, RANKS)
    title = "Lookahead parallelism: strong scaling"
    label(axes, title, "ranks; W and G grow with them", "modelled speed-up over plain decoding")
    return figure

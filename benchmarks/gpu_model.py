"""A model of GPUs that are not available: step times, speed-ups and memory from model shapes and data sheets.

    python -m benchmarks.gpu_model            print the tables of docs/gpu.md
    python -m benchmarks.gpu_model --write    write them into that page

A step of k rows after T tokens reads all weights and the keys and values of T + k tokens, and multiplies every row
with every weight:

    t(k) = max(bytes / (0.8 bandwidth), operations / (0.6 rate)) + 27 L kernels of 2 us

with the data sheet's bandwidth and matrix rate, the shares of them that large kernels usually reach, and L layers.
For Llama-2 7B in bf16 on an A100 with T = 512: 13.2 GB of weights and 0.3 GB of keys and values take 8.3 ms, the
kernels 1.7 ms, so t(1) = 10.0 ms; 128 rows are 1.7e12 operations or 9.3 ms, so t(128) = 11.0 ms and c(128) = 1.10.

The speed-up is S t(1) / (t(rows) + the drafter's time on the host). S is measured with SmolLM2 (docs/results); rows
are padded to the sizes of captured passes. `python scripts/gpu_check.py` measures all of this on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.bench.report import markdown_table
from lookahead.hf.cuda_graphs import BUCKETS, bucket_of
from lookahead.hf.graph_store import CAPACITY
from lookahead.limits import GRAPH_MEMORY

from .blocks import with_block

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "docs" / "results"
#: Share of the data sheet's bandwidth that large kernels reach.
BANDWIDTH_SHARE = 0.8
#: Share of the data sheet's matrix rate that large kernels reach.
RATE_SHARE = 0.6
#: Kernels per layer in a captured pass.
KERNELS = 27
#: Seconds of a kernel, apart from its memory traffic and operations.
KERNEL_SECONDS = 2e-6
#: Tokens of context in the tables of step times.
CONTEXT = 512
ROWS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: name of the card.
        bandwidth: bytes per second.
        rate: dense 16-bit operations per second with 32-bit accumulation.
        memory: GB.
    """

    name: str
    bandwidth: float
    rate: float
    memory: int


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder-only model. ``tied``: whether the output matrix is the embedding."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def cache_shapes(self) -> list[tuple[int, int, int] | None]:
        """Key heads, key head size and value head size of each layer."""
        return [(self.kv_heads, self.head_size, self.head_size)] * self.layers


CARDS = (
    Card("RTX 3090", 936e9, 71e12, 24),
    Card("RTX 4090", 1008e9, 165e12, 24),
    Card("A100 80 GB", 2039e9, 312e12, 80),
    Card("H100 SXM", 3350e9, 989e12, 80),
)
MODELS = (
    Shape("Llama-3.2 1B", 2048, 8192, 16, 32, 8, 64, 128256, True),
    Shape("Llama-2 7B", 4096, 11008, 32, 32, 32, 128, 32000, False),
)
#: Bytes per weight of the layers. The output matrix always has two bytes per weight.
WEIGHTS = {"bf16": 2.0, "4 bits": 4.5 / 8}


def weight_bytes(shape: Shape, weights: str) -> float:
    """Bytes of the weights that a step reads."""
    return shape.layer_weights * WEIGHTS[weights] + 2 * shape.output_weights


def step_seconds(card: Card, shape: Shape, weights: str, rows: int, context: int = CONTEXT) -> float:
    """t(k): seconds of a step of ``rows`` rows."""
    per_token = 2 * 2 * shape.kv_heads * shape.head_size * shape.layers
    read = weight_bytes(shape, weights) + per_token * (context + rows)
    products = 2 * rows * (shape.layer_weights + shape.output_weights)
    products += 4 * rows * (context + rows) * shape.heads * shape.head_size * shape.layers
    busy = max(read / (BANDWIDTH_SHARE * card.bandwidth), products / (RATE_SHARE * card.rate))
    return busy + KERNELS * shape.layers * KERNEL_SECONDS


def speed_up(
    card: Card, shape: Shape, weights: str, s: float, rows: int, host: float = 0.0, padded: bool = True
) -> float:
    """Speed-up over plain decoding.

    Args:
        s: S, tokens per step.
        rows: rows per step.
        host: seconds of the drafter on the host per step.
        padded: whether rows are padded to the size of a captured pass.
    """
    rows = (bucket_of(rows) or rows) if padded else rows
    plain = step_seconds(card, shape, weights, 1)
    return s * plain / (step_seconds(card, shape, weights, rows) + host)


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        name: column heading.
        s: measured S.
        rows: rows per step.
        host: seconds of the drafter on the host per step.
    """

    name: str
    s: float
    rows: int
    host: float


#: The seconds that the drafter takes on the host for (15,5,15) and for 64 rows of adaptive: two cores of an Intel
#: Xeon with AMX, commit 113b7a7, when adaptive had no base table.
LOOKAHEAD_HOST = 194.0e-6
ADAPTIVE_HOST = 321.3e-6
#: S and mean rows per step of SmolLM2 in bf16 on code, greedy (`python -m benchmarks.adaptive_s --prompts 5`), commit
#: 714ca40; both tables are in dev/LOG.md.
MEASURED = (
    Method("(15,5,15)", 526 / 244, 72, LOOKAHEAD_HOST),
    Method("adaptive, 8", 526 / 196, 8, ADAPTIVE_HOST),
    Method("adaptive, 16", 526 / 165, 16, ADAPTIVE_HOST),
    Method("adaptive, 32", 526 / 145, 32, ADAPTIVE_HOST),
    Method("adaptive, 64", 526 / 125, 64, ADAPTIVE_HOST),
)


@dataclass(frozen=True)
class Published:
    """A speed-up measured by the paper or its authors with LLaMA-2-Chat 7B in fp16 on MT-Bench.

    Attributes:
        s: S, as published; 0 if it is not: then equation 7 with the paper's alpha and f gives it.
        ours: (page, method) of our S with the same settings.
    """

    card: str
    settings: str
    rows: int
    s: float
    speed_up: str
    source: str
    ours: tuple[str, str]


PUBLISHED = (
    Published("A100 80 GB", "(15,5,15)", 120, 2.05, "1.88", "table 3", ("ablation", "lookahead:15,5,15")),
    Published("A100 80 GB", "(15,5,15)", 120, 2.05, "1.8", "figure 6", ("ablation", "lookahead:15,5,15")),
    Published(
        "A100 80 GB",
        "(1,5,30), no prompt",
        124,
        1.12,
        "1.04",
        "table 3",
        ("ablation", "lookahead:1,5,30:pool_from_prompt=0:pool_from_output=0"),
    ),
    Published(
        "RTX 3090",
        "W = 7 or 10, n-grams of 5",
        64,
        1.80,
        "about 1.4",
        "issue 10 of their code",
        ("scaling-law", "lookahead:8,5,8:pool_from_prompt=0:pool_from_output=0"),
    ),
)


def measured_s(page: str, method: str) -> float:
    """S on MT-Bench of a method on one of our pages of the paper's results."""
    figures = json.loads((RESULTS / f"{page}.json").read_text())["figures"]
    return float(next(figure["all"]["s_steps"] for figure in figures if figure["method"] == method))


# ------------------------------------------------------------------------------- memory


def cache_bytes(
    shapes: Sequence[tuple[int, int, int] | None], itemsize: int, sequences: int, tokens: int
) -> int:
    """Bytes of the cache for sequences of at most ``tokens`` tokens, including the rows of the next step.

    Slots and capacity grow by doubling, so both are powers of two; the capacity starts at ``CAPACITY``.
    """
    slots = 1 << (sequences - 1).bit_length()
    capacity = max(CAPACITY, 1 << (tokens - 1).bit_length())
    return sum(s[0] * (s[1] + s[2]) for s in shapes if s is not None) * itemsize * slots * capacity


def logits_bytes(shape: Shape, rows: int) -> int:
    """Bytes of the logits of a captured pass and of the copy read on the host, in 16 bits."""
    return 2 * 2 * rows * shape.vocabulary


# ------------------------------------------------------------------------------- tables


def times_table() -> str:
    lines = []
    for shape in MODELS:
        for weights in WEIGHTS:
            for card in CARDS:
                plain = step_seconds(card, shape, weights, 1)
                costs = (step_seconds(card, shape, weights, k) / plain for k in ROWS)
                lines.append(
                    [shape.name, weights, card.name, f"{plain * 1e3:.2f}", *(f"{c:.2f}" for c in costs)]
                )
    return markdown_table(
        ["model", "weights", "card", "t(1), ms", *(f"c({k})" for k in ROWS)], lines, texts=3
    )


def speeds_table() -> str:
    methods = MEASURED
    lines = [
        [
            shape.name,
            weights,
            card.name,
            *(f"{speed_up(card, shape, weights, m.s, m.rows, m.host):.2f}" for m in methods),
        ]
        for shape in MODELS
        for weights in WEIGHTS
        for card in CARDS
    ]
    heads = [f"{m.name}: S = {m.s:.2f}" for m in methods]
    return markdown_table(["model", "weights", "card", *heads], lines, texts=3)


def published_table() -> str:
    lines = []
    for known in PUBLISHED:
        card = next(card for card in CARDS if card.name == known.card)
        ours = measured_s(*known.ours)
        theirs, mine = (
            speed_up(card, MODELS[1], "bf16", s, known.rows, padded=False) for s in (known.s, ours)
        )
        lines.append(
            [
                known.card,
                known.settings,
                known.source,
                known.speed_up,
                f"{known.s:.2f}",
                f"{theirs:.2f}",
                f"{ours:.2f}",
                f"{mine:.2f}",
            ]
        )
    heads = [
        "card",
        "settings",
        "source",
        "measured speed-up",
        "their S",
        "modelled with their S",
        "our S",
        "modelled with our S",
    ]
    return markdown_table(heads, lines, texts=3)


def cache_table() -> str:
    contexts = (1024, 4096, 16384)
    lines = []
    for shape in MODELS:
        embedding = 0 if shape.tied else 2 * shape.output_weights
        for weights in WEIGHTS:
            held = weight_bytes(shape, weights) + embedding
            for sequences in (1, 4, 16, 64):
                caches = (cache_bytes(shape.cache_shapes, 2, sequences, tokens) for tokens in contexts)
                cells = (f"{(held + cache) / 2**30:.1f}" for cache in caches)
                lines.append([shape.name, weights, f"{held / 2**30:.1f}", str(sequences), *cells])
    heads = ["model", "weights", "weights, GiB", "sequences", *(f"{tokens} tokens" for tokens in contexts)]
    return markdown_table(heads, lines, texts=2)


def logits_table() -> str:
    buckets = [rows for rows in BUCKETS if rows >= 16]
    lines = [
        [shape.name, *(f"{logits_bytes(shape, rows) / 2**20:.0f}" for rows in buckets)] for shape in MODELS
    ]
    limits = ", ".join(f"{card.name} {GRAPH_MEMORY * card.memory:.1f} GB" for card in CARDS)
    table = markdown_table(["MiB", *(f"{rows} rows" for rows in buckets)], lines)
    return f"{table}\n\nTheir limit at the default `graph_memory` of {GRAPH_MEMORY:g}: {limits}."


#: Study of ``benchmarks.paper`` -> tokens of a completion.
RECIPES = {"ablation": 128, "scaling-law": 128, "end-to-end": 128}


def recipe_seconds(study: str, card: Card) -> float:
    """Seconds of all steps of a study with Llama-2 7B, with the completions, S and rows of our own page."""
    total = 0.0
    for figure in json.loads((RESULTS / f"{study}.json").read_text())["figures"]:
        done = figure["all"]
        rows = round(done["rows"])
        steps = done["texts"] * RECIPES[study] / done["s_steps"]
        total += steps * step_seconds(card, MODELS[1], "bf16", bucket_of(rows) or rows)
    return total


def recipe_table() -> str:
    lines = []
    for study in RECIPES:
        figures = json.loads((RESULTS / f"{study}.json").read_text())["figures"]
        texts = sum(figure["all"]["texts"] for figure in figures)
        minutes = (f"{recipe_seconds(study, card) / 60:.0f}" for card in CARDS)
        lines.append([study, str(texts), *minutes])
    return markdown_table(["study", "texts", *(f"{card.name}, minutes" for card in CARDS)], lines)


TABLES = {
    "times": times_table,
    "speeds": speeds_table,
    "published": published_table,
    "recipe": recipe_table,
    "cache": cache_table,
    "logits": logits_table,
}


def page(text: str) -> str:
    """The page with recomputed tables."""
    for name, table in TABLES.items():
        text = with_block(text, PAGE.name, name, table(), kind="computed")
    return text


def write() -> None:
    """Write the tables into docs/gpu.md."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    if "--write" in sys.argv:
        write()
        return
    for name, table in TABLES.items():
        print(f"\n{name}\n{table()}")


if __name__ == "__main__":
    main()

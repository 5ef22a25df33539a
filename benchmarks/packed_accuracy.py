"""The accuracy of packed weights: next-token distributions against the fp32 model with the same decoded weights.

    python -m benchmarks.packed_accuracy [FILE] --data DIR

The reference is the file with its weights decoded to fp32, on the compiled path, which tests compare with
transformers. Compared with it: the file's own packed weights, the decoded weights in bf16, and llama.cpp on the same
file if llama-cpp-python is installed. KL is the divergence of a distribution from the reference's, in nats per token.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import lookahead
from lookahead.bench.record import environment
from lookahead.core import LookaheadError
from lookahead.cpu.execution_plan import Segment

from .datasets import load_workload
from .page import write_report
from .report import markdown_table

Numbers = np.ndarray[Any, np.dtype[Any]]
WORKLOADS = ("humaneval", "gsm8k", "mt-bench", "spec-bench")
#: Tokens read per document.
LONGEST = 512


def log_probabilities(logits: Numbers) -> Numbers:
    """Log-probabilities of rows of logits, fp32."""
    wide = np.asarray(logits, np.float32)
    wide = wide - wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return wide


def ours(llm: Any) -> Callable[[Sequence[int]], Numbers]:
    """(token ids) -> log-probabilities (tokens, V) of the next token, from one pass on the compiled path."""
    compiled = llm.target("cpu").compiled  # type: ignore[attr-defined]
    stride = compiled.logits_strides[0]
    each = sum(compiled.logits_strides)

    def evaluate(ids: Sequence[int]) -> Numbers:
        import torch

        cache = compiled.new_cache(LONGEST)
        memory = np.zeros(len(ids) * each + 64, np.uint8)
        cache.make_room(0, len(ids))
        positions, segments = range(len(ids)), [Segment(0, 0, len(ids), None)]
        compiled.run(ids, positions, segments, positions, cache, memory, memory.ctypes.data)
        rows = torch.from_numpy(memory[: len(ids) * stride].reshape(len(ids), stride))
        rows = rows.view(getattr(torch, compiled.dtype))
        return log_probabilities(rows[:, : compiled.vocabulary].float().numpy())

    return evaluate


#: llama.cpp's model, in its own process.
_model: Any = None


def _load_llama_cpp(file: str, threads: int) -> None:
    global _model
    from llama_cpp import Llama

    _model = Llama(file, n_ctx=LONGEST, n_batch=LONGEST, n_threads=threads, logits_all=True, verbose=False)


def _evaluate_by_llama_cpp(ids: Sequence[int]) -> Numbers:
    _model.reset()
    _model.eval(list(ids))
    return log_probabilities(_model._scores[: len(ids)])


@contextmanager
def llama_cpp(file: Path, threads: int) -> Iterator[Callable[[Sequence[int]], Numbers] | None]:
    """The same by llama.cpp; None if llama-cpp-python is not installed.

    It runs in a process of its own. On a processor with AMX, llama.cpp configures the tiles of a thread once, and
    ends its process with an illegal instruction if PyTorch's matrix products have released them since.
    """
    if find_spec("llama_cpp") is None:
        yield None
        return
    with ProcessPoolExecutor(1, get_context("spawn"), _load_llama_cpp, (str(file), threads)) as process:
        yield lambda ids: process.submit(_evaluate_by_llama_cpp, ids).result()


def texts_of(llm: Any, data: Path, tokens: int) -> Iterator[list[int]]:
    """Prompts and reference answers, alternating data sets, until there are enough tokens."""
    lists = [load_workload(name, None, 0, data) for name in WORKLOADS]
    seen = 0
    for prompts in zip(*lists, strict=False):
        for prompt in prompts:
            text = "\n".join([*prompt.turns, prompt.reference or ""])
            ids = llm.tokenizer(text).input_ids[:LONGEST]
            if len(ids) > 16:
                yield ids
                seen += len(ids)
            if seen >= tokens:
                return


def compare(evaluators: dict[str, Any], texts: Sequence[list[int]], progress: Callable[[int], None]) -> Any:
    """By name: mean, median and largest KL, share of equal best tokens, perplexity. The first is the reference."""
    kl: dict[str, list[Numbers]] = {name: [] for name in evaluators}
    same: dict[str, list[Numbers]] = {name: [] for name in evaluators}
    surprise: dict[str, list[Numbers]] = {name: [] for name in evaluators}
    for done, ids in enumerate(texts):
        progress(done)
        reference: Numbers | None = None
        for name, evaluate in evaluators.items():
            rows = evaluate(ids)
            reference = rows if reference is None else reference
            kl[name].append((np.exp(reference) * (reference - rows)).sum(-1, dtype=np.float64))
            same[name].append(rows.argmax(-1) == reference.argmax(-1))
            surprise[name].append(-rows[np.arange(len(ids) - 1), ids[1:]])
    return {
        name: {
            "kl_mean": float(np.concatenate(kl[name]).mean()),
            "kl_median": float(np.median(np.concatenate(kl[name]))),
            "kl_largest": float(np.concatenate(kl[name]).max()),
            "top1": float(np.concatenate(same[name]).mean()),
            "perplexity": float(np.exp(np.concatenate(surprise[name]).mean(dtype=np.float64))),
        }
        for name in evaluators
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.packed_accuracy", description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, help="a quantized GGUF file (default: the default model's)"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("docs/results/packed-accuracy"))
    given = parser.parse_args(words)

    # Load the variants to compare; the first one is the reference.
    try:
        default = lookahead.default_model()
        file = given.file or Path(default.folder, default.file)
        packed = lookahead.load(file)
        evaluators: dict[str, Any] = {
            "decoded to fp32": ours(lookahead.load(file, dtype="float32")),
            "packed (ours)": ours(packed),
            "decoded to bf16": ours(lookahead.load(file, dtype="bfloat16")),
        }
        texts = list(texts_of(packed, given.data, given.tokens))
    except LookaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = environment()

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{len(texts)} texts", end="", file=sys.stderr, flush=True)

    # Compare them, and write the page.
    loads = [os.getloadavg()[0]]
    with llama_cpp(file, facts["threads"]) as other:
        if other is not None:
            evaluators["llama.cpp"] = other
        try:
            figures = compare(evaluators, texts, progress)
        except BrokenProcessPool:
            del evaluators["llama.cpp"]
            figures = compare(evaluators, texts, progress)
    count = sum(map(len, texts))
    columns = ["", "mean KL", "median KL", "largest KL", "top-1 agreement", "perplexity"]
    rows = [
        [
            name,
            f"{row['kl_mean']:.2e}",
            f"{row['kl_median']:.2e}",
            f"{row['kl_largest']:.3f}",
            f"{row['top1']:.4f}",
            f"{row['perplexity']:.4f}",
        ]
        for name, row in figures.items()
    ]
    if "llama.cpp" not in figures:
        why = "not installed" if other is None else "its process ended unexpectedly"
        rows.append(["llama.cpp", why, *[""] * (len(columns) - 2)])
    body = [
        f"Next-token distributions at {count:,} positions of {len(texts)} texts ({', '.join(WORKLOADS)}: prompt and "
        "reference answer), each beside the model with the same weights decoded to fp32.",
        "",
        markdown_table(columns, rows),
    ]
    record = facts | {"model": file.name, "dtype": packed.dtype, "path": "cpu"}
    write_report(given.out, "Accuracy of packed weights", record, figures, body, loads, tokens=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())

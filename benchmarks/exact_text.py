"""Texts with and without drafting on the transformers path, exact mode beside the ordinary one: how many differ.

    python benchmarks/exact_text.py FILE.gguf --dtype bfloat16 --texts 100 --new-tokens 256 --out texts.jsonl

Prompts are functions of Python's standard library without their bodies. ``--batch`` texts are decoded together,
plainly and by ``--method``, greedy and drawn; one JSON line is written for each group and mode. Times are seconds of
the processor (``process_time``), so that they mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead import LLM
from lookahead.bench.stdlib import stdlib_prompts
from lookahead.core import first_divergence
from lookahead.targets.factory import make_target


def load(path: Path, dtype: str) -> LLM:
    """A model from a GGUF file or a directory."""
    where: Any = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()
    return LLM(model, AutoTokenizer.from_pretrained(folder, **where))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--method", default="adaptive")
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = load(given.model, given.dtype)
    config = {"max_rows": given.max_rows, "budget": False} if given.method == "adaptive" else None
    prompts = [llm.encode(prompt["plain"])[-120:] for prompt in stdlib_prompts(given.texts)]
    with given.out.open("a", encoding="utf-8") as out:
        for start in range(0, len(prompts), given.batch):
            texts = prompts[start : start + given.batch]
            numbers = list(range(start, start + len(texts)))
            for temperature in (0.0, 1.0):
                for exact in (True, False):
                    llm.target = partial(make_target, llm.model, path="transformers", exact=exact)  # type: ignore[method-assign]
                    llm.target()  # probe and certificate are not timed
                    line: dict[str, Any] = {"texts": numbers, "temperature": temperature, "exact": exact}
                    shared = {
                        "max_new_tokens": given.new_tokens, "ignore_eos": True, "temperature": temperature,
                        "seeds": numbers,
                    }  # fmt: skip
                    begin = process_time()
                    plain = llm.generate(texts, method="autoregressive", **shared)
                    middle = process_time()
                    drafted = llm.generate(texts, method=given.method, config=config, **shared)
                    line |= {"plain_s": middle - begin, "drafted_s": process_time() - middle}
                    places = [
                        first_divergence(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)
                    ]
                    line["differ"] = sum(place is not None for place in places)
                    line["first_differences"] = places
                    line["tokens"] = sum(len(one.tokens) for one in plain)
                    line["tokens_per_step"] = sum(one.stats.compression_ratio for one in drafted) / len(
                        drafted
                    )
                    out.write(json.dumps(line) + "\n")
                    out.flush()


if __name__ == "__main__":
    main()

"""Measure a trained model on the held-out texts: bits per byte, loops, samples.

Contract: reads a transformers model folder (`--model`) and `heldout.json` from `--work-dir`;
trains on nothing.  Bits per byte count every token of a held-out document and its end token,
from an empty context, in fp32; documents of more than 1000 tokens are left out.  A continuation
loops when the same 8-gram of tokens occurs three times in it; continuations are greedy, 128
tokens or up to the end token.  Prompts are the first half of a held-out function, and held-out
questions up to `Answer:`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

KINDS = ("code", "maths")


def is_loop(ids: list[int], size: int = 8, times: int = 3) -> bool:
    grams = Counter(tuple(ids[i : i + size]) for i in range(len(ids) - size + 1))
    return bool(grams) and max(grams.values()) >= times


def code_prompt(text: str) -> str | None:
    """The first half of a function's lines, or None for a text that is no fit prompt."""
    lines = text.splitlines(keepends=True)
    start = text.lstrip().startswith(("def ", "class ", "async def ", "@"))
    if not start or not 6 <= len(lines) <= 60 or len(text) > 3000:
        return None
    return "".join(lines[: len(lines) // 2]).rstrip("\n")


def maths_prompt(text: str) -> str:
    return text[: text.index("\nAnswer:") + len("\nAnswer:")]


def prompts(texts: list[str], kind: str, count: int) -> list[str]:
    if kind == "maths":
        return [maths_prompt(t) for t in texts[:count]]
    return [p for p in map(code_prompt, texts) if p][:count]


@torch.no_grad()
def greedy(model: PreTrainedModel, rows: list[list[int]], new: int = 128, batch: int = 64) -> list[list[int]]:
    """Greedy continuations without the end token, batches padded on the left."""
    eos = model.config.eos_token_id
    out: list[list[int]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for lo in range(0, len(order), batch):
        part = order[lo : lo + batch]
        width = max(len(rows[i]) for i in part)
        ids = torch.tensor([[eos] * (width - len(rows[i])) + rows[i] for i in part])
        mask = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in part])
        got = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)[
            :, width:
        ].tolist()
        for i, row in zip(part, got, strict=True):
            out[i] = row[: row.index(eos)] if eos in row else row
    return out


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, rows: list[list[int]], size: int) -> float:
    """Total bits of `rows` (tokens of whole documents) over `size` bytes."""
    eos, total = model.config.eos_token_id, 0.0
    for lo in range(0, len(rows), 16):
        part = [[eos, *row, eos] for row in rows[lo : lo + 16]]
        width = max(map(len, part))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in part])
        logits = model(input_ids=ids[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        for row, values in zip(part, loss, strict=True):
            total += float(values[: len(row) - 1].sum())
    return total / math.log(2) / size


def measure(model, tokenizer, heldout: dict, documents: int, count: int) -> dict:
    """Bits per byte, share of loops and share of ended continuations, for code and maths."""
    model.eval()
    out: dict = {}
    for kind in KINDS:
        rows, size = [], 0
        for text in heldout[kind][:documents]:
            ids = tokenizer(text)["input_ids"]
            if len(ids) <= 1000:
                rows.append(ids)
                size += len(text.encode("utf-8"))
        rows.sort(key=len)
        asked = [tokenizer(p)["input_ids"] for p in prompts(heldout[kind], kind, count)]
        told = greedy(model, asked)
        out[kind] = {
            "bits_per_byte": round(bits_per_byte(model, rows, size), 4),
            "documents": len(rows),
            "loop_share": round(sum(map(is_loop, told)) / len(told), 4),
            "ended_share": round(sum(len(t) < 128 for t in told) / len(told), 4),
            "mean_tokens": round(sum(map(len, told)) / len(told), 1),
            "prompts": len(told),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("src/lookahead/models/bundled"))
    add("--work-dir", type=Path, default=Path("build/training"))
    add("--documents", type=int, default=400, help="held-out documents of each kind for the loss")
    add("--prompts", type=int, default=128, help="held-out prompts of each kind")
    add("--from-end", action="store_true", help="take texts from the end, to compare variants")
    add("--samples", type=int, default=0, help="show this many continuations of each kind")
    add("--out", type=Path, help="write the figures to this JSON file too")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} holds no model")
    if not (args.work_dir / "heldout.json").is_file():
        parser.error(f"{args.work_dir}/heldout.json is missing: run training/corpus.py first")
    start = time.time()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    heldout = json.loads((args.work_dir / "heldout.json").read_text())
    if args.from_end:
        heldout = {kind: texts[::-1] for kind, texts in heldout.items()}
    figures = measure(model, tokenizer, heldout, args.documents, args.prompts)
    for kind in KINDS:
        figures[kind]["samples"] = samples = []
        for prompt in prompts(heldout[kind], kind, args.samples):
            told = greedy(model, [tokenizer(prompt)["input_ids"]])[0]
            samples.append([prompt, tokenizer.decode(told), is_loop(told)])
            print(f"--- {kind}{' (loops)' if samples[-1][2] else ''}\n{prompt}", end="")
            print(f"⟦{samples[-1][1]}⟧", flush=True)
    short = {k: {n: v for n, v in row.items() if n != "samples"} for k, row in figures.items()}
    print(json.dumps(short, indent=1), f"\n{time.time() - start:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

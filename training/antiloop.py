"""Last stage: unlikelihood training against loops, on the model's own greedy continuations.

Contract: goes on from `checkpoint.pt` in `--work-dir` for `--minutes`, leaves `antiloop.pt` there
(same layout) and appends to `--log`.  Sequence-level unlikelihood training follows Welleck et al.
2020: prompts are starts of training documents, continuations are greedy; in a continuation that
loops (the same 8-gram three times), -log(1 - p) is added for every token that completes an 8-gram
already seen in it.  Each step also takes an ordinary batch, so that the likelihood stays where it
was.  Held-out texts are not used.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import model as llama
import numpy as np
import torch
from evaluate import greedy, is_loop
from export import load, load_into, to_llama
from tokenizers import Tokenizer
from train import Documents, begin_process, compile_model, optimizers

NEW, PROMPT = 128, 256


def repeats(ids: list[int], size: int = 8) -> list[bool]:
    """For each token whether it completes a run of `size` tokens that occurred before."""
    seen: set[tuple] = set()
    out = []
    for i in range(len(ids)):
        gram = tuple(ids[max(0, i - size + 1) : i + 1])
        out.append(len(gram) == size and gram in seen)
        seen.add(gram)
    return out


def prompt(doc: np.ndarray, rng: np.random.Generator, stop: list[int]) -> list[int]:
    """The start of a document: up to `stop` (the end of a question), or a random cut."""
    ids = doc[: PROMPT + 1].tolist()
    if rng.random() < 0.7:
        for i in range(8, len(ids) - len(stop)):
            if ids[i : i + len(stop)] == stop:
                return ids[: i + len(stop)]
    cut = int(rng.integers(min(8, len(doc) - 1), min(PROMPT, len(doc) - 1) + 1))
    return ids[:cut]


def looped(model, data: dict, maths: float, count: int, stop, rng) -> tuple[list, dict]:
    """Greedy continuations of `count` prompts: those that loop, and the share of each kind."""
    kinds = ["maths" if rng.random() < maths else "code" for _ in range(count)]
    rows = []
    for kind in kinds:
        docs = data[kind].docs
        doc = docs[int(rng.integers(len(docs)))]
        while len(doc) < 24:
            doc = docs[int(rng.integers(len(docs)))]
        rows.append(prompt(doc, rng, stop))
    told = greedy(model, rows, NEW)
    bad = [(r, t) for r, t in zip(rows, told, strict=True) if is_loop(t)]
    shares = {}
    for kind in ("code", "maths"):
        flags = [is_loop(t) for t, k in zip(told, kinds, strict=True) if k == kind]
        shares[kind] = (sum(flags), len(flags))
    return bad, shares


def unlikelihood(net: llama.Llama, pairs: list, rows: int) -> torch.Tensor:
    """Mean of -log(1 - p) over the repeated tokens; the batch is padded to a fixed size."""
    ids = np.zeros((rows, PROMPT + NEW + 1), np.int64)
    flags = np.zeros((rows, PROMPT + NEW + 1), bool)
    for i, (start, told) in enumerate(pairs):
        ids[i, : len(start) + len(told)] = start + told
        flags[i, len(start) : len(start) + len(told)] = repeats(told)
    batch, mask = torch.from_numpy(ids), torch.from_numpy(flags)[:, 1:]
    hidden = net(batch[:, :-1])[mask]
    logits = torch.nn.functional.linear(hidden, net.embed.to(hidden.dtype)).float()
    log_p = logits.log_softmax(-1).gather(-1, batch[:, 1:][mask][:, None])
    return -torch.log1p(-log_p.exp().clamp(max=1 - 1e-5)).mean()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/training"))
    add("--log", type=Path, default=Path("training/log.jsonl"))
    add("--checkpoint", type=Path, help="default: checkpoint.pt of --work-dir")
    add("--minutes", type=float, default=15.0)
    add("--rate", type=float, default=0.003, help="learning rate of Muon, falls to zero")
    add("--rate-embed", type=float, default=0.0005, help="learning rate of AdamW, falls to zero")
    add("--weight", type=float, default=1.0, help="of the unlikelihood term")
    add("--rows", type=int, default=12, help="looping continuations in a step")
    add("--prompts", type=int, default=64, help="prompts in one round of generation")
    add("--steps", type=int, default=3, help="steps between rounds of generation")
    add("--maths", type=float, default=0.35, help="share of prompts and rows from maths")
    add("--length", type=int, default=512, help="length of the ordinary rows")
    add("--seed", type=int, default=2)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    args.checkpoint = args.checkpoint or args.work_dir / "checkpoint.pt"
    if not args.checkpoint.is_file():
        parser.error(f"{args.checkpoint} is missing: run training/train.py first")
    return args


def main() -> None:
    args = parse()
    begin_process(args.threads)
    net, saved = load(args.checkpoint)
    model = to_llama(net)
    compile_model()
    muon, adam = optimizers(net, args.rate_embed)
    muon.state = saved["muon"]
    adam.load_state_dict(saved["adam"])
    stop = Tokenizer.from_file(str(args.work_dir / "tokenizer.json")).encode("\nAnswer:").ids
    data = {n: Documents(args.work_dir / f"{n}.npy", args.seed) for n in ("code", "maths")}
    rng = np.random.default_rng(args.seed)
    step, tokens, spent = saved["step"], saved["tokens"], saved["spent"]
    begin, limit = time.time(), args.minutes * 60
    logged, pool = begin, []
    while (passed := time.time() - begin) < limit:
        load_into(model, net)
        bad, shares = looped(model, data, args.maths, args.prompts, stop, rng)
        pool = (pool + bad)[-4 * args.rows :]
        losses = []
        for _ in range(args.steps):
            share = max(0.0, 1 - (time.time() - begin) / limit)
            count = 8192 // args.length
            kinds = ["maths" if rng.random() < args.maths else "code" for _ in range(count)]
            rows = np.stack([data[k].row(args.length, rng) for k in kinds])
            batch = torch.from_numpy(rows)
            hidden = net(batch[:, :-1]).reshape(-1, net.shape.hidden)
            loss = llama.TiedLoss.apply(hidden, net.embed, batch[:, 1:].reshape(-1), 2048)
            loss.backward()
            against = torch.zeros(())
            if pool:
                picks = rng.choice(len(pool), min(len(pool), args.rows), replace=False)
                against = unlikelihood(net, [pool[i] for i in picks], args.rows)
                (args.weight * against).backward()
            torch.nn.utils.clip_grad_norm_([net.embed, *net.vectors()], 1.0)
            for group in adam.param_groups:
                group["lr"] = args.rate_embed * share
            muon.step(args.rate * share)
            adam.step()
            adam.zero_grad(set_to_none=True)
            losses.append((float(loss.detach()), float(against.detach())))
            step, tokens = step + 1, tokens + batch[:, 1:].numel()
        if time.time() - logged > 20:
            logged = time.time()
            row = {
                "stage": "antiloop",
                "step": step,
                "tokens": tokens,
                "loss": round(sum(a for a, _ in losses) / len(losses), 4),
                "unlikelihood": round(sum(b for _, b in losses) / len(losses), 4),
                "loops": {k: f"{a} of {b}" for k, (a, b) in shares.items()},
                "elapsed_s": round(spent + logged - begin),
                "left_s": round(max(0.0, limit - (logged - begin))),
            }
            with args.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    saved |= {"net": net.state_dict(), "step": step, "tokens": tokens, "spent": spent + passed}
    saved.pop("muon"), saved.pop("adam"), saved.pop("data")
    torch.save(saved, args.work_dir / "antiloop.pt")


if __name__ == "__main__":
    main()

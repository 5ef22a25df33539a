"""Train the bundled model on a processor, by wall clock, with resume.

Contract: reads what `corpus.py` wrote in `--work-dir`, trains until `--minutes` of training have
passed (summed over resumes) and leaves `checkpoint.pt` there, also every `--save-every` minutes.
The schedule (learning rate, length of the sequences) follows the share of the time that has
passed, so a slower machine sees fewer tokens but ends the decay all the same.  Matrices are
trained with Muon (Jordan et al. 2024: momentum, orthogonalised by Newton-Schulz), embeddings and
norms with AdamW.  Each log line is a JSON object in `--log`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import model as llama
import numpy as np
import torch
from tokenizers import Tokenizer

# glibc returns large blocks to the system at once; keeping them is worth a fifth of the speed.
# Threads that wait without spinning leave the cores to others on a shared machine.
KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Muon:
    """Momentum, orthogonalised; one tensor holds the matrices of all layers."""

    def __init__(self, params: list, momentum: float = 0.95, decay: float = 0.02) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay
        self.state = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for p, buf in zip(self.params, self.state, strict=True):
            buf.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(p.grad.lerp(buf, self.momentum))
            gain = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
            p.mul_(1 - rate * self.decay).add_(update, alpha=-rate * gain)
            p.grad = None


def orthogonal(grad: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, batched over layers."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = grad.shape[-2] > grad.shape[-1]
    x = (grad.mT if tall else grad).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).float()


def breaks(path: Path) -> dict[int, list[int]]:
    """Tokens that join a line break with indentation, and the two tokens they can be split into.

    Text never holds the split form, but a prompt that ends with a line break does.  A model that
    has not seen it takes a lone line break for the end of the document.
    """
    tokenizer = Tokenizer.from_file(str(path))
    out = {}
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        ends = text.rfind("\n") + 1
        if 0 < ends < len(text) and not text[ends:].strip(" "):
            out[token] = tokenizer.encode(text[:ends]).ids + tokenizer.encode(text[ends:]).ids
    return out


class Documents:
    """Endless rows of tokens: all documents in a new order each epoch, packed one after another.

    The state is a seed and a count of epochs and tokens, so that a resumed run goes on exactly
    where the last one stopped.
    """

    def __init__(self, path: Path, seed: int, align: float = 0.3, split: float = 0.06) -> None:
        data = np.load(path)
        self.breaks, self.split = breaks(path.parent / "tokenizer.json"), split
        ends = np.flatnonzero(data == 0) + 1
        self.docs = np.split(data, ends[:-1] if ends[-1] == len(data) else ends)
        self.seed, self.align = seed, align
        self.epoch, self.at = -1, 0
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch += 1
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.docs))
        self.stream = np.concatenate([self.docs[i] for i in order])
        self.starts = np.cumsum([0] + [len(self.docs[i]) for i in order])
        self.at = 0

    def row(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """`length` + 1 tokens; three rows in ten start at the start of a document.

        A few line breaks are split from the indentation after them, see `breaks`.
        """
        if rng.random() < self.align:
            self.at = int(self.starts[np.searchsorted(self.starts, self.at)])
        if self.at + length + 1 > len(self.stream):
            self._next_epoch()
        row = self.stream[self.at : self.at + length + 1]
        self.at += length
        pieces: list[int] = []
        for token, draw in zip(row.tolist(), rng.random(len(row)), strict=True):
            pieces += self.breaks[token] if draw < self.split and token in self.breaks else [token]
        return np.array(pieces[: length + 1], np.int64)

    def state(self) -> tuple[int, int]:
        return self.epoch, self.at

    def restore(self, state: tuple[int, int]) -> None:
        self.epoch = state[0] - 1
        self._next_epoch()
        self.at = state[1]


def schedule(done: float, warm: float = 0.01, decay_from: float = 0.5) -> float:
    """Share of the top learning rate: short warm-up, constant, then linear to nearly zero."""
    if done < warm:
        return max(done / warm, 0.05)
    return min(1.0, max(0.02, (1 - done) / (1 - decay_from)))


def length_at(done: float, stages: list[tuple[float, int]]) -> int:
    return next(length for until, length in stages if done < until or until >= 1)


def begin_process(threads: int) -> None:
    """Set the threads; begin anew where the environment of ``KEEP`` is not in force yet."""
    if os.environ.get("MALLOC_MMAP_MAX_") is None and sys.platform == "linux":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})
    torch.set_num_threads(threads)


def compile_model() -> None:
    llama.layer = torch.compile(llama.layer, dynamic=False)
    llama.head = torch.compile(llama.head, dynamic=False)


def optimizers(net: llama.Llama, rate_embed: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for matrices, AdamW for embeddings and vectors."""
    groups = [{"params": [net.embed], "weight_decay": 0.01}, {"params": net.vectors()}]
    return Muon(net.matrices()), torch.optim.AdamW(groups, lr=rate_embed, betas=(0.9, 0.95), weight_decay=0.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("build/training"))
    add("--log", type=Path, default=Path("training/log.jsonl"))
    add("--minutes", type=float, default=80.0, help="training time, summed over resumes")
    add("--tokens", type=int, default=8192, help="tokens in a step")
    add("--maths", type=float, default=0.27, help="share of rows from maths")
    add("--rate", type=float, default=0.02, help="top learning rate of Muon")
    add("--rate-embed", type=float, default=0.003, help="top learning rate of AdamW")
    add("--stages", default="0.45:256,0.75:512,1:1024", help="until which share: which length")
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=2)
    add("--save-every", type=float, default=8.0, help="minutes between checkpoints")
    add("--log-every", type=float, default=30.0, help="seconds between log lines")
    add("--resume", action="store_true", help="go on from checkpoint.pt")
    add("--no-compile", action="store_true", help="no torch.compile (no C++ compiler needed)")
    args = parser.parse_args()
    for name in ("code.npy", "maths.npy"):
        if not (args.work_dir / name).is_file():
            parser.error(f"{args.work_dir / name} is missing: run training/corpus.py first")
    if args.resume and not (args.work_dir / "checkpoint.pt").is_file():
        parser.error(f"{args.work_dir}/checkpoint.pt is missing: nothing to resume")
    args.stages = [(float(a), int(b)) for a, b in (s.split(":") for s in args.stages.split(","))]
    return args


def main() -> None:
    args = parse()
    begin_process(args.threads)
    shape = llama.Shape()
    net = llama.Llama(shape, args.seed)
    if not args.no_compile:
        compile_model()
    muon, adam = optimizers(net, args.rate_embed)
    data = {n: Documents(args.work_dir / f"{n}.npy", args.seed) for n in ("code", "maths")}
    step, tokens, spent = 0, 0, 0.0
    if args.resume:
        saved = torch.load(args.work_dir / "checkpoint.pt", weights_only=False)
        net.load_state_dict(saved["net"])
        muon.state = saved["muon"]
        adam.load_state_dict(saved["adam"])
        step, tokens, spent = saved["step"], saved["tokens"], saved["spent"]
        for name, state in saved["data"].items():
            data[name].restore(state)
    args.log.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        state = {"net": net.state_dict(), "muon": muon.state, "adam": adam.state_dict()}
        state |= {"step": step, "tokens": tokens, "spent": spent, "shape": shape.asdict()}
        state["data"] = {name: d.state() for name, d in data.items()}
        part = args.work_dir / "checkpoint.part"
        torch.save(state, part)
        part.replace(args.work_dir / "checkpoint.pt")

    limit, last = args.minutes * 60, time.time()
    logged = saved_at = last
    window: list[float] = []
    window_tokens, began = 0, last
    while spent < limit:
        done = spent / limit
        length = length_at(done, args.stages)
        rng = np.random.default_rng((args.seed, step))
        count = args.tokens // length
        rows = [data["maths" if rng.random() < args.maths else "code"] for _ in range(count)]
        batch = torch.from_numpy(np.stack([d.row(length, rng) for d in rows]))
        hidden = net(batch[:, :-1])
        goal = batch[:, 1:].reshape(-1)
        loss = llama.TiedLoss.apply(hidden.reshape(-1, shape.hidden), net.embed, goal, 2048)
        loss.backward()
        share = schedule(done)
        torch.nn.utils.clip_grad_norm_([net.embed, *net.vectors()], 1.0)
        for group in adam.param_groups:
            group["lr"] = args.rate_embed * share
        muon.step(args.rate * share)
        adam.step()
        adam.zero_grad(set_to_none=True)
        window.append(float(loss.detach()))
        if not math.isfinite(window[-1]):
            sys.exit(f"step {step}: the loss is {window[-1]}; lower --rate and --resume")
        step, tokens, window_tokens = step + 1, tokens + goal.numel(), window_tokens + goal.numel()
        now = time.time()
        spent, last = spent + now - last, now
        if now - logged >= args.log_every or spent >= limit:
            row = {
                "step": step,
                "tokens": tokens,
                "loss": round(sum(window) / len(window), 4),
                "rate": round(args.rate * share, 5),
                "length": length,
                "tokens_per_s": round(window_tokens / (now - began)),
                "elapsed_s": round(spent),
                "left_s": round(max(0.0, limit - spent)),
            }
            with args.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            window, window_tokens, logged, began = [], 0, now, now
        if now - saved_at >= args.save_every * 60:
            save()
            saved_at = now
    save()


if __name__ == "__main__":
    main()

"""Every check that needs an NVIDIA GPU, in one command and one table: `make gpu-check`.

    kernel     the attention kernel, compiled, against the definition in float64
    attention  120 rows over 8192 tokens, 32 and 8 key heads, beside its floor
    step       t(k) of a random 7B Llama in bf16: transformers eager, tree steps, captured passes, floor
    text       lookahead on captured passes against plain decoding, token for token
    ranks      lookahead parallelism over nccl, where there are two GPUs

No model is downloaded: weights are random. Without a GPU, `--tiny` rehearses everything but the capture, small
and on the CPU; its times mean nothing.

    python scripts/gpu_check.py [--tiny] [--out docs/results/gpu-check.md] [--only kernel,attention,...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

ROWS = (1, 2, 4, 8, 16, 32, 64, 120, 128, 256)
CONTEXTS = (512, 2048, 8192)
SHAPE_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 16384,
}  # fmt: skip
SHAPE_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 1024,
}  # fmt: skip


class Table:
    """Lines of (check, what, value, bound, verdict), printed as they come and kept for the page."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str, str, str]] = []
        self.failed = 0

    def add(self, check: str, what: str, value: str, bound: str = "", holds: bool | None = None) -> None:
        verdict = "" if holds is None else "ok" if holds else "MISSED"
        self.failed += holds is False
        self.lines.append((check, what, value, bound, verdict))
        print(f"{check:10} {what:58} {value:>24} {bound:>18} {verdict}", flush=True)

    def page(self, where: str, command: str) -> str:
        head = f"# GPU check\n\n`{command}`\n\n{where}\n\n| check | what | value | bound | verdict |\n"
        return (
            head
            + "| --- | --- | ---: | ---: | --- |\n"
            + "".join(f"| {' | '.join(x)} |\n" for x in self.lines)
        )


class Machine:
    """The device, its clock, and its ceilings."""

    def __init__(self, tiny: bool) -> None:
        import torch

        self.torch = torch
        self.tiny = tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        size = 1 << (22 if tiny else 30)
        buffer = torch.ones(size, dtype=torch.int32, device=self.device)
        self.bandwidth = 4 * size / self.time(lambda: buffer.sum())
        side = 256 if tiny else 8192
        a = torch.randn(side, side, dtype=self.dtype, device=self.device)
        self.rate = 2 * side**3 / self.time(lambda: a @ a)

    def time(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Median seconds, each call timed by itself, after three that are not counted."""
        torch = self.torch
        repeats = 3 if self.tiny else repeats
        spent = []
        for number in range(repeats + 3):
            if not self.tiny:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if not self.tiny:
                torch.cuda.synchronize()
            if number >= 3:
                spent.append(time.perf_counter() - start)
        return median(spent)

    def describe(self) -> str:
        import transformers

        torch = self.torch
        name = "CPU (rehearsal; times mean nothing)" if self.tiny else torch.cuda.get_device_name()
        try:
            import triton

            kernel = f"triton {triton.__version__}"
        except ImportError:
            kernel = "no triton"
        return (
            f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {kernel}, "
            f"read bandwidth {self.bandwidth / 1e9:.0f} GB/s, matrix rate {self.rate / 1e12:.1f} TFLOP/s in "
            f"{str(self.dtype).removeprefix('torch.')}, commit {_commit()}"
        )


def check_kernel(machine: Machine, table: Table) -> None:
    """The same tests that run in the interpreter elsewhere."""
    files = ["tests/test_attention.py", "tests/test_attention_register.py", "tests/test_attention_graphed.py"]
    few = ["-k", "rows and (1 or 33)"] if machine.tiny else []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *few, *files], capture_output=True, text=True, check=False
    )
    last = (run.stdout.strip().splitlines() or [run.stderr.strip()[-200:]])[-1]
    table.add("kernel", "tests against the definition in float64", last.strip("= "), "", run.returncode == 0)
    if run.returncode:
        print(run.stdout[-4000:])


def attention_problem(machine: Machine, rows: int, length: int, heads: int, kv_heads: int, size: int) -> Any:
    """A window-and-candidates-like tree over a random cache."""
    from lookahead.attention import pack_bits
    from lookahead.core import TokenTree

    torch = machine.torch
    tree = TokenTree(0)
    for chain in range((rows + 3) // 4):
        tree.add_candidate([chain, 1, 2, 3][: max(0, min(4, rows - len(tree)))])
    while len(tree) < rows:
        tree.add(len(tree), len(tree) - 1)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=machine.device, dtype=machine.dtype)

    return {
        "query": normal(1, heads, rows, size),
        "key": normal(1, kv_heads, length + rows, size),
        "value": normal(1, kv_heads, length + rows, size),
        "lengths": torch.tensor([length], dtype=torch.int32, device=machine.device),
        "words": pack_bits([tree.ancestors], rows).to(machine.device),
        "depths": torch.tensor([tree.depths], dtype=torch.int32, device=machine.device),
    }


def check_attention(machine: Machine, table: Table) -> None:
    """120 rows over 8192 tokens within 2 times the floor; a speed is not reported for a wrong result."""
    from lookahead import attention

    length, size = (64, 16) if machine.tiny else (8192, 128)
    for heads, kv_heads in ((32, 32), (32, 8)):
        for rows in (1, 16, 120):
            given = attention_problem(machine, rows, length, heads, kv_heads, size)
            double = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
            exact = attention.get("naive")(**double)
            item = given["key"].element_size()
            floor = max(
                2 * kv_heads * (length + rows) * size * item / machine.bandwidth,
                4 * heads * rows * (length + rows) * size / machine.rate,
            )
            for name in ("sdpa", "triton"):
                what = f"{name}, {rows} rows, {length} tokens, {heads}/{kv_heads} heads"
                try:
                    # The backend itself: what falls back must not be measured under its name.
                    attend = import_module(f"lookahead.attention.{name}").attend
                    wrong = float((attend(**given).double() - exact).abs().max())
                except Exception as error:
                    first = (str(error).splitlines() or [""])[0][:60]
                    table.add("attention", what, f"{type(error).__name__}: {first}", "", machine.tiny)
                    continue
                if not wrong < 2e-2:
                    table.add("attention", what, f"wrong by {wrong:.2g}", "2e-2", False)
                    continue
                seconds = machine.time(lambda attend=attend, given=given: attend(**given))
                judged = name == "triton" and rows == 120 and not machine.tiny
                table.add(
                    "attention", what, f"{seconds * 1e6:.1f} us, {seconds / floor:.2f} floors",
                    "2.00 floors" if judged else "", seconds <= 2 * floor if judged else None,
                )  # fmt: skip


def make_model(machine: Machine, **shape: int) -> Any:
    """Random weights on the device; no download."""
    import transformers

    torch = machine.torch
    config = transformers.LlamaConfig(**(shape or (SHAPE_TINY if machine.tiny else SHAPE_7B)), use_cache=True)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(machine.dtype)
    try:
        with machine.device:
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def sample_tree(rows: int, vocabulary: int) -> Any:
    from lookahead.core import TokenTree

    tree = TokenTree(1)
    number = 0
    while len(tree) < rows:
        number += 1
        tree.add_candidate([number % vocabulary, number // vocabulary + 2, 3, 4][: min(4, rows - len(tree))])
    return tree


def check_step(machine: Machine, table: Table) -> None:
    """t(k) on the 7B shape, three ways, with the floor: bytes over bandwidth, operations over rate."""
    from lookahead.attention.register import enable
    from lookahead.targets.graphed import GraphedTarget
    from lookahead.targets.transformers import ModelFacts, TransformersTarget

    torch = machine.torch
    model = make_model(machine)
    facts = ModelFacts(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - (
        model.model.embed_tokens.weight.numel() * model.model.embed_tokens.weight.element_size()
    )
    operations = 2 * (sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel())
    per_token = sum(heads * (k + v) for heads, k, v in facts.shapes) * facts.dtype.itemsize
    contexts = (64, 128) if machine.tiny else CONTEXTS
    many = [k for k in ROWS if not machine.tiny or k <= 32]
    prompt = {n: [1 + (7 * i) % (facts.vocabulary - 2) for i in range(n)] for n in contexts}
    kinds: list[tuple[str, Callable[[], Any]]] = [
        ("transformers, masks", lambda: TransformersTarget(model, facts, max(contexts) + 512)),
        ("graphs and kernel", lambda: GraphedTarget(model, facts, max(contexts) + 512)),
    ]
    for kind, make in kinds:
        if kind == "graphs and kernel":
            enable(model)
        target = make()
        for context in contexts:
            target.prefill([(0, prompt[context])])
            one = 0.0
            for k in many:
                tree = sample_tree(k, facts.vocabulary)
                floor = max(
                    (weights + per_token * (context + k)) / machine.bandwidth, operations * k / machine.rate
                )

                def step(target: Any = target, tree: Any = tree) -> None:
                    target.forward([(0, tree)])[0].best(0)

                seconds = machine.time(step)
                one = one or seconds
                judged = kind == "graphs and kernel" and not machine.tiny
                bound, holds = "", None
                if judged and k == 1:
                    bound, holds = "1.20 floors", seconds <= 1.2 * floor
                if judged and k == 64:
                    bound, holds = "1.10 t(1)", seconds <= 1.1 * one
                value = f"{seconds * 1e3:.2f} ms, {seconds / floor:.2f} floors, {seconds / one:.2f} t(1)"
                table.add("step", f"{kind}, {k} rows, {context} tokens", value, bound, holds)
            target.release(0)
        if getattr(target, "refused", False):
            table.add("step", "captured passes", "capture was refused", "", False)
        del target
        if not machine.tiny:
            torch.cuda.empty_cache()


def check_text(machine: Machine, table: Table) -> None:
    """Captured passes against plain decoding, in full precision, so that every token must be equal."""
    from lookahead.attention.register import enable
    from lookahead.targets.graphed import GraphedTarget
    from lookahead.testing import assert_same_as_autoregressive, tiny_model

    machine.torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model("llama", initializer_range=0.1).to(machine.device)
    enable(model)
    prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9], [3, 4, 3, 4, 3]]
    tokens = accepted = 0
    for method in ("lookahead", "prompt-lookup", "jacobi"):
        for prompt in prompts:
            (made,) = assert_same_as_autoregressive(GraphedTarget(model), [prompt], method, (7, 5, 7), 100)
            tokens += len(made.tokens)
            accepted += made.stats.accepted
    table.add(
        "text", "lookahead, prompt lookup, Jacobi against plain decoding", f"{tokens} tokens equal", "", True
    )
    table.add("text", "drafted tokens accepted on the way", str(accepted), "at least 1", accepted > 0)


def check_ranks(machine: Machine, table: Table) -> None:
    """This script again, under torchrun, on every GPU."""
    several = 2 if machine.tiny else machine.torch.cuda.device_count()
    if several < 2:
        table.add("ranks", "lookahead parallelism over nccl", "one GPU only, not run")
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(several),
        __file__,
        "--as-rank",
    ]
    run = subprocess.run(
        [*command, *(["--tiny"] if machine.tiny else [])], capture_output=True, text=True, check=False
    )
    for line in run.stdout.splitlines():
        if line.startswith("RANKS "):
            table.add("ranks", *line.removeprefix("RANKS ").split(" | "))
    table.add(
        "ranks",
        f"{several} ranks against one, token for token",
        f"exit {run.returncode}",
        "",
        not run.returncode,
    )
    if run.returncode:
        print(run.stdout[-2000:], run.stderr[-4000:])


def as_rank(tiny: bool) -> None:
    """What each process of ``check_ranks`` does."""
    import torch

    from lookahead import parallel
    from lookahead.targets.probe import make_target
    from lookahead.testing import assert_same_as_autoregressive, tiny_model

    group = parallel.start("gloo" if tiny else "nccl", 60)
    device = "cpu" if tiny else parallel.local_device()
    if not tiny:
        torch.cuda.set_device(device)
    _sending(group, device)
    model = tiny_model("llama", initializer_range=0.1).to(device)
    team = parallel.join(lambda: make_target(model), group, model)
    prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]
    target = team.target()
    assert_same_as_autoregressive(target, prompts, "lookahead", (15, 5, 15), 60)
    assert_same_as_autoregressive(target, prompts, "lookahead", (15, 5, 15), 60, choose=lambda: by_row)
    start, steps, sent = time.perf_counter(), target.steps, team.bytes_exchanged
    assert_same_as_autoregressive(target, prompts[:1], "lookahead", (15, 5, 15), 60)
    spent = (time.perf_counter() - start) / (target.steps - steps)
    print(f"RANKS a step of the tiny model, all included | {spent * 1e6:.0f} us")
    print(f"RANKS bytes exchanged per step | {(team.bytes_exchanged - sent) / (target.steps - steps):.0f}")
    team.close()


def _sending(group: Any, device: str) -> None:
    """Time to bring bytes from rank 0 to rank 1: what sending keys and values would add to a step."""
    import torch

    for size, what in (
        (4096, "4 KiB, a frame"),
        (1 << 19, "512 KiB, keys and values of a token of the 7B shape"),
    ):
        data, spent = torch.zeros(size // 2, dtype=torch.bfloat16, device=device), []
        for _ in range(30 if group.rank < 2 else 0):
            start = time.perf_counter()
            if group.rank == 0:
                group.links[1].send_row(data)
                group.links[1].flush()
            else:
                group.links[0].receive_row(data)
            if device != "cpu":
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)
        if group.rank == 0:
            print(f"RANKS sending {what} | {median(spent) * 1e6:.0f} us")


def by_row(scores: Any, node: int) -> int:
    """Greedy by the whole row, so that rows of logits travel."""
    return int(scores.row(node).argmax())


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


CHECKS = {
    "kernel": check_kernel, "attention": check_attention, "step": check_step, "text": check_text,
    "ranks": check_ranks,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--only", help="checks by name, with commas between")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    if given.as_rank:
        as_rank(given.tiny)
        return 0
    if not given.tiny and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f"; torch {torch.__version__} is a build without CUDA"
        print(
            f"gpu-check needs an NVIDIA GPU and finds none{built}; --tiny rehearses on the CPU",
            file=sys.stderr,
        )
        return 2
    names = given.only.split(",") if given.only else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"unknown check {unknown[0]!r}; known are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    os.chdir(Path(__file__).resolve().parent.parent)
    machine, table = Machine(given.tiny), Table()
    where = machine.describe()
    print(where, flush=True)
    for name in names:
        try:
            CHECKS[name](machine, table)
        except Exception as error:  # one check that fails must not hide the others
            traceback.print_exc()
            table.add(name, "did not finish", f"{type(error).__name__}", "", False)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(table.page(where, "python " + " ".join(sys.argv)), encoding="utf-8")
    print(f"{len(table.lines)} lines, {table.failed} missed")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())

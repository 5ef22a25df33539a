"""The checks of gpu_check.py, each in a separate process: `python scripts/gpu_checks.py NAME [--tiny] ...`.

Results are printed as tab-separated fields. A line of the table of verdicts is TABLE, what, value, bound, verdict. A
row of another table is ROW, title, key, cells as JSON; it replaces an earlier row with the same key.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
BEGIN = time.monotonic()
STEP_TITLE = "t(k): captured passes of a random 7B Llama in bfloat16"
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 120, 128, 192, 256)
CONTEXTS = (512, 2048, 8192)
SHAPE_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
}
SHAPE_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
}
FAMILIES = (
    "llama",
    "qwen3",
    "mistral-sliding",
    "gemma2",
    "phi3",
    "gpt-neox",
    "deepseek-v3",
    "mixtral",
    "gpt-oss",
)
#: Tile sizes tried in addition to the default: rows, keys, warps, stages.
TILES = (
    (128, 64, 8, 2),
    (128, 64, 8, 4),
    (128, 64, 4, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 32, 8, 3),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
)


def table(what: str, value: str, bound: str = "", holds: bool | None = None) -> None:
    verdict = "" if holds is None else "ok" if holds else "MISSED"
    print("TABLE", what.replace("|", "/"), value.replace("|", "/"), bound, verdict, sep="\t", flush=True)


def row(title: str, key: str, **cells: str) -> None:
    print("ROW", title, key, json.dumps(cells), sep="\t", flush=True)


class Machine:
    """The device, its clocks, its measured peak rates, and the command-line options.

    Args:
        tiny: a dry run on the CPU.
        model: the model that is decoded with; None for the default model.
        dtype: dtype of that model.
        seconds: time limit, after which nothing is repeated.
    """

    def __init__(
        self, tiny: bool, model: str | None = None, dtype: str = "bfloat16", seconds: float = 60.0
    ) -> None:
        import torch

        self.torch = torch
        self.tiny = tiny
        self.model = model
        self.model_dtype = dtype
        self.end = BEGIN + seconds
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16

    def start_peak(self) -> None:
        """Forget the largest use of memory so far."""
        if not self.tiny:
            self.torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The largest use of memory since ``start_peak``, in bytes; 0 on a CPU."""
        return 0 if self.tiny else self.torch.cuda.max_memory_allocated()

    def measure(self) -> None:
        """Measure the rates for the lower bounds: a matrix product, and the faster of a sum (read) and a copy."""
        torch = self.torch
        size = 1 << (20 if self.tiny else 30)
        buffer = torch.ones(size, device=self.device)
        self.bandwidth = 4 * size / self.time(lambda: buffer.sum())
        half = buffer[: size // 2]
        self.bandwidth = max(self.bandwidth, 4 * size / self.time(lambda: buffer[size // 2 :].copy_(half)))
        side = 256 if self.tiny else 8192
        a = torch.randn(side, side, dtype=self.dtype, device=self.device)
        self.rate = 2 * side**3 / self.time(lambda: a @ a)
        table(
            "measured rates of the lower bounds",
            f"{self.bandwidth / 1e9:.0f} GB/s, {self.rate / 1e12:.1f} TFLOP/s in {str(self.dtype)[6:]}",
        )

    def time(self, call: Callable[[], Any], repeats: int = 15) -> float:
        """Median seconds by the host's clock, synchronized after each call. The first three calls do not count."""
        spent = []
        for number in range((3 if self.tiny else repeats) + 3):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            if number >= 3:
                spent.append(time.perf_counter() - start)
        return median(spent)

    def wait(self) -> None:
        if not self.tiny:
            self.torch.cuda.synchronize()

    def device_time(self, calls: Sequence[Callable[[], Any]], capture: bool = True) -> tuple[float, str]:
        """(seconds of one call by the device's clock, how the calls were launched).

        All calls are captured into one graph, which removes their launch overhead. If ``capture`` is False, they are
        launched from Python without waiting in between. A capture must not fail, because that would make the device's
        random number generator unusable.
        """
        torch = self.torch
        if self.tiny:
            return self.time(calls[0]), "waited for"

        def all_of_them() -> list[Any]:
            return [call() for call in calls]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_of_them()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        run: Callable[[], Any] = all_of_them
        how = "launched from Python"
        kept = None
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = all_of_them()  # the graph writes to these tensors
            run = graph.replay
            how = "captured"
        spent = []
        for _ in range(14):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            spent.append(start.elapsed_time(end) / 1e3 / len(calls))
        del kept
        return median(spent[2:]), how

    def describe(self) -> str:
        import transformers

        torch = self.torch
        name = "CPU (dry run; times mean nothing)" if self.tiny else torch.cuda.get_device_name()
        try:
            import triton

            kernel = f"triton {triton.__version__}"
        except ImportError:
            kernel = "no triton"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {kernel}"
        return f"{name}, {versions}, commit {_commit()}"


# ---- certificate


def check_certificate(machine: Machine) -> None:
    """Which paths are available for each model, and why. Without captured passes, the other checks mean little."""
    from lookahead.core import SettingsError
    from lookahead.hf.paths import make_target
    from lookahead.hf.testing import tiny_model

    captured = {"path": "cuda-graph"}
    models = {
        name: tiny_model(name, initializer_range=0.1) for name in FAMILIES[: 1 if machine.tiny else None]
    }
    models = {name: model.to(machine.device, machine.dtype) for name, model in models.items()}
    models["Llama of the 7B shape"] = make_model(machine)
    for name, model in models.items():
        for what, options in (
            ("captured passes", captured),
            ("exact mode", {"path": "exact"}),
        ):
            try:
                reason = make_target(model, **options).reason
                holds = True
            except SettingsError as error:
                reason = str(error)
                holds = False
            print(name, what, reason, flush=True)
            table(f"{what}: {name}", reason.split(": ", 1)[-1][:110], "", holds)


# ---- kernel


def check_kernel(machine: Machine) -> None:
    """Run the tests of the kernel, which otherwise run in Triton's interpreter.

    They run in several processes, because most of their time is compilation.
    """
    attention = "tests/test_attention.py"
    parts = [
        [attention, "-k", "(rows or dtypes) and triton"],
        [attention, "-k", "(grouped or contexts or 32k or room or windows) and triton"],
        [attention, "-k", "not rows and not dtypes and not grouped and not contexts and not windows"],
        ["tests/test_attention_exact.py"],
        [
            "tests/test_attention_hook.py",
            "tests/test_cuda_graphs.py",
            "tests/test_attention_overlap.py",
            "tests/test_exact.py",
        ],
        ["tests/test_hidden.py", "tests/test_learned_use.py"],
    ]
    if machine.tiny:
        parts = [[attention, "-k", "test_rows and triton-33"], ["tests/test_attention_overlap.py"]]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))

    def run(part: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *part],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(len(parts)) as pool:
        for part, done in zip(parts, pool.map(run, parts), strict=True):
            last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-120:]])[-1].strip("= ")
            dots = sum(
                line.count(".")
                for line in done.stdout.splitlines()
                if set(line) <= set(".sFxE[]% 0123456789")
            )
            value = f"{dots} passed" if done.returncode == 0 else last[:80]
            table(f"tests {' '.join(part)}", value, "", done.returncode == 0)
            if done.returncode:
                print(done.stdout[-6000:], done.stderr[-1000:], flush=True)


# ---- attention


def attention_problem(machine: Machine, rows: int, length: int, heads: int, kv_heads: int, size: int) -> Any:
    """A tree of lookahead decoding over a random cache, with free space after it as in a captured pass."""
    from lookahead.hf.attention import pack_bits

    torch = machine.torch
    tree = sample_tree(rows, 1000)

    generator = torch.Generator(machine.device).manual_seed(rows)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=machine.device, dtype=machine.dtype, generator=generator)

    return {
        "query": normal(1, heads, rows, size),
        "key": normal(1, kv_heads, length + rows, size),
        "value": normal(1, kv_heads, length + rows, size),
        "lengths": torch.tensor([length], dtype=torch.int32, device=machine.device),
        "words": pack_bits([tree.ancestors], rows).to(machine.device),
        "depths": torch.tensor([tree.depths], dtype=torch.int32, device=machine.device),
    }


def check_attention(machine: Machine) -> None:
    """Check that 120 rows over 8192 tokens take at most twice the lower bound. Wrong results are not timed."""
    from lookahead.hf import attention

    length, size = (64, 16) if machine.tiny else (8192, 128)
    few = (2, 1) if machine.tiny else (32, 8)
    for heads, kv_heads in ((few[0], few[0]), few):
        for rows in (21, 1) if machine.tiny else (120, 64, 16, 1):
            given = attention_problem(machine, rows, length, heads, kv_heads, size)
            double = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
            exact = attention.get("reference")(**double)
            del double
            bytes_read = 2 * kv_heads * (length + rows) * size * given["key"].element_size()
            floor = max(
                bytes_read / machine.bandwidth, 4 * heads * rows * (length + rows) * size / machine.rate
            )
            # Alternate between KV caches that together exceed the GPU's own cache.
            count = 1 if machine.tiny else max(2, -(-600_000_000 // bytes_read))
            caches = [given] + [
                {**given, "key": given["key"].clone(), "value": given["value"].clone()}
                for _ in range(count - 1)
            ]
            case = f"{rows} rows, {length} tokens, {heads}/{kv_heads} heads"
            for name in ("triton", "sdpa"):
                attend = attention.get(name)
                judged = name == "triton" and rows == 120 and not machine.tiny
                attention_line(machine, f"{name}, {case}", attend, caches, exact, floor, judged)
            if rows in (120, 21):
                other_tiles(machine, case, caches, exact, floor)


def attention_line(
    machine: Machine, what: str, attend: Any, caches: list[Any], exact: Any, floor: float, judged: bool
) -> float | None:
    """Check and time an implementation. Returns its seconds, or None if it is wrong or fails."""
    try:
        wrong = float((attend(**caches[0]).double() - exact).abs().max() / exact.std())
        if not wrong < 0.1:
            table(what, f"wrong by {wrong:.2g} standard deviations", "0.1", False)
            return None
        calls = [lambda given=given: attend(**given) for given in caches]
        seconds, how = machine.device_time(calls, True)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:80]
        table(what, f"{type(error).__name__}: {first}", "", False if judged else None)
        return None
    value = f"{seconds * 1e6:.1f} us, {seconds / floor:.2f} floors, {how}"
    table(what, value, "2.00 floors" if judged else "", seconds <= 2 * floor if judged else None)
    return seconds


def other_tiles(machine: Machine, case: str, caches: list[Any], exact: Any, floor: float) -> None:
    """Time other tile sizes and numbers of parts, and report the best."""
    from functools import partial

    try:
        from lookahead.hf.attention import triton as kernel
    except ImportError:
        return
    query = caches[0]["query"]
    key = caches[0]["key"]
    members = query.shape[1] // key.shape[1] * query.shape[2]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    default = kernel.blocks(members, query.shape[-1], query.shape[-1], query.element_size())
    tiles = [default, *(dict(zip(names, sizes, strict=True)) for sizes in TILES)]
    timed: list[tuple[float, dict[str, int]]] = []

    def try_(tuning: dict[str, int]) -> None:
        attend = partial(kernel.attend, tuning=tuning)
        try:
            if float((attend(**caches[0]).double() - exact).abs().max() / exact.std()) < 0.1:
                calls = [lambda given=given: attend(**given) for given in caches]
                timed.append((machine.device_time(calls)[0], tuning))
        except Exception as error:  # for example too large for this card
            print(f"{tuning}: {type(error).__name__}", flush=True)

    for tuning in tiles[: 2 if machine.tiny else None]:
        try_(tuning)
    best = min(timed, key=lambda pair: pair[0])[1] if timed else default
    for parts in (1, 2, 3) if machine.tiny else (2, 4, 6, 8, 12, 16, 24, 32):
        try_({**best, "parts": parts})
    if timed:
        seconds, tuning = min(timed, key=lambda pair: pair[0])
        chosen = ", ".join(f"{name} {value}" for name, value in tuning.items())
        table(
            f"best of {len(timed)} tilings, {case}",
            f"{seconds * 1e6:.1f} us, {seconds / floor:.2f} floors: {chosen}",
        )


# ---- step


def make_model(machine: Machine, **shape: int) -> Any:
    """A Llama with random weights on the device."""
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
    """A tree with a (15, 5) window if the rows have room for it, and candidates of four tokens."""
    from lookahead.core import TokenTree
    from lookahead.drafters import Window

    tree = TokenTree(1)
    if rows >= 62:
        numbers = iter(range(2, 10_000))
        window = Window(15, 5, lambda: next(numbers) % vocabulary)
        for _ in range(3):
            window.advance(1, [next(numbers) % vocabulary for _ in range(window.columns)], frozenset())
        window.add_to(tree)
    number = 0
    while len(tree) < rows:
        number += 1
        tree.add_candidate([number % vocabulary, number // vocabulary + 2, 3, 4][: min(4, rows - len(tree))])
    return tree


def eager_step(machine: Machine, model: Any, prompt: list[int], rows: int) -> Callable[[], Any]:
    """A pass of transformers over a causal chain of as many tokens, with its own cache and attention."""
    from transformers import DynamicCache

    torch = machine.torch
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt], device=machine.device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        with torch.no_grad():
            logits = model(input_ids=ids[:, :rows], past_key_values=cache).logits
        logits.argmax(-1).tolist()
        cache.crop(-rows)

    return step


def check_step(machine: Machine) -> None:
    """Measure t(k) on the 7B shape, with its lower bound: bytes over bandwidth, or operations over matrix rate."""
    from lookahead.hf.paths import make_target, probe
    from lookahead.hf.target import TransformersTarget

    # The target that is chosen for this model.
    model = make_model(machine)
    facts = probe(model).facts
    start = time.perf_counter()
    target = make_target(model, **({"path": "cuda-graph"} if machine.tiny else {}))
    machine.wait()
    took = f"{time.perf_counter() - start:.1f} s: {target.reason[:110]}"
    table("make_target by itself, once per model", took, "cuda-graph", target.path == "cuda-graph")
    if not machine.tiny:
        table(
            "attention in the captured passes",
            target.reason.split("attention by ")[-1].split(" ")[0],
            "triton",
            "attention by triton" in target.reason,
        )

    # Captured passes come first, because they have a verdict.
    contexts = (64, 128) if machine.tiny else CONTEXTS
    many = [k for k in ROWS if not machine.tiny or k in (1, 8, 64, 128)]
    prompts = {n: [1 + (7 * i) % (facts.vocabulary - 2) for i in range(n)] for n in contexts}
    floor = _floor_of(machine, model, facts)
    one_row = {}
    for context in contexts:
        if one_row and time.monotonic() > machine.end:
            break
        target.prefill([(0, prompts[context])])
        for k in many:
            tree = sample_tree(k, facts.vocabulary)
            seconds = machine.time(lambda tree=tree: target.forward([(0, tree)])[0].best(0))
            one_row.setdefault(context, seconds)
            bound = ""
            holds: bool | None = None
            if not machine.tiny and k == 1:
                bound = "1.20 floors"
                holds = seconds <= 1.2 * floor(context, k)
            if not machine.tiny and k == 64:
                bound = "1.10 t(1)"
                holds = seconds <= 1.1 * one_row[context]
            what = f"captured passes, {k} rows, {context} tokens"
            if holds is not None:
                table(what, _times(seconds, floor(context, k), one_row[context]), bound, holds)
            launched, free = launch_times(machine, target, tree)
            row(
                STEP_TITLE,
                what,
                tokens=str(context),
                rows=str(k),
                ms=f"{seconds * 1e3:.3f}",
                floor=f"{floor(context, k) * 1e3:.3f}",
                floors=f"{seconds / floor(context, k):.2f}",
                **{
                    "t(1)": f"{seconds / one_row[context]:.2f}",
                    "us until launched": f"{launched * 1e6:.0f}",
                    "us free": f"{free * 1e6:.0f}",
                },
            )
        target.release(0)

    # The same steps without captured passes.
    plain = TransformersTarget(model, facts, max(contexts) + 512)
    for context in one_row:
        if time.monotonic() > machine.end:
            break
        plain.prefill([(0, prompts[context])])
        for k in (1, 16, 64, 120):
            tree = sample_tree(k, facts.vocabulary)
            seconds = machine.time(lambda tree=tree: plain.forward([(0, tree)])[0].best(0), 7)
            other_step("tree steps with masks", k, context, seconds, floor(context, k), one_row[context])
        plain.release(0)
        for k in (1, 64):
            seconds = machine.time(eager_step(machine, model, prompts[context], min(k, context)), 7)
            other_step("transformers itself", k, context, seconds, floor(context, k), one_row[context])


def other_step(what: str, k: int, context: int, seconds: float, floor: float, one_row: float) -> None:
    title = "Steps of the same shape without captured passes"
    cells = {"step": what, "tokens": str(context), "rows": str(k), "ms": f"{seconds * 1e3:.3f}"}
    ratios = {"floors": f"{seconds / floor:.2f}", "captured t(1)": f"{seconds / one_row:.2f}"}
    row(title, f"{what} {context} {k}", **cells, **ratios)


def launch_times(machine: Machine, target: Any, tree: Any) -> tuple[float, float]:
    """(seconds until a step is launched, seconds from then until its result), medians over the same steps."""
    launched = []
    free = []
    for _ in range(3 if machine.tiny else 15):
        machine.wait()
        start = time.perf_counter()
        (scores,) = target.forward([(0, tree)])
        middle = time.perf_counter()
        scores.best(0)
        launched.append(middle - start)
        free.append(time.perf_counter() - middle)
    return median(launched), median(free)


def _floor_of(machine: Machine, model: Any, facts: Any) -> Callable[[int, int], float]:
    """(context, rows) -> lower bound in seconds: weights and cache are read once, or products at the matrix rate."""
    embedding = model.model.embed_tokens.weight
    weights = (
        sum(p.numel() * p.element_size() for p in model.parameters())
        - embedding.numel() * embedding.element_size()
    )
    operations = 2 * (sum(p.numel() for p in model.parameters()) - embedding.numel())
    per_token = sum(heads * (k + v) for heads, k, v in facts.shapes) * facts.dtype.itemsize
    return lambda context, k: max(
        (weights + per_token * (context + k)) / machine.bandwidth, operations * k / machine.rate
    )


def _times(seconds: float, floor: float, one_row: float) -> str:
    return f"{seconds * 1e3:.2f} ms, {seconds / floor:.2f} floors, {seconds / one_row:.2f} t(1)"


# ---- text


def check_text(machine: Machine) -> None:
    """Check that the path chosen by make_target in fp32, and exact mode in bfloat16, equal plain decoding."""
    torch = machine.torch
    from lookahead.hf.paths import make_target
    from lookahead.testing import assert_same_as_autoregressive

    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from families import tiny_model

    prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9], [3, 4, 3, 4, 3]]
    new = 16 if machine.tiny else 60
    for family in FAMILIES[: 1 if machine.tiny else None]:
        try:
            model = tiny_model(family, initializer_range=0.1).to(machine.device)
            target = make_target(model, **({"path": "cuda-graph"} if machine.tiny else {}))
            ways = {target.path: target}
            if family in FAMILIES[:4]:
                half = tiny_model(family, initializer_range=0.1).to(machine.device, torch.bfloat16)
                ways["exact, bfloat16"] = make_target(half, path="exact")
            for way, target in ways.items():
                tokens = accepted = 0
                for drafter in ("7,5,7", "prompt-lookup", "adaptive"):
                    for group in ([prompts[0]], [prompts[1]], prompts):
                        for made in assert_same_as_autoregressive(target, group, drafter, new):
                            tokens += len(made.tokens)
                            accepted += made.stats.accepted
                value = f"{tokens} tokens equal, {accepted} drafted ones accepted"
                table(f"{family}: {way}", value, "at least 1", accepted > 0)
            print(family, target.reason, flush=True)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:100]
            table(family, f"{type(error).__name__}: {first}", "", False)


def check_rows(machine: Machine) -> None:
    """Compare steps of 2 to 64 rows with single rows, bit by bit, on every path of the model."""
    from lookahead.cli.verify_rows import compare_paths, described

    for path in compare_paths(load_llm(machine)):
        first = path["from_rows"]
        value = (
            f"{path['differ'][first]:,} values differ at {first} rows; {described(path)}"
            if first
            else "all bits equal"
        )
        guaranteed = path["guaranteed"]
        table(
            f"rows: {path['path']}", value, "equal" if guaranteed else "", not first if guaranteed else None
        )


# ---- speed


#: Methods to compare: ours with each attention, and transformers'.
OURS = ("plain", "prompt-lookup", "lookahead:15,5,15", "lookahead:7,7,7", "adaptive", "adaptive:max_rows=128")
THEIRS = ("hf-greedy", "hf-prompt-lookup")
#: W = G for figure 8 of the paper, with N = 5 and an n-gram pool from the window alone.
WINDOWS = (2, 4, 8, 15, 32)
REPEATS = 3


class Tally:
    """Totals of a method over its completions."""

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = 0
        self.rows = 0
        self.equal = 0
        self.texts = 0
        self.seconds = 0.0

    def add(self, outcome: Any, plain: Sequence[int]) -> None:
        self.tokens += sum(outcome.step_tokens)
        self.steps += len(outcome.step_tokens)
        self.rows += sum(outcome.step_rows)
        self.seconds += sum(outcome.step_seconds)
        self.texts += 1
        self.equal += list(outcome.tokens) == list(plain)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def s(self) -> float:
        return self.tokens / max(1, self.steps)


def load_llm(machine: Machine) -> Any:
    """Load the model on the device.

    Raises:
        SystemExit: the default model is missing. ``load`` would read the bundled one, which writes nonsense.
    """
    import lookahead
    from lookahead.loading import GET_DEFAULT

    path = "tiny" if machine.tiny else machine.model
    dtype = "float32" if machine.tiny else machine.model_dtype
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "loading the bundled tiny model", UserWarning)
        try:
            return lookahead.load(path, dtype=dtype, device=str(machine.device), local_files_only=True)
        except UserWarning:
            raise SystemExit(
                f"the default model must be installed; pip install gguf accelerate && {GET_DEFAULT}"
            ) from None


def encoded_prompts(machine: Machine, llm: Any) -> list[list[int]]:
    """Prompts for code, for edits of a given text, and for prose."""
    from benchmarks.departures import PROMPTS

    chats = getattr(llm.tokenizer, "chat_template", None) is not None
    texts = PROMPTS[: 2 if machine.tiny else None]
    return [llm.encode([{"role": "user", "content": t}] if chat and chats else t) for t, chat in texts]


def targets_of(machine: Machine, llm: Any) -> dict[str, Any]:
    """Targets with captured passes, by name of the attention backend."""
    from lookahead.hf.cuda_graphs import CudaGraphTarget, captured_attention

    found = {}
    for backend in ("sdpa", "reference") if machine.tiny else ("triton", "sdpa"):
        attention, reason = captured_attention(llm.model.module, llm.model.probe.facts, backend)
        got = attention.backend if attention is not None else "none"
        table(f"captured passes with {backend}", reason[-110:], "", got == backend)
        if got == backend:
            found[backend] = CudaGraphTarget(
                llm.model.module, llm.model.probe.facts, attention, reason=reason
            )
    return found


def compare_methods(
    machine: Machine,
    llm: Any,
    targets: dict[str, Any],
    names: Sequence[tuple[str, str]],
    show: Callable[[dict[Any, Tally]], None],
) -> None:
    """Decode each prompt with all methods in turn, and repeat while there is time.

    A method that fails is reported and dropped.

    Args:
        targets: a target for each attention.
        names: (attention, method); the first method of each attention is plain decoding.
        show: called with the totals after each prompt.
    """
    from benchmarks.peers import make_methods
    from lookahead.bench import ModelUnderTest, RunOptions

    prompts = encoded_prompts(machine, llm)
    options = RunOptions(8 if machine.tiny else 128)
    models: dict[str, ModelUnderTest] = {}
    methods = {}
    for attention, name in names:
        if attention not in models:
            models[attention] = ModelUnderTest.of(llm, "transformers")
            if attention in targets:
                models[attention].target = targets[attention]
        (methods[attention, name],) = make_methods(name, models[attention], False)

    # A first run compiles, captures, and measures the cost curve.
    for key, method in list(methods.items()):
        try:
            method.decode(models[key[0]], prompts[0], RunOptions(min(32, options.max_new_tokens)))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:100]
            table(" ".join(key), f"{type(error).__name__}: {first}", "", False)
            del methods[key]

    # Decode; the time limit does not apply to the first prompt.
    tallies = {key: Tally() for key in methods}
    for repeat in range(1 if machine.tiny else REPEATS):
        for prompt in prompts:
            if (repeat or prompt is not prompts[0]) and time.monotonic() > machine.end:
                return
            plain: dict[str, Sequence[int]] = {}
            for key, method in methods.items():
                outcome = method.decode(models[key[0]], prompt, options)
                reference = plain.setdefault(key[0], outcome.tokens)
                if key[0] == "transformers":  # compare with our plain decoding
                    reference = next(iter(plain.values()))
                tallies[key].add(outcome, reference)
            show(tallies)


def check_speed(machine: Machine) -> None:
    """Measure our methods with each attention alongside transformers' ``generate`` and its prompt lookup."""
    llm = load_llm(machine)
    title = f"Speed of {llm.name} in {llm.dtype}"
    targets = targets_of(machine, llm)
    names = [(attention, name) for attention in targets for name in OURS]

    def show(tallies: dict[Any, Tally]) -> None:
        theirs = tallies.get(("transformers", "hf-greedy"), Tally()).rate
        for (attention, name), tally in tallies.items():
            plain = tallies.get((attention, "plain"))
            row(
                title,
                f"{attention} {name}",
                method=name,
                attention=attention,
                **{
                    "tokens/s": f"{tally.rate:.1f}",
                    "over plain": f"{tally.rate / plain.rate:.2f}" if plain else "–",
                    "over generate": f"{tally.rate / theirs:.2f}" if theirs else "–",
                    "S": f"{tally.s:.2f}",
                    "rows": f"{tally.rows / max(1, tally.steps):.1f}",
                    "equal": f"{tally.equal} of {tally.texts}",
                },
            )

    compare_methods(machine, llm, targets, [*names, *(("transformers", name) for name in THEIRS)], show)


def check_scaling(machine: Machine) -> None:
    """Measure S and speed by W, for N = 5 and G = W, as in figure 8 of the paper."""
    llm = load_llm(machine)
    targets = targets_of(machine, llm)
    attention = next(iter(targets))
    windows = WINDOWS[: 2 if machine.tiny else None]
    methods = {f"lookahead:{w},5,{w}:pool_from_prompt=0:pool_from_output=0": w for w in windows}
    names = [(attention, "plain"), *((attention, name) for name in methods)]

    def show(tallies: dict[Any, Tally]) -> None:
        plain = tallies[attention, "plain"].rate
        for name, w in methods.items():
            tally = tallies.get((attention, name), Tally())
            cells = {"W": str(w), "S": f"{tally.s:.2f}", "rows": f"{tally.rows / max(1, tally.steps):.1f}"}
            speed = {
                "tokens/s": f"{tally.rate:.1f}",
                "over plain": f"{tally.rate / plain:.2f}" if plain else "–",
            }
            title = f"S and speed by W = G, N = 5 (figure 8), {llm.name} in {llm.dtype}"
            row(title, name, **cells, **speed, equal=f"{tally.equal} of {tally.texts}")

    compare_methods(machine, llm, targets, names, show)


# ---- memory


def cache_bytes(shapes: Any, itemsize: int, sequences: int, tokens: int, capacity: int) -> int:
    """Bytes of the cache for sequences of at most ``tokens`` tokens; slots and capacity grow by doubling."""
    slots = 1 << (sequences - 1).bit_length()
    capacity = max(capacity, 1 << (tokens - 1).bit_length())
    return sum(s[0] * (s[1] + s[2]) for s in shapes if s is not None) * itemsize * slots * capacity


def check_memory(machine: Machine) -> None:
    """Measure the memory of the cache and of captured passes, by sequences and context.

    The size of the cache must be the one computed from its shapes.
    """
    from lookahead.hf import attention
    from lookahead.hf.attention_hook import TreeAttention
    from lookahead.hf.cuda_graphs import CudaGraphTarget
    from lookahead.hf.graph_store import CAPACITY

    llm = load_llm(machine)
    facts = llm.model.probe.facts
    weights = sum(p.numel() * p.element_size() for p in llm.model.module.parameters())
    for sequences in (1, 4) if machine.tiny else (1, 4, 16):
        for context in (100, 1500) if machine.tiny else (1024, 2048, 8192):
            if context + 200 > facts.max_positions or time.monotonic() > machine.end:
                continue
            # Use a new attention, so that no earlier cache is reused.
            machine.start_peak()
            own = TreeAttention(llm.model.module, attention.get("auto", machine.device))
            target = CudaGraphTarget(llm.model.module, facts, own)
            prompt = [1 + i % 50 for i in range(context)]
            target.prefill([(slot, prompt) for slot in range(sequences)])
            trees = [(slot, sample_tree(64 // sequences, facts.vocabulary)) for slot in range(sequences)]
            for _ in range(2):  # the second one captures
                target.forward(trees)

            # Report the sizes.
            expected = cache_bytes(facts.shapes, facts.dtype.itemsize, sequences, context + 64, CAPACITY)
            graphs = sum(one.bytes for one in target.passes.values())
            row(
                f"Memory of {llm.name} in {llm.dtype}",
                f"{sequences} {context}",
                sequences=str(sequences),
                tokens=str(context),
                **{
                    "weights, MiB": f"{weights / 2**20:.0f}",
                    "cache, MiB": f"{target.cache.bytes / 2**20:.1f}",
                    "by shapes, MiB": f"{expected / 2**20:.1f}",
                    "captured passes, MiB": f"{graphs / 2**20:.0f}",
                    "peak, MiB": f"{machine.peak() / 2**20:.0f}",
                },
            )
            same = target.cache.bytes == expected
            table(f"cache of {sequences} x {context} tokens has its computed size", str(same), "", same)
            del own, target  # with the cache, which would count in the next peak


# ---- ranks


def check_ranks(machine: Machine) -> None:
    """Run ``as_rank`` under torchrun on every GPU."""
    several = 2 if machine.tiny else machine.torch.cuda.device_count()
    if several < 2:
        table("lookahead parallelism over nccl", "one GPU only, not run")
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(several),
        __file__,
        "as-rank",
    ]
    run = subprocess.run(
        [*command, *(["--tiny"] if machine.tiny else [])], capture_output=True, text=True, check=False
    )
    for line in run.stdout.splitlines():
        if line.startswith("RANKS "):
            table(*line.removeprefix("RANKS ").split(" = "))
    table(f"{several} ranks against one, token for token", f"exit {run.returncode}", "", not run.returncode)
    if run.returncode:
        print(run.stdout[-2000:], run.stderr[-4000:], flush=True)


def as_rank(machine: Machine) -> None:
    """One process of ``check_ranks``."""
    from lookahead import parallel
    from lookahead.equivalence import differ
    from lookahead.hf.model import HFModel
    from lookahead.hf.testing import tiny_model
    from lookahead.testing import assert_same_as_autoregressive

    device = "cpu" if machine.tiny else parallel.local_device()
    connections = parallel.start(40, device)
    if connections.rank == 0:
        print(f"RANKS rows of logits travel by = {connections.backend}")
    _sending(machine, connections, device)
    model = HFModel(tiny_model("llama", initializer_range=0.1).to(device))
    rounding = partial(differ, model.probe.equivalence)
    ranks = parallel.join(model.make_target, connections, model, rounding)
    prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]
    target = parallel.ParallelTarget(ranks)
    assert_same_as_autoregressive(target, prompts, "15,5,15", 60)
    assert_same_as_autoregressive(target, prompts, "15,5,15", 60, choose=lambda: by_row)
    start = time.perf_counter()
    steps = target.steps
    sent = ranks.bytes_exchanged
    assert_same_as_autoregressive(target, prompts[:1], "15,5,15", 60)
    spent = (time.perf_counter() - start) / (target.steps - steps)
    print(f"RANKS a step of the tiny model on the {target.path} path, all included = {spent * 1e6:.0f} us")
    print(f"RANKS bytes exchanged per step = {(ranks.bytes_exchanged - sent) / (target.steps - steps):.0f}")
    ranks.close()


def _sending(machine: Machine, connections: Any, device: str) -> None:
    """Time sending bytes from rank 0 to rank 1, which is the overhead of sending keys and values in a step."""
    torch = machine.torch
    for size, what in (
        (4096, "4 KiB, a frame"),
        (1 << 19, "512 KiB, keys and values of a token of the 7B shape"),
    ):
        data = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        spent = []
        for _ in range(30 if connections.rank < 2 else 0):
            start = time.perf_counter()
            if connections.rank == 0:
                connections.links[1].send_row(data)
                connections.links[1].flush()
            else:
                connections.links[0].receive_row(data)
            machine.wait()
            spent.append(time.perf_counter() - start)
        if connections.rank == 0:
            print(f"RANKS sending {what} = {median(spent) * 1e6:.0f} us")


def by_row(scores: Any, node: int) -> int:
    """A greedy choice that reads whole rows, so that rows of logits are sent."""
    return int(scores.row(node).argmax())


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


CHECKS: dict[str, Callable[[Machine], None]] = {
    "certificate": check_certificate,
    "kernel": check_kernel,
    "attention": check_attention,
    "step": check_step,
    "text": check_text,
    "rows": check_rows,
    "speed": check_speed,
    "scaling": check_scaling,
    "memory": check_memory,
    "ranks": check_ranks,
    "as-rank": as_rank,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported
    machine = Machine(given.tiny, given.model, given.dtype, given.seconds)
    print("WHERE", machine.describe(), sep="\t", flush=True)
    if given.name in ("attention", "step"):
        machine.measure()
    CHECKS[given.name](machine)


if __name__ == "__main__":
    main()

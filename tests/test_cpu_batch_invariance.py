"""Compiled passes are batch-invariant: rows are bit-identical in a tree, alone, and for any thread count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc, njit, types

from lookahead.builder import register
from lookahead.core import TokenTree, greedy
from lookahead.core.errors import NumericalError
from lookahead.cpu.compiled_model import CompiledModel
from lookahead.cpu.execution_plan import ExecutionState
from lookahead.cpu.formats import FORMATS
from lookahead.cpu.kernels import workers
from lookahead.cpu.kernels.workers import AWAKE, NAP, PATIENCE, SPINS, Worker, restart, take
from lookahead.cpu.target import CpuTarget
from lookahead.cpu.thread_pool import ThreadPool, control_block, post, serve, thread_pool
from lookahead.hf.logits import TensorLogits
from lookahead.hf.module_families import blueprint_of
from lookahead.hf.paths import make_target
from lookahead.processor import has_pairs, has_tiles
from lookahead.sampling.choose import Chooser
from lookahead.sampling.noise import SeededNoise
from lookahead.testing import assert_same_as_autoregressive
from rows import row_of
from test_cpu_target import FAMILIES, VOCABULARY, of_capacity, prompt, tiny

#: Families that differ from another one in weights and numbers only: scales, rotary tables, a window of any size, and
#: the number of query heads for a key head, which one family of Llama covers.
ONLY_NUMBERS = {
    "llama-untied-head",
    "llama3-rope",
    "qwen3-one-key-head",
    "mistral-whole",
    "olmo2-one-key-head",
    "gpt2-scaled-by-layer",
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compiled(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> CpuTarget:
    return compiled_twice(family, dtype, **changes)[0]


def compiled_twice(
    family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[CpuTarget, CpuTarget]:
    """Two targets on one model, each with its own cache; the model is checked and compiled once."""
    target = make_target(tiny(family, dtype, **changes))
    return of_capacity(target, 4), of_capacity(target, 4)


def of_kind(kind: str, family: str = "llama", **changes: object) -> CpuTarget:
    model = tiny(family, torch.bfloat16, **changes)
    facts = make_target(model, path="transformers").facts
    return CpuTarget(CompiledModel(blueprint_of(model, facts), FORMATS[kind, "bfloat16"]), facts, 4)


def random_tree(seed: int, rows: int) -> TokenTree:
    """A random tree whose rows are not ordered by depth and whose paths have gaps."""
    draw = random.Random(seed)
    tree = TokenTree(seed % VOCABULARY)
    while len(tree) < rows:
        tree.add(
            draw.randrange(VOCABULARY),
            draw.randrange(max(0, len(tree) - 6), len(tree)),
            needs_logits=draw.random() < 0.8,
        )
    return tree


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [other for other in range(node + 1) if tree.ancestors[node] >> other & 1]


@DTYPES
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ONLY_NUMBERS])
def test_a_trees_rows_have_the_bits_of_plain_decoding(family: str, dtype: torch.dtype) -> None:
    """Rows are bit-identical in steps of 1 to 70 rows of two sequences, after commits of paths with gaps."""
    target, alone = compiled_twice(family, dtype)
    lengths = {0: 3, 1: 13}
    for slot, length in lengths.items():
        for one in (target, alone):
            one.prefill([(slot, prompt(length, slot))])
    for turn, rows in enumerate((5, 37, 1, 70, 18)):
        trees = [(slot, random_tree(10 * turn + slot, rows + slot)) for slot in lengths]
        scores = target.forward(trees)
        paths = []
        for (slot, tree), drafted in zip(trees, scores, strict=True):
            end = max(range(len(tree)), key=lambda node: (tree.needs_logits[node], tree.depths[node]))
            path = path_to(tree, end)[:6]
            paths.append((slot, path))
            for node in path:
                (plain,) = alone.forward([(slot, TokenTree(tree.tokens[node]))])
                if tree.needs_logits[node]:
                    assert torch.equal(row_of(plain, 0), row_of(drafted, node)), (turn, slot, node)
                    assert plain.best(0) == drafted.best(node) == int(row_of(plain, 0).float().argmax())
                alone.commit([(slot, [0])])
        target.commit(paths)


@pytest.mark.parametrize("kind", ["vectors", "pairs", "tiles"])
def test_every_kind_of_product_has_these_bits(kind: str) -> None:
    """For processors with and without matrix tiles."""
    if kind == "pairs" and not has_pairs():
        pytest.skip("no AVX512-BF16 here")
    if kind == "tiles" and not has_tiles():
        pytest.skip("no AMX here")
    target, alone = of_kind(kind), of_kind(kind)
    reference = make_target(tiny("llama", torch.bfloat16), path="transformers")
    starts = [row_of(one.prefill([(0, prompt(13))])[0], 0).float() for one in (target, alone, reference)]
    assert torch.equal(starts[0], starts[1])
    assert (starts[0] - starts[2]).abs().max() < 0.35 * starts[2].std()
    tree = random_tree(3, 45)
    (scores,) = target.forward([(0, tree)])
    for node in path_to(tree, max(range(45), key=tree.depths.__getitem__)):
        (plain,) = alone.forward([(0, TokenTree(tree.tokens[node]))])
        assert not tree.needs_logits[node] or torch.equal(row_of(plain, 0), row_of(scores, node))
        alone.commit([(0, [0])])


@DTYPES
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("shape", [(174, 720, 80), (24, 40, 8), (576, 1536, 64)], ids=str)
def test_rows_of_odd_sizes_have_the_same_bits_in_any_tree(
    shape: tuple[int, int, int], dtype: torch.dtype, threads: int
) -> None:
    """Intermediate, head and vocabulary sizes that fill no tile; threads that share heads."""
    hidden, inner, head = shape
    changes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "head_dim": head,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 101,
    }
    target, alone = compiled_twice("llama", dtype, **changes)
    for one in (target, alone):
        one.prefill([(0, prompt(70))])
    tree = random_tree(3, 45)
    (scores,) = target.forward([(0, tree)])
    path = path_to(tree, max(range(45), key=tree.depths.__getitem__))
    for turn, node in enumerate(path):
        torch.set_num_threads(1 + turn % threads)
        (plain,) = alone.forward([(0, TokenTree(tree.tokens[node]))])
        assert not tree.needs_logits[node] or torch.equal(row_of(plain, 0), row_of(scores, node))
        alone.commit([(0, [0])])


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["lookahead", "prompt-lookup", "jacobi"])
def test_text_in_bf16_is_exactly_that_of_plain_decoding(method: str, temperature: float) -> None:
    for family in ("llama", "mistral-sliding"):
        target = compiled(family, torch.bfloat16)
        assert_same_as_autoregressive(
            target,
            [prompt(n, n) for n in (3, 12, 40)],
            method,
            180,
            choose=lambda: Chooser([], None, SeededNoise(5, 0, VOCABULARY, 0.8)) if temperature else greedy,
        )


def test_ancestors_in_another_order_are_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the test above: reordered path columns change the logits."""
    target = compiled("llama", torch.bfloat16)
    target.prefill([(0, prompt(9))])
    tree = random_tree(5, 40)
    right = target.forward([(0, tree)])[0]
    describe = ExecutionState.describe

    def reversed_paths(self: ExecutionState, *arguments: object) -> None:
        describe(self, *arguments)  # type: ignore[arg-type]
        plan, step = self.plan, self._step
        ends, columns = (
            int(plan[name] - step.buffer_info()[0]) // 8 for name in ("path_ends", "path_columns")
        )
        for a, b in pairwise(step[ends:columns]):
            # Keep the last one: moving a row past its column would overwrite data that is not yet read.
            step[columns + a : columns + b - 1] = step[columns + a : columns + b - 1][::-1]

    monkeypatch.setattr(ExecutionState, "describe", reversed_paths)
    wrong = target.forward([(0, tree)])[0]
    deep = [node for node in tree.needs_logits_nodes() if tree.depths[node] >= 3]
    assert deep
    assert any(not torch.equal(row_of(right, node), row_of(wrong, node)) for node in deep)


@DTYPES
def test_the_best_tokens_are_torchs(dtype: torch.dtype) -> None:
    target = compiled("llama", dtype, vocab_size=1001, hidden_size=32)
    target.prefill([(0, prompt(5)), (1, prompt(7))])
    trees = [(0, random_tree(1, 20)), (1, random_tree(2, 9))]
    for (_, tree), scores in zip(trees, target.forward(trees), strict=True):
        nodes = tree.needs_logits_nodes()
        reference = TensorLogits(torch.stack([row_of(scores, node) for node in nodes])[None])
        for k in (8, 3, 70):
            ids, odds = scores.top(nodes, k)
            expected_ids, expected = reference.top(k)
            assert ids.shape == odds.shape
            assert len(ids) == len(nodes)
            assert torch.allclose(torch.tensor(odds[:, :k]), torch.tensor(expected[:, :k]), atol=1e-6)
            if dtype == torch.float32:  # bf16 has ties, whose order torch does not define
                assert ids[:, :k].tolist() == expected_ids[:, :k].tolist()
        assert [scores.best(node) for node in nodes] == [reference.argmax(r) for r in range(len(nodes))]


def test_nan_is_named_and_stays_with_its_row() -> None:
    target = compiled()
    target.prefill([(0, [1, 2, 3])])
    with torch.no_grad():
        target.compiled.blueprint.embedding[11] = torch.nan
    tree = TokenTree(5)
    tree.add(11, 0, needs_logits=True)
    tree.add(12, 0, needs_logits=True)
    (scores,) = target.forward([(0, tree)])
    assert row_of(scores, 0).isfinite().all()
    assert row_of(scores, 2).isfinite().all()
    with pytest.raises(NumericalError, match="NaN"):
        scores.best(1)


def test_a_token_that_is_not_there_is_refused() -> None:
    target = compiled()
    with pytest.raises(IndexError, match="0 to 96"):
        target.prefill([(0, [1, 97])])


def test_a_position_beyond_the_learned_ones_is_refused() -> None:
    """Rotary positions have no end, but a row past the table of GPT-2 would read foreign memory."""
    compiled().prefill([(0, prompt(20))])
    target = compiled("gpt2", max_position_embeddings=16)
    with pytest.raises(IndexError, match="learned positions for 16 tokens, got 17"):
        target.prefill([(0, prompt(17))])
    target.prefill([(1, prompt(16))])
    with pytest.raises(IndexError, match="got 17"):
        target.forward([(1, TokenTree(5))])


def test_a_thread_pool_wakes_from_sleep_and_survives_an_interrupt(threads: int) -> None:
    target = compiled()
    target.prefill([(0, prompt(5))])
    first = row_of(target.forward([(0, random_tree(1, 8))])[0], 0).clone()
    pool = thread_pool(threads)
    for rank in range(1, threads):
        wait_until(lambda rank=rank: is_asleep(pool, rank))
    assert torch.equal(row_of(target.forward([(0, random_tree(1, 8))])[0], 0), first)
    model = target.compiled
    # As after an interrupt between posting a job and running it.
    state = model._idle.pop()
    pool._owner = state
    post(pool.address, model._job, state.address)
    assert torch.equal(row_of(target.forward([(0, random_tree(1, 8))])[0], 0), first)


class CountedLock:
    """A helper's lock that records each release."""

    def __init__(self, lock: Any, rank: int, released: list[int]) -> None:
        self._lock, self._rank, self._released = lock, rank, released

    def release(self) -> None:
        self._released.append(self._rank)
        self._lock.release()


def test_a_helper_of_a_large_pool_is_woken() -> None:
    """More ranks than bits in a word: a helper that is not woken joins up to a second later."""
    pool, released = ThreadPool(66), list[int]()
    job = cfunc(types.void(*[types.int64] * 5))(lambda argument, control, rank, size, arrived: None)
    pool.run(job.address, 0, None)
    for rank in range(1, pool.size):
        wait_until(lambda rank=rank: is_asleep(pool, rank))
    for rank in range(1, pool.size - 1):  # as if only the last one slept
        pool.ranks["asleep"][rank] = 0
    pool._wake_locks = [CountedLock(lock, rank, released) for rank, lock in enumerate(pool._wake_locks)]
    pool.run(job.address, 0, None)
    assert released == [pool.size - 1]


def is_asleep(pool: ThreadPool, rank: int) -> bool:
    """Whether a helper is asleep, read from the pool's memory."""
    return bool(pool.ranks["asleep"][rank])


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; pytest's time limit ends a test in which it never does."""
    while not condition():
        sleep(0.001)


def test_a_helper_stays_awake_between_steps_and_sleeps_without_them() -> None:
    """Waking a helper adds several ms to a pass, and drafting takes up to 2 ms between passes.

    The helper's loop runs here without a job. It returns when the helper would go to sleep.
    """
    _, ranks, address = control_block(2)
    began = perf_counter()
    serve(address, 1)
    assert perf_counter() - began > 0.019
    assert ranks["asleep"][1] == 1


class Waits:
    """A clock in microseconds that only waiting advances, and the number of waits of each kind."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()

    def clock(self, scratch: int) -> int:
        return int(self.now)

    def pause(self) -> None:
        self._wait("pause", 0.01)

    def yield_core(self) -> None:
        self._wait("yield_core", 1)

    def sleep(self, scratch: int, microseconds: int) -> None:
        self._wait("sleep", microseconds + 50)  # as on Linux

    def _wait(self, kind: str, microseconds: float) -> None:
        self.counts[kind] += 1
        self.now += microseconds


def test_a_waiting_helper_polls_by_the_clock_and_then_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of polls used 85 ms of CPU time on AMD's Zen 3. The uncompiled loop waits here."""
    waits = Waits()
    for name in ("clock", "pause", "yield_core", "sleep"):
        monkeypatch.setattr(workers, name, getattr(waits, name))
    _, ranks, address = control_block(2)
    workers.serve.function(address, 1)
    assert ranks["asleep"][1] == 1
    assert waits.now > AWAKE
    assert waits.counts["pause"] == SPINS - 1
    assert waits.counts["yield_core"] == pytest.approx(PATIENCE, abs=2)
    assert waits.counts["sleep"] == pytest.approx((AWAKE - PATIENCE) / (NAP + 50), abs=2)


register()
begin_again = njit(restart)


@njit(nogil=True)
def take_all(control: int, stage: int, rank: int, size: int, count: int, taken: np.ndarray) -> None:
    for turn in range(size):
        owner = (rank + turn) % size
        item = take(control, stage, owner, count)
        while item < count:
            taken[owner * count + item] += 1
            item = take(control, stage, owner, count)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (2,)], ids=["first alone", "all", "last alone"])
def test_every_item_of_a_stage_is_taken_once_by_whoever_is_free(ranks: tuple[int, ...]) -> None:
    """Even if other threads never arrive: a thread that is done takes from their shares."""
    size, count = 3, 5000
    _, _ranks, control = control_block(size)
    for begun_again in range(2):
        taken = np.zeros(size * count, np.int64)
        arguments = [(control, 3, rank, size, count, taken) for rank in ranks]
        threads = [Thread(target=take_all, args=given) for given in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (taken == 1).all(), begun_again
        for rank in range(size):
            begin_again(Worker(control, rank, size), 3, 4)

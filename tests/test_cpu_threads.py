"""Threads share compiled models, buffers and torch's thread count; each gets the same results as alone."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import lookahead
from lookahead import threads as module
from lookahead.core import TokenTree
from lookahead.cpu.target import BufferPool, buffers
from lookahead.hf.paths import make_target
from lookahead.hf.testing import tiny_model
from lookahead.sampling.scores import Logits
from lookahead.threads import one_thread, thread_count
from processes import result_of
from test_cpu_target import branched, prompt, tiny


def two_processes() -> None:
    """Two processes use one compiled model: the one that compiled it, and a fork of that one."""
    llm = lookahead.LLM(tiny_model("llama", initializer_range=0.05))
    assert llm.path == "cpu"

    def text(prompt: list[int]) -> list[int]:
        return llm.generate(prompt, max_new_tokens=64, ignore_eos=True, drafter="plain").tokens

    prompts = [3, 1, 4, 1, 5], [9, 2, 6]
    want = [text(prompt) for prompt in prompts]
    child = os.fork()
    mine = 0 if child else 1
    wrong = sum(text(prompts[mine]) != want[mine] for _ in range(40))
    if not child:
        os._exit(wrong)
    assert (wrong, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_its_own_rows() -> None:
    result_of(two_processes, within=200.0)


def fork_during_a_pass() -> tuple[str, int]:
    """What a child says whose parent was forked in the middle of another thread's pass, and its status."""
    llm = lookahead.LLM(tiny_model("gpt_neox"))
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(60)

    handle = llm.model.module.register_forward_hook(wait)
    other = threading.Thread(target=lambda: llm.generate([5, 6, 7], max_new_tokens=2))
    other.start()
    inside.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            llm.generate([5, 6, 7], max_new_tokens=2)
        except lookahead.LookaheadError as error:
            os.write(write, str(error).encode())
        # Other models are not affected.
        fresh = lookahead.LLM(tiny_model("gpt_neox"))
        os._exit(len(fresh.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True).tokens))
    go_on.set()
    other.join()
    handle.remove()
    os.close(write)
    said = os.fdopen(read).read()
    return said, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_is_forked_during_a_pass_is_told_so() -> None:
    said, status = result_of(fork_during_a_pass, within=200.0)
    assert "another thread was running this one; load it again in this process" in said
    assert status == 2


@pytest.mark.parametrize(("family", "exact"), [("gpt_neox", True), ("phi", False)])
def test_threads_take_turns_on_a_model_of_transformers(family: str, exact: bool) -> None:
    """Passes change the model's attention for their duration."""
    model = tiny_model(family, initializer_range=0.2).to(torch.bfloat16)
    llm = lookahead.LLM(model, exact=exact, drafter="7,4,5")
    prompts = [[3, 1, 4, 1, 5 + number] for number in range(4)]
    want = [llm.generate(prompt, max_new_tokens=24).tokens for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = threads.map(lambda prompt: llm.generate(prompt, max_new_tokens=24), prompts)
            assert [result.tokens for result in found] == want


def share_models(seconds: float, sizes: list[int]) -> list[list[int]]:
    """Calls per thread for each number of threads, with passes on one core, then two."""
    llms = [lookahead.LLM(tiny_model("llama", seed=seed, initializer_range=0.05)) for seed in range(2)]
    methods = ("autoregressive", 0.0), ("lookahead", 0.0), ("lookahead", 1.0), ("prompt-lookup", 0.0)
    ways = [(llm, method, temperature) for llm in llms for method, temperature in methods]

    def text(number: int) -> list[int]:
        llm, method, temperature = ways[number]
        options = {"max_new_tokens": 16, "drafter": method, "temperature": temperature, "seed": 7}
        return llm.generate([3, 1, 4, 1, 5], **options).tokens

    want = [text(number) for number in range(len(ways))]

    def calls_of(size: int) -> list[int]:
        end, wrong, calls, counts = time.time() + seconds, [], [0] * size, set()

        def work(rank: int) -> None:
            while calls[rank] < 2 or time.time() < end:
                number = (rank + calls[rank]) % len(ways)
                if text(number) != want[number]:
                    wrong.append(ways[number])
                calls[rank] += 1
            counts.add(torch.get_num_threads())

        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong, wrong
        assert counts == {torch.get_num_threads()}, counts
        return calls

    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        for size in sizes:
            found.append(calls_of(size))
            assert torch.get_num_threads() == count
    return found


def stress(seconds: float, sizes: list[int]) -> list[list[int]]:
    """``share_models`` in a process of its own, where a hang is an error too."""
    return result_of(share_models, seconds, sizes, within=250.0)


def test_threads_that_share_models_get_their_texts() -> None:
    calls = stress(0.4, [2, 8])
    assert [len(each) for each in calls] == [2, 8, 2, 8]
    assert min(map(min, calls)) >= 2


@pytest.mark.soak
def test_threads_for_a_minute() -> None:
    for calls in stress(10.0, [2, 4, 8]):
        assert min(calls) * 20 > max(calls), calls  # none starves


def test_passes_at_once_have_a_state_each() -> None:
    """The script that exposed wrong output."""
    model = tiny(max_position_embeddings=64)
    want = make_target(model).prefill([(0, prompt(30))])[0].row(0)
    right = []

    def work() -> None:
        for _ in range(30):
            target = make_target(model)
            row = target.prefill([(0, prompt(30))])[0].row(0)
            step = [target.forward([(0, branched(3))])[0].best(0) for _ in range(3)]
            right.append(np.array_equal(row, want) and len(set(step)) == 1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True] * 120


def test_asyncio_and_the_callable_for_transformers() -> None:
    model = tiny_model("llama", seed=1, initializer_range=0.05)
    llm = lookahead.LLM(model)
    ids = torch.tensor([[3, 1, 4]])

    def called(seed: int) -> list[int]:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=lookahead.generate,
            do_sample=False,
            max_new_tokens=20,
        )
        return out[0, 3:].tolist()

    def generated(seed: int) -> list[int]:
        return llm.generate([3, 1, 4], max_new_tokens=20, drafter="lookahead").tokens

    want = called(0)
    assert generated(0) == want
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(called, range(8))) == [want] * 8

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(generated, seed) for seed in range(8)))

    assert asyncio.run(all_of_them()) == [want] * 8


def test_a_released_buffer_is_used_again() -> None:
    pool = BufferPool(most=2)
    first, second = pool.acquire(1000), pool.acquire(1000)
    assert first.ctypes.data != second.ctypes.data
    address = first.ctypes.data
    pool.release(first)
    assert pool.acquire(900).ctypes.data == address
    for size in (100, 5000, 300):
        pool.release(np.empty(size, np.uint8))
    assert sorted(map(len, pool._free)) == [300, 5000]  # bounded, and large ones stay
    assert len(pool.acquire(200)) == 300


def test_steps_use_one_buffer_and_what_is_held_stays() -> None:
    target = make_target(tiny())
    target.prefill([(0, prompt(9))])
    addresses, tree = set(), branched(5)
    target.forward([(0, tree)])
    for _ in range(2):  # other targets released buffers of the same size
        buffers.release(np.empty(len(target._memory), np.uint8))
    for _ in range(10):
        target.forward([(0, tree)])
        addresses.add(target._memory.ctypes.data)
    assert len(addresses) == 1
    (held,) = target.forward([(0, tree)])
    rows, ids = held.row(0), held.top([0], 5)[0]
    for token in range(5):
        target.forward([(0, TokenTree(token))])
    assert np.array_equal(held.row(0), rows)
    assert held.best(0) == int(rows.argmax())
    assert held.top([0], 5)[0].tolist() == ids.tolist()
    assert len(buffers._free) <= 4


def test_decoding_copies_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop and the drafters release a step's scores before the next step."""
    rows: list[int] = []
    detach = Logits.detach
    monkeypatch.setattr(Logits, "detach", lambda self: rows.append(len(self.rows)) or detach(self))
    llm = lookahead.LLM(tiny_model("llama", seed=1, initializer_range=0.05))
    for method in ("autoregressive", "lookahead", "adaptive"):
        llm.generate([3, 1, 4], max_new_tokens=30, drafter=method)
        del rows[:]
        steps = llm.generate([3, 1, 4], max_new_tokens=30, drafter=method).stats.steps
        assert len(rows) <= 2 < steps, method  # one for prefill, one at the end


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_thread_count_is_each_threads_own(two_threads: None) -> None:
    """A thread that starts while another is in ``one_thread`` has the user's count; later, all have it."""
    found, entered, leave = [], threading.Event(), threading.Event()

    def holds() -> None:
        with one_thread:
            entered.set()
            leave.wait(10)
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    def begins() -> None:
        found.append(thread_count())
        with one_thread:
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    first = threading.Thread(target=holds)
    first.start()
    entered.wait(10)
    second = threading.Thread(target=begins)
    second.start()
    second.join()
    leave.set()
    first.join()
    assert found == [2, 1, 2, 1, 2]
    assert torch.get_num_threads() == 2


def test_an_interrupt_anywhere_leaves_the_thread_count(two_threads: None) -> None:
    """It is raised at each instruction of the context; the next pass has the user's count."""
    for number in range(400):
        left = number

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != module.__file__:  # type: ignore[attr-defined]
                return None
            frame.f_trace_opcodes = True  # type: ignore[attr-defined]
            if event == "opcode":
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        try:
            sys.settrace(trace)
            with one_thread:
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert thread_count() == 2, number
        assert torch.get_num_threads() == 2, number
        if left >= 0:
            break
    assert 20 < number < 400

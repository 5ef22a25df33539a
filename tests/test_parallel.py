"""Lookahead parallelism over real gloo ranks: every output equals that of one process.

Processes are forked from one server that has already imported torch. All equality cases for a number of
ranks run in one set of processes; each is reported as a separate test.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from gguf_files import write_gguf
from lookahead.core import NumericalError, OutOfMemory, Request, SettingsError, greedy
from lookahead.drafters import METHODS, Adaptive, Plain, as_drafter
from lookahead.parallel import Connections, ParallelTarget, RankError, RankGroup, executor
from lookahead.testing import FakeTarget, run
from processes import forks

PROMPTS = [[1, 2, 3, 4, 5, 6, 3, 4], [5, 6, 7, 8, 1, 2, 3], [9, 8, 7]]
CONFIG = "7,4,5"
NEW = 48
RANKS = [2, 3, pytest.param(4, marks=pytest.mark.slow)]


# ---- functions that each rank runs in its own process


def _rank(number, size, port, function, arguments, pipe):
    import torch

    torch.set_num_threads(1)
    where = {"RANK": number, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    try:
        pipe.send(("done", function(number, *arguments)))
    except SystemExit as leave:
        pipe.send(("left", leave.code))
    except BaseException as error:
        pipe.send((type(error).__name__, str(error)))


def launch(size, function, *arguments, within=240.0, hanging=-1):
    """Run ``function(rank, *arguments)`` on every rank. Returns (what, value, seconds) per rank.

    The rank that is meant to hang is not waited for.
    """
    context = forks()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start, ranks = time.monotonic(), []
    for number in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(number, size, port, function, arguments, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    outcomes = []
    for number, (_, pipe) in enumerate(ranks):
        left = start + within - time.monotonic() if number != hanging else 0.0
        if not pipe.poll(max(0.0, left)):
            outcome = ("hung", None)
        else:
            try:
                outcome = pipe.recv()
            except EOFError:
                outcome = ("dead", None)
        outcomes.append((*outcome, time.monotonic() - start))
    for number, (process, _) in enumerate(ranks):
        process.join(2 if number != hanging else 0)
        process.kill()
        process.join()
    return outcomes


def unequal(ours, theirs):
    import torch

    return "" if torch.equal(ours, theirs) else "they are not equal"


def join_ranks(make_target, timeout=30.0, model=None):
    from lookahead import parallel
    from lookahead.equivalence import differ
    from lookahead.testing import FakeModel

    connections = parallel.start(120.0, "cpu")  # processes start slowly on a busy machine
    connections.timeout = timeout
    for link in connections.links.values():
        link.timeout = timeout if connections.rank == 0 else 2 * timeout  # as ``start`` does
    if model is None:  # a target whose logits are the same on every rank
        return parallel.join(make_target, connections, FakeModel(), unequal)
    return parallel.join(make_target, connections, model, functools.partial(differ, model.probe.equivalence))


class Sampled:
    """A seeded draw that depends on the whole row and on the true prefix."""

    def __init__(self, prompt):
        self.seed = sum(prompt)

    def __call__(self, scores, node):
        row = [float(x) for x in scores.row(node)]
        self.seed = (self.seed * 1_103_515_245 + 12_345) % (1 << 31)
        best = sorted(range(len(row)), key=row.__getitem__)[-3:]
        token = best[self.seed // 7 % 3] if self.seed % 5 == 0 else best[-1]
        self.seed += token
        return token


def compare(target, make_plain, method, config=CONFIG, prompts=PROMPTS, sampled=False, eos=(), new=NEW):
    """Check joint decoding against plain decoding one by one in this process alone."""

    def request(name, prompt):
        choose = Sampled(prompt) if sampled else greedy
        drafter = {"lookahead": as_drafter(config), "adaptive": Adaptive(rows=24)}.get(name, name)
        return Request(prompt, as_drafter(drafter), new, choose, frozenset(eos))

    together = run(target, [request(method, prompt) for prompt in prompts])
    for sequence, prompt in zip(together, prompts, strict=True):
        (alone,) = run(make_plain(), [request("plain", prompt)])
        assert sequence.error is None, sequence.error
        assert sequence.tokens == alone.tokens, (method, prompt, sequence.tokens, alone.tokens)
        assert sequence.finish_reason == alone.finish_reason
    return together


def rare_eos(tokens):
    """A token first emitted late, so that it ends the completion in the middle of an accepted path."""
    return min(set(tokens[12:]) - set(tokens[:12]), key=tokens.index)


def case_methods(target, method):
    for sequence in compare(target, FakeTarget, method):
        unlucky = method in ("plain", "jacobi")
        assert unlucky or sequence.stats.accepted > 0, "nothing was tested"


def case_sampled(target, method):
    compare(target, FakeTarget, method, sampled=True)


def case_narrow(target):
    """W smaller than the number of ranks, also with N = 2."""
    for config in ("1,2,0", "1,3,1", "2,2,1", "2,5,0"):
        compare(target, FakeTarget, "lookahead", config)


def case_no_candidates(target):
    for sequence in compare(target, FakeTarget, "lookahead", "15,5,0"):
        assert sequence.stats.accepted == 0
    compare(target, FakeTarget, "lookahead", "9,4,0", sampled=True)


def case_eos(target):
    ended_inside = 0
    for prompt in PROMPTS:
        (free,) = run(FakeTarget(), [Request(prompt, Plain(), NEW)])
        eos = rare_eos(free.tokens)
        (sequence,) = compare(target, FakeTarget, "lookahead", prompts=[prompt], eos=[eos])
        assert sequence.finish_reason == "stop"
        ended_inside += sequence.stats.accepted > 0
    assert ended_inside


def case_join_and_leave(target):
    """Sequences join and are cancelled between steps, and slots are reused."""
    from lookahead.core import Engine

    def request(prompt):
        return Request(prompt, as_drafter(CONFIG), NEW)

    engine = Engine(lambda: target)
    sequences = [engine.add(request(PROMPTS[0]))]
    for number in range(12):
        engine.step()
        if number == 3:
            sequences.append(engine.add(request(PROMPTS[1])))
        if number == 6:
            engine.cancel(sequences[0])
            sequences.append(engine.add(request(PROMPTS[2])))
    while engine.busy:
        engine.step()
    assert sequences[0].finish_reason == "cancelled"
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        (alone,) = run(FakeTarget(), [Request(prompt, Plain(), NEW)])
        assert sequence.tokens == alone.tokens[: len(sequence.tokens)]


def case_top(target):
    """The k best tokens of rows on every rank."""
    from lookahead.core import TokenTree

    tree = TokenTree(3)
    for token in range(8):
        tree.add_candidate([token, token + 1])
    alone = FakeTarget()
    for one in (target, alone):
        one.prefill([(0, [1, 2])])
    (ours,), (plain,) = target.forward([(0, tree)]), alone.forward([(0, tree)])
    nodes = tree.needs_logits_nodes()[::-1]
    assert ours.top(nodes, 4) == plain.top(nodes, 4)
    assert [ours.row(node) for node in nodes] == [plain.row(node) for node in nodes]
    target.release(0)


def case_two_targets(target):
    """Two targets of one group of ranks, stepped alternately, with the same slot numbers."""
    from lookahead.core import Engine

    engines = []
    for prompt, one in zip(PROMPTS, (target, ParallelTarget(target.rank_group)), strict=False):
        engine = Engine(lambda one=one: one)
        engines.append((engine, engine.add(Request(prompt, as_drafter(CONFIG), NEW)), prompt))
    while any(engine.busy for engine, _, _ in engines):
        for engine, _, _ in engines:
            engine.step()
    for _, sequence, prompt in engines:
        (alone,) = run(FakeTarget(), [Request(prompt, Plain(), NEW)])
        assert sequence.tokens == alone.tokens


def rows_of_steps(target):
    """A list to which every later step of the target adds the number of rows of each rank: its shards and the missing
    rows that it recomputes."""
    rows, forward = [], target.forward

    def recording(trees):
        scores = forward(trees)
        shards = {slot: target._pending[slot][1] for slot, _ in trees}
        rows.append(
            [
                sum(len(own.rows[rank]) + missing[slot] for slot, own in shards.items())
                for rank, missing in enumerate(target._missing)
            ]
        )
        return scores

    target.forward = recording
    return rows


def case_scaling(target):
    """What ``benchmarks.paper parallel`` computes in one process matches what the ranks do."""
    from benchmarks.paper.parallel import record, share_out

    (steps,) = record(FakeTarget(), PROMPTS[:1], "9,4,9", NEW, frozenset())
    rows = rows_of_steps(target)
    (sequence,) = compare(target, FakeTarget, "lookahead", "9,4,9", PROMPTS[:1])
    shares = share_out(steps, target.rank_group.connections.size)
    assert sequence.stats.accepted > 0
    assert [max(step) for step in rows] == shares.widths
    assert sum(map(sum, rows)) == round(shares.evaluated * len(shares.widths))


CASES = {
    "scaling": case_scaling,
    **{f"greedy-{method}": functools.partial(case_methods, method=method) for method in METHODS},
    **{f"sampled-{method}": functools.partial(case_sampled, method=method) for method in METHODS},
    "narrow": case_narrow,
    "no-candidates": case_no_candidates,
    "eos-in-path": case_eos,
    "join-and-leave": case_join_and_leave,
    "top": case_top,
    "two-targets": case_two_targets,
}


def cases_of(ranks):
    """The names of the cases for this number of ranks.

    How rows are shared depends on the shape of a tree and not on who drafted it. So with more than two ranks, of the
    methods only the two with the largest trees run.
    """
    few = {f"{kind}-{method}" for kind in ("greedy", "sampled") for method in ("lookahead", "adaptive")}
    return [name for name in CASES if ranks == 2 or name.partition("-")[2] not in METHODS or name in few]


def all_cases(rank):
    """On rank 0: case -> what went wrong, or None; rows -> the row counts of the work."""
    ranks = join_ranks(FakeTarget)
    results = {}
    for name in cases_of(ranks.connections.size):
        try:
            CASES[name](ParallelTarget(ranks))
            results[name] = None
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    target = ParallelTarget(ranks)
    rows = rows_of_steps(target)
    with mock.patch.object(executor, "below", wraps=executor.below) as passes:
        compare(target, FakeTarget, "lookahead", "15,5,15")
    recomputed = sum(len(call.args[0]) for call in passes.call_args_list)
    widest = [max(step) for step in rows]
    total = [sum(step) for step in rows]
    results["rows"] = (max(widest), max(total), recomputed)
    ranks.close()
    return results


def tiny_llama(rope=None):
    from families import tiny_model

    return tiny_model("llama-dynamic-ntk" if rope else "llama", initializer_range=0.1)


def model_cases(rank, family):
    """A real model: each rank recomputes the keys and values of rows that it lacks."""
    from families import tiny_model
    from lookahead.hf.model import HFModel

    model = HFModel(tiny_model(family, initializer_range=0.1))
    make = model.make_target
    ranks = join_ranks(make, model=model)
    accepted = 0
    prompts = PROMPTS if family != "llama-dynamic-ntk" else PROMPTS[:1]
    for sampled in (False, True):
        for method in ("lookahead", "prompt-lookup"):
            for sequence in compare(ParallelTarget(ranks), make, method, "5,4,7", prompts, sampled, new=40):
                accepted += sequence.stats.accepted
    ranks.close()
    return accepted


class Broken(FakeTarget):
    """A target that misbehaves in its n-th forward pass."""

    def __init__(self, what, when=6):
        super().__init__()
        self.what, self.when = what, when

    def forward(self, trees):
        scores = super().forward(trees)
        if self.forwards == self.when:
            if self.what == "dies":
                os._exit(9)
            if self.what == "hangs":
                time.sleep(1000)
            if self.what == "raises":
                raise ValueError("a wire is loose")
            if self.what == "forgets":
                honest = self.next_token
                self.next_token = lambda prefix: (honest(prefix) + 1) % self.vocabulary
            if self.what == "memory":
                raise OutOfMemory("too many rows")
        return scores


def broken_rank(rank, culprit, what, timeout):
    ranks = join_ranks(lambda: Broken(what if rank == culprit else ""), timeout)
    sequences = run(ParallelTarget(ranks), [Request(p, as_drafter(CONFIG), NEW) for p in PROMPTS])
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    expected = run(FakeTarget(), [Request(p, Plain(), NEW) for p in PROMPTS])
    ranks.close()
    return [g.tokens for g in sequences] == [g.tokens for g in expected]


def lying_rank(rank):
    """A rank whose tokens differ from rank 0's."""
    from lookahead.parallel.executor import RankExecutor

    if rank == 1:
        update = RankExecutor._update_checksum
        RankExecutor._update_checksum = lambda self, slot, tokens: update(
            self, slot, [t + (len(tokens) == 2) for t in tokens]
        )
    return broken_rank(rank, -1, "", 10.0)


def nan_rank(rank):
    """Logits that are NaN on a rank's own row."""
    from lookahead.core import TokenTree

    def next_token(prefix):
        return -1 if rank and prefix[-1] == 8 else 4

    ranks = join_ranks(lambda: FakeTarget(next_token=next_token))
    target = ParallelTarget(ranks)
    target.prefill([(0, [1])])
    tree = TokenTree(4)
    for token in range(5, 9):
        tree.add_candidate([token])
    (scores,) = target.forward([(0, tree)])
    assert scores.best(tree.child(0, 7)) == 4
    with pytest.raises(NumericalError, match="rank 1"):
        scores.best(tree.child(0, 8))
    ranks.close()


def unequal_rank(rank, what, files=()):
    from lookahead.hf.model import HFModel
    from lookahead.hf.testing import tiny_model

    if what == "vocabulary":
        return join_ranks(lambda: FakeTarget(vocabulary=33 if rank == 1 else 32))
    if files:
        from lookahead.cpu.load import read_model
        from lookahead.gguf.file import GGUFFile

        model = read_model(GGUFFile(files[what == "packed weights" and rank == 1]))
        if what == "packed norm" and rank == 1:
            model.compiled.blueprint.final_norm.weight[3] += 1e-3
    else:
        model = HFModel(tiny_model("llama"))
        if rank == 1:
            model.module.model.norm.weight.data[3] += 1e-3
    return join_ranks(model.make_target, model=model)


def patient(rank):
    """Rank 0 idles for longer than the timeout, and no rank treats it as dead."""
    ranks = join_ranks(FakeTarget, timeout=1.0)
    time.sleep(3.5)
    compare(ParallelTarget(ranks), FakeTarget, "lookahead")
    ranks.close()


def leader_ends(rank, how):
    ranks = join_ranks(FakeTarget, timeout=5.0)
    compare(ParallelTarget(ranks), FakeTarget, "lookahead")
    if how == "dies":
        os._exit(3)
    atexit._run_exitfuncs()  # multiprocessing exits without running them; a user's program runs them


def command_line(rank, arguments, dies_at):
    """Run ``lookahead`` with these arguments; rank 1 dies in its n-th step."""

    from lookahead.cli import app
    from lookahead.hf import model as models

    make, steps = models.make_target, []

    def mortal(model, *rest, **named):
        target = make(model, *rest, **named)
        forward = target.forward

        def counted(trees):
            steps.append(1)
            if rank == 1 and len(steps) == dies_at:
                os._exit(9)
            return forward(trees)

        target.forward = counted
        return target

    models.make_target = mortal
    try:
        app(arguments, prog_name="lookahead")
    finally:
        atexit._run_exitfuncs()


# ---- the tests


@functools.cache
def results_of(ranks):
    outcomes = launch(ranks, all_cases)
    assert outcomes[0][0] == "done", outcomes
    assert [outcome[:2] for outcome in outcomes[1:]] == [("left", 0)] * (ranks - 1)
    return outcomes[0][1]


# All cases of a number of ranks run consecutively, so that one test process starts their ranks.
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=pytest.mark.slow if ranks == 4 else ())
        for ranks in (2, 3, 4)
        for case in cases_of(ranks)
    ],
)
def test_same_tokens_as_one_process(ranks, case):
    problem = results_of(ranks)[case]
    assert problem is None, problem


@pytest.mark.parametrize("ranks", RANKS)
def test_the_work_is_shared(ranks):
    widest, total, recomputed = results_of(ranks)["rows"]
    assert recomputed > 0
    assert widest < 1.4 * total / ranks


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama-dynamic-ntk"])
def test_same_tokens_on_a_model(family):
    outcomes = launch(2, model_cases, family)
    what, accepted, _ = outcomes[0]
    assert what == "done", outcomes
    assert accepted > 0


@pytest.mark.parametrize(("culprit", "ranks"), [(1, 2), (2, 3), (0, 2)])
def test_a_rank_that_dies_is_named_at_once(culprit, ranks):
    outcomes = launch(ranks, broken_rank, culprit, "dies", 60.0)
    assert outcomes[culprit][0] == "dead"
    for number, (what, text, _) in enumerate(outcomes):
        if number != culprit:
            assert what == "RankError"
            assert (
                f"rank {culprit} is gone" in text
            )  # its connection was closed; no rank waited for the timeout


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_that_hangs_is_named_within_the_timeout(culprit):
    outcomes = launch(3, broken_rank, culprit, "hangs", 2.0, hanging=culprit)
    assert outcomes[culprit][0] == "hung"
    for number, (what, text, _) in enumerate(outcomes):
        if number != culprit:
            assert what == "RankError"
            assert f"rank {culprit} did not answer within 2 s" in text


def test_when_rank_0_hangs_in_a_step_the_others_end():
    outcomes = launch(2, broken_rank, 0, "hangs", 1.0, hanging=0)
    assert outcomes[1][0] == "RankError"
    assert "rank 0 did not answer within 2 s" in outcomes[1][1]


def test_an_error_on_a_rank_is_told_to_all():
    outcomes = launch(3, broken_rank, 1, "raises", 20.0)
    assert [outcome[0] for outcome in outcomes] == ["RankError", "ValueError", "RankError"]
    for number in (0, 2):
        assert "rank 1 failed: ValueError: a wire is loose" in outcomes[number][1]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_without_memory_makes_all_take_fewer_rows(culprit):
    outcomes = launch(2, broken_rank_with_warning, culprit)
    assert outcomes[0][:2] == ("done", True)


def broken_rank_with_warning(rank, culprit):
    import warnings

    warnings.simplefilter("ignore")
    return broken_rank(rank, culprit, "memory", 20.0)


def test_a_damaged_cache_is_found_before_it_writes_wrong_text():
    outcomes = launch(2, broken_rank, 1, "forgets", 20.0)
    assert outcomes[0][0] == "DivergenceError"
    assert "rank 1 computes different logits from rank 0 for the same token after 6 steps" in outcomes[0][1]


def test_an_interrupt_within_a_step_ends_the_group():
    """Ctrl-C between a message and its answer would leave the ranks out of step."""
    link = mock.Mock(**{"receive.side_effect": KeyboardInterrupt})
    group = RankGroup(FakeTarget, Connections(0, 2, {1: link}, "gloo", 60.0), unequal)
    try:
        target = ParallelTarget(group)
        for error in (KeyboardInterrupt, RankError):
            with pytest.raises(error):
                target.prefill([(0, [1, 2])])
        assert str(group.error) == "rank 0 failed: KeyboardInterrupt"
        link.send.assert_called_with("failed", rank=0, text=str(group.error))
    finally:
        group.close()


def test_a_rank_without_memory_for_its_target_has_failed():
    """It has not recorded the prompt, so it could not follow rank 0."""

    def make_target():
        raise OutOfMemory("no room")

    messages = [{"kind": "prefill", "target": 1, "prompts": []}, {"kind": "stop"}]
    link = mock.Mock(**{"receive.side_effect": messages})
    with pytest.raises(OutOfMemory):
        executor.serve(link, make_target)
    link.send.assert_called_once_with("failed", text="OutOfMemory: no room")


def test_other_tokens_on_a_rank_are_found_in_the_next_step():
    outcomes = launch(2, lying_rank)
    assert outcomes[0][0] == "DivergenceError"
    assert "rank 1 has other tokens" in outcomes[0][1]


def test_nan_on_another_rank_is_an_error_only_where_it_is_read():
    assert launch(2, nan_rank)[0][:2] == ("done", None)


@pytest.mark.parametrize(("what", "named"), [("vocabulary", "vocabulary"), ("weights", "model checksum")])
def test_an_unequal_model_is_refused_on_every_rank(what, named):
    for kind, text, _ in launch(3, unequal_rank, what):
        assert kind == "SettingsError"
        assert f"rank 1 differs from rank 0 in: {named}" in text


@pytest.mark.parametrize("what", ["packed weights", "packed norm"])
def test_packed_models_that_are_unequal_are_refused_on_every_rank(what, tmp_path):
    files = [tmp_path / name for name in ("some.gguf", "other.gguf")]
    for seed, file in enumerate(files):
        write_gguf(file, "llama", "Q4_0", seed=seed)
    for kind, text, _ in launch(2, unequal_rank, what, files):
        assert kind == "SettingsError"
        assert "rank 1 differs from rank 0 in: model checksum;" in text


def test_an_idle_group_stays_connected():
    assert [outcome[0] for outcome in launch(2, patient)] == ["done", "left"]


def test_when_rank_0_ends_the_others_leave():
    assert [outcome[:2] for outcome in launch(2, leader_ends, "fails")][1] == ("left", 0)
    what, text, _ = launch(2, leader_ends, "dies")[1]
    assert what == "RankError"
    assert "rank 0 is gone" in text


def test_what_cannot_start_is_said():
    from lookahead import parallel

    with pytest.raises(SettingsError, match="torchrun --nproc-per-node"):
        parallel.start()
    with pytest.raises(SettingsError, match="positive"):
        parallel.start(timeout=0)


def test_a_torch_without_gloo_is_refused_by_name(monkeypatch):
    import torch.distributed

    from lookahead import parallel

    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(SettingsError, match="with gloo; install one that has"):
        parallel.start()


def test_rows_are_sent_over_nccl_if_every_rank_has_its_own_gpu():
    from lookahead.parallel.connect import _choose_backend

    own, shared, none = (
        [[1, 7, 3], [1, 7, 4], [1, 8, 3]],
        [[1, 7, 3], [1, 7, 4], [1, 7, 3]],
        [[1, 7, 3], [0, 0, 0]],
    )
    assert [_choose_backend(places) for places in (own, shared, none)] == ["nccl", "gloo", "gloo"]


def test_a_split_model_is_refused_by_name():
    from lookahead.hf.model import HFModel
    from lookahead.parallel.connect import check_same_model

    split = object.__new__(HFModel)
    split.module = SimpleNamespace(tp_size=2, parameters=list)
    with pytest.raises(SettingsError, match="split over 2 ranks by tensor parallelism"):
        check_same_model(None, FakeTarget(), split)


def split_by_tensors(rank, folder):
    """Join with a model that transformers itself has split over the ranks."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from lookahead import parallel
    from lookahead.hf.model import HFModel

    connections = parallel.start(60.0, "cpu")
    mesh = dist.device_mesh.init_device_mesh("cpu", (connections.size,), mesh_dim_names=("tp",))
    os.environ["LOCAL_RANK"] = str(rank)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh)
    weight = model.model.layers[0].mlp.up_proj.weight
    ours = HFModel(model)
    assert weight.to_local().numel() == weight.numel() // 2  # it is really split
    parallel.join(ours.make_target, connections, ours, unequal)


def test_tensor_parallelism_is_refused_by_name(tmp_path):
    from lookahead.hf.testing import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    for what, text, _ in launch(2, split_by_tensors, str(tmp_path)):
        assert what == "SettingsError", text
        assert "split over 2 ranks by tensor parallelism" in text


class Captured(FakeTarget):
    captures = True
    attention = SimpleNamespace(backend="triton")


@pytest.mark.parametrize("inner", [FakeTarget, Captured])
def test_a_step_s_cost_depends_on_the_ranks_and_on_their_targets(inner):
    from lookahead.drafters.adaptive.model_curves import cost_path

    size = SimpleNamespace(size=2)
    group = SimpleNamespace(register=lambda target: 1, make_target=inner, connections=size)
    target = ParallelTarget(group)
    assert cost_path(target) == f"{cost_path(inner())}, 2 ranks"
    assert target.captures == (inner is Captured)


def test_the_timeout_is_the_users():
    import lookahead

    arguments = ["generate", "tiny", "--prompt", "def f", "--max-new-tokens", "2", "--parallel-timeout"]
    for what, code, _ in launch(2, command_line, [*arguments, "0"], 0):
        assert (what, code) == ("left", 2)
    with pytest.raises(SettingsError, match="parallel_timeout needs parallel"):
        lookahead.load(parallel_timeout=5)


def timeout_of(rank):
    import lookahead

    ranks = lookahead.load("tiny", parallel="lookahead", parallel_timeout=33.0).rank_group
    ranks.close()
    return ranks.connections.timeout


def test_load_hands_the_timeout_on():
    assert [outcome[:2] for outcome in launch(2, timeout_of)] == [("done", 33.0), ("left", 0)]


def program(rank, code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "docs/parallel.md", "exec"), {"__name__": "documentation"})
        finally:
            atexit._run_exitfuncs()  # as when a program ends
    return printed.getvalue()


def test_the_program_of_the_page_runs():
    import lookahead

    page = (Path(__file__).parent.parent / "docs" / "parallel.md").read_text()
    code = re.search(r"^```py\n(.*?)^```", page, re.S | re.M)[1].replace("path/to/model", "tiny")
    first, second = launch(2, program, code)
    assert first[:2] == ("done", lookahead.load("tiny").generate("def main():").text + "\n")
    assert second[:2] == ("left", 0)


def test_a_row_that_never_comes_over_nccl_names_the_rank(monkeypatch):
    import torch

    from lookahead.parallel import RankError, wire

    class Lost:
        def is_completed(self):
            return False

    monkeypatch.setattr(wire.dist, "irecv", lambda *given, **named: Lost())
    link = wire.Link(3, None, 0.05, rows="nccl")
    with pytest.raises(RankError, match=r"rank 3 did not answer within 0\.05 s"):
        link.receive_row(torch.zeros(4))


def write_jobs(path):
    lines = [{"id": n, "input_ids": [11 + n, 40, 7 + n, 90, 40, 7]} for n in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_torchrun_decodes_a_file_as_one_process_does(tmp_path):
    """Run it as a user does, with packed weights: only rank 0 writes, and output equals plain decoding."""
    import lookahead

    jobs, out = write_jobs(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    model = tmp_path / "model.gguf"
    write_gguf(model, "llama", "Q8_0")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "lookahead",
        "generate",
    ]
    options = [
        str(model),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(out),
        "--max-new-tokens",
        "24",
    ]
    options += ["--drafter", "5,4,7"]
    done = subprocess.run(
        [*command, *options, "--batch-size", "3"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("4 prompts, 0 with an error") == 1
    llm = lookahead.load(model, drafter="off")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    records.sort(key=lambda record: record["id"])  # records are written as they finish
    assert [record["id"] for record in records] == [0, 1, 2, 3]
    for job, record in zip(jobs, records, strict=True):
        assert record["output_ids"] == llm.generate(job["input_ids"], max_new_tokens=24).tokens
    assert any(record["steps"] < record["new_tokens"] - 1 for record in records), "nothing was accepted"


def test_when_a_rank_dies_the_output_holds_whole_lines_only(tmp_path):
    write_jobs(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    arguments = ["generate", "tiny", "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]
    arguments += ["--max-new-tokens", "16", "--drafter", "off"]
    outcomes = launch(2, command_line, arguments, 40)
    assert outcomes[0][:2] == ("left", 1)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert 1 <= len(records) < 4
    assert all(len(record["output_ids"]) == 16 for record in records)
    # With nothing left to do, the other ranks exit as well.
    outcomes = launch(2, command_line, [*arguments, "--resume"], 0)
    assert [outcome[:2] for outcome in outcomes] == [("left", 0)] * 2
    assert len(out.read_text().splitlines()) == 4
    outcomes = launch(2, command_line, [*arguments, "--resume"], 0)
    assert [outcome[:2] for outcome in outcomes] == [("left", 0)] * 2


def test_with_nothing_left_the_other_ranks_are_dismissed_with_the_options_of_a_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from lookahead.cli import app

    write_jobs(tmp_path / "in.jsonl")
    command = ["generate", "tiny", "--input", str(tmp_path / "in.jsonl")]
    command += ["--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "2", "--device", "cpu"]
    assert CliRunner().invoke(app, command).exit_code == 0
    started = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("lookahead.parallel.start", lambda **given: started.append(given))
    monkeypatch.setattr("lookahead.parallel.dismiss", lambda connections: None)
    command += ["--resume", "--parallel-timeout", "7"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert started == [{"timeout": 7.0, "device": "cpu"}]


def test_other_commands_are_not_run_several_times_over():
    assert [outcome[:2] for outcome in launch(2, command_line, ["doctor"], 0)] == [("left", 2)] * 2

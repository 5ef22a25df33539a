"""Captured passes give the same output: uncaptured on the CPU, and on a simulated device."""

import gc
import importlib
import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lookahead
from fake_cuda import TOTAL, FakeCuda
from families import tiny_model
from lookahead import load
from lookahead.core import Request, SettingsError, TokenTree
from lookahead.drafters import Plain
from lookahead.equivalence import trial_tree
from lookahead.hf import attention, cuda, cuda_graphs
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.cuda_graphs import (
    BATCHES,
    BUCKETS,
    MOST_ROWS,
    CudaGraphTarget,
    Parts,
    SlotStep,
    bucket_of,
    buffer_size,
    captured_attention,
    division,
)
from lookahead.hf.fingerprint import known
from lookahead.hf.model import HFModel
from lookahead.hf.paths import limit_graphs, make_target, probe
from lookahead.testing import assert_same_as_autoregressive, run

PROMPTS = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", initializer_range=0.1)
    return model.to("cuda") if torch.cuda.is_available() else model


def captured(model, capacity=64, tree_attention=None):
    own = tree_attention or TreeAttention(model, attention.get("auto", model.device))
    return CudaGraphTarget(model, probe(model).facts, own, capacity)


def test_a_step_takes_the_smallest_bucket_that_holds_it():
    assert [bucket_of(rows) for rows in (1, 2, 4, 9, 64, 65, 256, 257)] == [1, 4, 4, 16, 64, 128, 256, None]
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_a_step_in_one_buffer():
    tree = TokenTree(7)
    tree.add_candidate([8, 9])
    tree.add_candidate([5])
    buffer = torch.full((buffer_size(2, 8),), -1, dtype=torch.int32)
    Parts.of(buffer, 2, 8).fill([SlotStep(3, 33, tree), SlotStep(1, 5, TokenTree(6))])
    assert buffer.tolist() == [
        *[3, 1, -1, -1],
        *[33, 5, -1, -1],
        *[7, 8, 9, 5, 7, 7, 7, 7],
        *[6] * 8,
        *[0, 1, 2, 1, 0, 0, 0, 0],
        *[0] * 8,
        *[0b1, 0b11, 0b111, 0b1001, 1, 1, 1, 1],
        *[1] * 8,
    ]
    Parts.of(buffer, 2, 8).fill([SlotStep(3, 33, tree)])  # padded with a copy of the sequence
    assert Parts.of(buffer, 2, 8).slots.tolist() == [3, 3]


def test_all_parts_of_the_buffer_are_aligned_as_separate_tensors_are():
    """Triton recompiles a kernel for pointers that are not 16-byte aligned."""
    for sequences in BATCHES:
        for rows in BUCKETS:
            parts = Parts.of(torch.zeros(buffer_size(sequences, rows), dtype=torch.int32), sequences, rows)
            assert all(part.storage_offset() % 4 == 0 for part in parts)
            assert all(part.is_contiguous() for part in parts)


def test_a_large_step_is_divided_and_similar_sequences_share_a_pass():
    assert division([1]) == [[0]]
    assert division([4, 1, 4, 2]) == [[0, 2, 3, 1]]
    assert division([64, 1, 1, 1, 1]) == [[0, 1, 2, 3], [4]]
    assert division([300, 2]) == [[0], [1]]
    assert sorted(len(members) for members in division([1] * 70)) == [6, 64]
    for rows in ([64] * 9, [1, 256, 3, 120, 17, 8, 8, 40], [5] * 33):
        passes = division(rows)
        assert sorted(i for members in passes for i in members) == list(range(len(rows)))
        for members in passes:
            padded = bucket_of(len(members), BATCHES) * bucket_of(max(rows[i] for i in members))
            assert padded <= MOST_ROWS


@pytest.mark.parametrize(
    "prompts", [PROMPTS[:1], PROMPTS, PROMPTS + PROMPTS[:1]], ids=["one", "two", "three"]
)
def test_captured_passes_give_the_text_of_plain_decoding(model, prompts):
    target = captured(model, 16)  # so that it grows several times
    generations = assert_same_as_autoregressive(target, prompts, "5,4,7", 60)
    assert sum(g.stats.accepted for g in generations) > 0
    assert target.cache.capacity >= 64
    assert all(rows in BUCKETS for _, rows, _ in target.passes)
    assert bucket_of(len(prompts), BATCHES) in {sequences for sequences, _, _ in target.passes}


def test_same_logits_as_the_ordinary_pass(model):
    """For one sequence and several, including the best tokens, which the host reads at once."""
    ordinary = make_target(model, path="transformers")
    target = captured(model)
    tree, other = TokenTree(3), TokenTree(9)
    tree.add_candidate([4, 5, 6])
    tree.add_candidate([4, 9])
    slots = {0: tree, 2: other, 5: tree}
    for step in range(3):
        both = []
        for one in (ordinary, target):
            if not step:
                one.prefill([(slot, [*PROMPTS[0], slot]) for slot in slots])
            found = one.forward(list(slots.items())) + one.forward([(0, tree)])
            both.append(
                torch.stack([s.row(n) for s in found for n in ((0, 4) if s is not found[1] else (0,))])
            )
            best, tops = [s.best(0) for s in found], [s.top([0], 8) for s in found]
            both.append(
                (
                    best,
                    [ids.tolist() for ids, _ in tops],
                    torch.cat([torch.from_numpy(odds) for _, odds in tops]),
                )
            )
            one.commit([(slot, [0, 1, 4][: len(tree)]) for slot, tree in slots.items()])
        assert (both[0] - both[2]).abs().max() < 1e-4
        assert both[1][:2] == both[3][:2]
        assert (both[1][2] - both[3][2]).abs().max() < 1e-4


def test_more_best_tokens_than_are_read_at_once(model):
    ordinary, target = make_target(model, path="transformers"), captured(model)
    for one in (ordinary, target):
        one.prefill([(0, PROMPTS[0])])
    scores = [one.forward([(0, TokenTree(3))])[0] for one in (ordinary, target)]
    for k in (1, 8, 20, 500):
        (ids, odds), (other_ids, other_odds) = (one.top([0], k) for one in scores)
        assert ids.shape == (1, min(k, 96))
        assert other_ids.shape[1] >= min(k, 96)
        assert ids[:, :k].tolist() == other_ids[:, :k].tolist()
        assert abs(odds[:, :k] - other_odds[:, :k]).max() < 1e-4


def test_attention_that_reads_all_columns_gets_the_used_length_rounded_up(model, monkeypatch):
    target = captured(model, 4096)
    widths, honest = set(), target.attention.attend
    if target.attention.backend == "triton":
        pytest.skip("it reads no further than a sequence's rows")

    def attend(query, key, *given, **named):
        widths.add(key.shape[2])
        return honest(query, key, *given, **named)

    monkeypatch.setattr(target.attention, "attend", attend)
    attend.__module__ = honest.__module__
    assert_same_as_autoregressive(target, [PROMPTS[0] * 20], "5,4,7", 120)
    assert target.cache.capacity == 4096
    assert widths == {256, 512}  # 160 to 292 tokens


# ---- on a simulated device


@pytest.fixture
def device(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize(
    "prompts",
    [PROMPTS[:1], PROMPTS, PROMPTS + PROMPTS[:1]],
    ids=["one", "two", "three"],
)
def test_replays_give_the_text_of_plain_decoding(model, device, prompts):
    target = captured(model, 64)
    generations = assert_same_as_autoregressive(target, prompts, "5,4,7", 60)
    assert sum(g.stats.accepted for g in generations) > 0
    replays = sum(what == "replay" for what, *_ in device.log)
    captures = sum(what == "capture" for what, *_ in device.log)
    assert replays > 20
    assert 0 < captures <= 12


@pytest.mark.parametrize(("sequences", "bucket"), [(2, 2), (3, 4), (8, 8), (13, 16)])
def test_replays_of_batches_have_the_logits_of_the_ordinary_pass(model, device, sequences, bucket):
    ordinary, target = make_target(model, path="transformers"), captured(model, 64)
    for one in (ordinary, target):
        one.prefill([(slot, [*PROMPTS[0], slot]) for slot in range(sequences)])
    for turn in range(3):  # the second one captures
        trees = [(slot, trial_tree(3 + slot + turn, 96)) for slot in range(sequences)]
        both = []
        for one in (ordinary, target):
            both.append(torch.stack([scores.row(7) for scores in one.forward(trees)]))
            one.commit([(slot, [0, 1]) for slot in range(sequences)])
        assert (both[0] - both[1]).abs().max() < 1e-4
    assert [size[:2] for size in target.passes] == [(bucket, 8)]
    assert sum(what == "replay" for what, *_ in device.log) == 2


def test_one_graph_serves_all_sequences(model, device):
    target = captured(model, 64)
    target.prefill([(slot, PROMPTS[0]) for slot in range(5)])
    for slots in ([0], [3], [1], [2, 4], [3, 0], [1, 2]):
        target.forward([(slot, TokenTree(3)) for slot in slots])
    assert sum(what == "capture" for what, *_ in device.log) == 2
    assert sum(what == "replay" for what, *_ in device.log) == 4  # each size ran once uncaptured


def test_a_step_of_a_batch_is_read_once(model, device):
    target = captured(model, 64)
    target.prefill([(slot, PROMPTS[0]) for slot in range(3)])
    for _ in range(3):
        device.log.clear()
        for scores in target.forward([(slot, trial_tree(3, 96)) for slot in range(3)]):
            scores.best(0)
            scores.best(1)
            scores.top([0, 1], 8)
        assert [what for what, *_ in device.log].count("read") == 1


def test_a_step_of_a_batch_comes_from_one_pinned_buffer_without_waiting(model, device, monkeypatch):
    target = captured(model, 64)
    target.prefill([(slot, prompt) for slot, prompt in enumerate(PROMPTS)])
    step = [(slot, TokenTree.of([3, 4], [-1, 0])) for slot in range(2)]
    for _ in range(2):  # the second one captures
        target.forward(step)
    pinned, copies, copy = [], [], torch.Tensor.copy_

    def copied(to, source, non_blocking=False):
        copies.append((to.data_ptr(), source.data_ptr(), non_blocking))
        return copy(to, source)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.data_ptr()) or tensor)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    target.forward(step)
    (one,) = target.passes.values()
    ((source, waits_not),) = [(s, n) for to, s, n in copies if to == one.numbers.data_ptr()]
    assert source == pinned[0]
    assert waits_not
    assert len(pinned) == 2  # the other one is for the results


def test_all_work_on_a_store_is_on_its_stream_after_the_callers(model, device):
    """Two callers' streams alternate; replays share memory, so they must not overlap on the device."""
    target, moves = captured(model, 64), []
    honest = target.cache.move
    target.cache.move = lambda paths: (moves.append(device.current.name), honest(paths))
    target.prefill([(0, PROMPTS[0])])
    own = target.graphs.stream.cuda.name
    for caller in ("A", "B", "A", "B"):
        device.caller(caller)
        device.log.clear()
        target.forward([(0, TokenTree(3))])
        target.commit([(0, [0])])
        assert device.log[0] == ("wait", own, caller)
        assert device.log[-1] == ("wait", caller, own)
        assert {stream for what, stream, *_ in device.log if what != "wait"} <= {own}
        assert device.current.name == caller
    assert set(moves) == {own}
    assert captured(model, 64).graphs.stream.cuda.name != own


def test_a_first_pass_on_the_stream_of_the_capture_precedes_it(model, device, monkeypatch):
    """It initializes libraries, including the workspace of matrix products, which is per stream."""
    target, ran = captured(model, 64), []
    honest = model.forward

    def forward(*given, **named):
        ran.append(("pass", device.current.name))
        device.log.append(ran[-1])
        return honest(*given, **named)

    monkeypatch.setattr(model, "forward", forward)
    target.prefill([(0, PROMPTS[0])])
    device.log.clear()
    for _ in range(3):
        target.forward([(0, TokenTree(3))])
    own = target.graphs.stream.cuda.name
    kinds = [entry[:2] for entry in device.log if entry[0] in ("pass", "capture", "replay")]
    assert kinds == [("pass", own), ("capture", own), ("pass", own), ("replay", own), ("replay", own)]


def test_the_least_recently_used_graphs_make_room(model, device):
    device.cost = 3 * TOTAL // 100
    target = captured(model, 512)
    target.prefill([(0, PROMPTS[0])])
    sizes = [TokenTree.of([3] * rows, range(-1, rows - 1)) for rows in (1, 4, 8, 16, 32)]
    for tree in sizes:
        for _ in range(2):
            target.forward([(0, tree)])
    assert [rows for _, rows, _ in target.passes] == [8, 16, 32]
    target.forward([(0, sizes[2])])
    for _ in range(2):
        target.forward([(0, sizes[0])])
    assert [rows for _, rows, _ in target.passes] == [32, 8, 1]


@pytest.mark.parametrize(("share", "kept"), [(0.1, 3), (0.04, 1)])
def test_graph_memory_is_a_setting(model, device, monkeypatch, share, kept):
    """Each capture takes 3 % of the device; the share sets how many fit."""
    monkeypatch.setattr(known(model), "graph_memory", 0.1)
    limit_graphs(HFModel(model), share)
    device.cost = 3 * TOTAL // 100
    target = captured(model, 64)
    target.prefill([(0, PROMPTS[0])])
    for rows in (1, 3, 6):
        chain = TokenTree.of(range(3, 3 + rows), range(-1, rows - 1))
        for _ in range(2):
            target.forward([(0, chain)])
    assert len(target.passes) == kept


@pytest.mark.parametrize(("share", "kept"), [(0.4, 3), (0.04, 0)])
def test_the_next_target_has_the_new_graph_memory(model, device, monkeypatch, share, kept):
    """With less memory, all passes are dropped, because their memory returns to the device together."""
    monkeypatch.setattr(known(model), "graph_memory", 0.1)
    device.cost = 3 * TOTAL // 100
    shared = TreeAttention(model, attention.get("sdpa"))
    for expected in (0, kept):
        target = captured(model, 64, shared)
        assert len(target.passes) == expected
        target.prefill([(0, PROMPTS[0])])
        for rows in (1, 3, 6):
            for _ in range(2):
                target.forward([(0, TokenTree.of(range(3, 3 + rows), range(-1, rows - 1)))])
        limit_graphs(HFModel(model), share)
        last = [len(target.passes), target.graphs.limit / TOTAL]
        del target
        gc.collect()
    assert last == [max(kept, 1), share]


def test_custom_generate_sets_the_graph_memory_of_every_call(device):
    model = tiny_model("llama", initializer_range=0.1)
    for share in (0.05, 0.02):
        given = {"custom_generate": lookahead.generate, "max_new_tokens": 4, "graph_memory": share}
        model.generate(torch.tensor([PROMPTS[0]]), **given)
        gc.collect()
        assert make_target(model).graphs.limit == share * TOTAL
        gc.collect()


def test_the_logits_of_captured_passes_count(model, device):
    target = captured(model, 512)
    target.prefill([(0, PROMPTS[0])])
    row = 4 * target.vocabulary
    target.graphs.limit = 5 * row + 2 * device.cost
    for rows, kept in ((1, [1]), (4, [1, 4]), (8, [8])):
        for _ in range(2):
            target.forward([(0, TokenTree.of([3] * rows, range(-1, rows - 1)))])
        assert [size[1] for size in target.passes] == kept
        assert target.graphs.bytes == sum(kept) * row + len(kept) * device.cost


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"graph_memory": 0.3},
            "graph_memory limits captured passes on a GPU, but the model is on cpu",
        ),
        ({"graph_memory": 0}, "graph_memory must be above 0 and at most 1, got 0"),
        ({"graph_memory": 1.5}, "graph_memory must be above 0 and at most 1, got 1.5"),
    ],
)
def test_a_share_of_no_gpu_is_an_error(given, message):
    with pytest.raises(SettingsError, match=message):
        load("tiny", device="cpu", **given)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.3, "graph_memory limits captured passes on a GPU, but the model is on cpu"),
        (0, "graph_memory must be above 0 and at most 1, got 0$"),
        (1.5, "graph_memory must be above 0 and at most 1, got 1.5$"),
    ],
)
def test_a_share_of_no_gpu_is_an_error_in_custom_generate(model, share, message):
    """The error names it; the model's own ``generate`` passes it on."""
    with pytest.raises(SettingsError, match=message):
        model.generate(
            torch.tensor([PROMPTS[0]]),
            custom_generate=lookahead.generate,
            max_new_tokens=4,
            graph_memory=share,
        )


def test_a_share_of_no_gpu_is_an_error_for_packed_weights_too():
    with pytest.raises(SettingsError, match="graph_memory limits captured passes"):
        load("tiny", device="cpu", weights="q8_0", graph_memory=0.3)


def test_passes_with_as_many_rows_share_the_memory_of_their_logits(model, device):
    target = captured(model, 512)
    target.prefill([(slot, PROMPTS[0]) for slot in range(4)])
    for _ in range(2):
        target.forward([(0, trial_tree(3, 96))])
        target.forward([(slot, TokenTree(3)) for slot in range(2)])
        target.forward([(slot, TokenTree.of([3, 4], [-1, 0])) for slot in range(2)])
    one, _, both = target.passes.values()
    assert (one.results[0].shape[:2], both.results[0].shape[:2]) == ((1, 8), (2, 4))
    assert one.results[0].data_ptr() == both.results[0].data_ptr()


ALLOCATOR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
DRIVER = torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
INVALID = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize("errors", [[ALLOCATOR], [CUBLAS], [DRIVER], [CUBLAS, INVALID]])
def test_without_memory_for_a_graph_its_steps_run_uncaptured(model, device, errors):
    device.cost, device.errors = TOTAL + 1, errors
    target = captured(model, 64)
    with pytest.warns(
        RuntimeWarning, match="not enough memory to capture steps of 1 x 1 rows; they run uncap"
    ):
        assert_same_as_autoregressive(target, PROMPTS[:1], "plain", 20)
    assert sum(what == "capture" for what, *_ in device.log) == 1
    assert not any(what == "replay" for what, *_ in device.log)


def test_another_error_of_a_capture_is_not_mistaken_for_memory(model, device):
    device.cost, device.errors = TOTAL + 1, [RuntimeError("operation not permitted"), INVALID]
    target = captured(model, 64)
    target.prefill([(0, PROMPTS[0])])
    target.forward([(0, TokenTree(3))])
    with pytest.raises(torch.AcceleratorError, match="operation failed due to a previous error"):
        target.forward([(0, TokenTree(3))])


def test_a_store_that_nobody_uses_keeps_no_large_cache(model, device):
    shared = TreeAttention(model, attention.get("sdpa"))
    target = captured(model, 64, shared)
    limit = target.graphs.limit = target.cache.bytes
    assert_same_as_autoregressive(target, PROMPTS[:1], "plain", 20)
    del target
    gc.collect()
    assert shared.idle[0].passes  # small enough
    target = captured(model, 64, shared)
    target.graphs.limit = limit
    assert_same_as_autoregressive(target, PROMPTS[:1], "plain", 100)
    assert target.cache.capacity == 128
    del target
    gc.collect()
    assert (shared.idle[0].cache.bytes, shared.idle[0].passes) == (0, {})
    assert_same_as_autoregressive(captured(model, 64, shared), PROMPTS[:1], "5,4,7", 20)


def test_what_waits_in_this_thread_is_found_and_no_other_thread_fails(device):
    """torch reports operations that wait process-wide or not at all."""
    failed, started, done = [], threading.Event(), threading.Event()

    def other():
        started.wait()
        try:
            device.wait()
        except (RuntimeError, UserWarning) as error:
            failed.append(error)
        done.set()

    threading.Thread(target=other).start()
    with cuda.noticed_waits(torch.device("cpu")) as found:
        started.set()
        done.wait()
        assert not found
        device.wait()
        with pytest.raises(RuntimeWarning):  # other warnings are unchanged, here errors
            warnings.warn("something else", RuntimeWarning, stacklevel=1)
    assert not failed
    assert device.mode == 0
    (where,) = found
    assert where.startswith(f"{__file__}:")


def cannot_be_captured(self, target, tree, length):
    raise RuntimeError("operation not permitted when stream is capturing")


# ---- chosen by make_target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHOSEN = ("llama", "qwen3", "mistral-sliding", "gemma2", "phi3", "mixtral", "deepseek-v3", "gpt-oss")


@pytest.mark.parametrize("family", CHOSEN)
def test_the_forced_path_gives_the_text_of_plain_decoding(family):
    model = tiny_model(family, initializer_range=0.1).to(DEVICE)
    before = model.config._attn_implementation
    try:
        target = make_target(model, path="cuda-graph")
    except SettingsError as error:  # some mixture-of-experts models route on the host
        if not torch.cuda.is_available():
            raise
        pytest.skip(str(error))
    assert target.path == "cuda-graph"
    assert "attention by" in target.reason
    generations = assert_same_as_autoregressive(target, PROMPTS[:1], "5,4,7", 40)
    generations += assert_same_as_autoregressive(target, PROMPTS, "prompt-lookup", 30)
    assert target.passes
    assert sum(g.stats.accepted for g in generations) > 0
    assert model.config._attn_implementation == before
    # The same completion as on the ordinary path; the model is unchanged for other users.
    (plain,) = run(make_target(model, path="transformers"), [Request(PROMPTS[0], Plain(), 40)])
    assert plain.tokens == generations[0].tokens


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama-dynamic-ntk", "dynamic positions"),
        ("falcon", "does not accept attention functions"),
        ("mamba", "cannot evaluate a token tree"),
    ],
)
def test_models_that_cannot_take_it_are_refused_by_name(family, reason):
    with pytest.raises(SettingsError, match=f"cuda-graph path is not available for this model.*{reason}"):
        make_target(tiny_model(family), path="cuda-graph")


def test_what_a_captured_pass_would_pass_by_is_refused():
    model = tiny_model("llama")
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    with pytest.raises(SettingsError, match="has hooks"):
        make_target(model, path="cuda-graph")
    handle.remove()
    assert make_target(model, path="cuda-graph").path == "cuda-graph"


def test_hooks_that_transformers_leaves_on_a_model_are_harmless():
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    model(input_ids=torch.tensor([PROMPTS[0]], device=DEVICE), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert make_target(model, path="cuda-graph").path == "cuda-graph"


def test_a_gpu_takes_it_without_being_asked(monkeypatch):
    from lookahead.hf import paths

    monkeypatch.setattr(paths, "on_gpu", lambda model: True)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    assert make_target(model).path == "cuda-graph"
    assert make_target(model, path="transformers").path == "transformers"


@pytest.mark.parametrize("how", ["refused", "wrong"])
def test_it_falls_back_and_says_so_once(how, monkeypatch):
    from lookahead.hf import cuda_graphs, paths

    monkeypatch.setattr(paths, "on_gpu", lambda model: True)
    if how == "refused":
        monkeypatch.setattr(cuda_graphs.CapturedPass, "run", cannot_be_captured)
    else:
        honest = cuda_graphs.Parts.fill

        def wrong(parts, steps):
            honest(parts, steps)
            parts.depths[0, 0] += len(steps[0].tree) > 1

        monkeypatch.setattr(cuda_graphs.Parts, "fill", wrong)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    named = "cannot be captured" if how == "refused" else "logits there differ"
    with pytest.warns(RuntimeWarning, match=f"steps are not captured: .*{named}"):
        target = make_target(model)
    assert target.path == "transformers"
    assert named in target.reason
    again = make_target(model)  # a second warning would be an error here
    assert_same_as_autoregressive(again, PROMPTS, "5,4,7", 20)


def test_a_kernel_that_does_not_compile_leaves_the_path_with_sdpa(monkeypatch):
    def broken(*args, **named):
        raise RuntimeError("no such instruction on this card")

    broken.__module__ = "lookahead.hf.attention.reference"
    monkeypatch.setattr(importlib.import_module("lookahead.hf.attention.reference"), "attend", broken)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    facts = probe(model).facts
    with pytest.warns(RuntimeWarning, match="no such instruction on this card.*using sdpa"):
        tree_attention, reason = captured_attention(model, facts, "reference")
    assert "attention by sdpa" in reason
    target = CudaGraphTarget(model, facts, tree_attention, 64)
    assert_same_as_autoregressive(target, PROMPTS[:1], "5,4,7", 20)


def test_a_kernel_that_is_wrong_leaves_the_path_with_sdpa(monkeypatch):
    honest = importlib.import_module("lookahead.hf.attention.sdpa").attend

    def wrong(*args, **named):
        return honest(*args, **named) * 1.5

    wrong.__module__ = "lookahead.hf.attention.reference"
    monkeypatch.setattr(importlib.import_module("lookahead.hf.attention.reference"), "attend", wrong)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    with pytest.warns(
        RuntimeWarning, match="the attention kernel cannot be used here .*differ.*; using sdpa"
    ):
        tree_attention, reason = captured_attention(model, probe(model).facts, "reference")
    assert tree_attention.backend == "sdpa"
    assert "attention by sdpa" in reason


@pytest.mark.parametrize("fault", ["wrong result", "inputs of the capture"])
def test_a_wrong_replay_of_a_batched_pass_is_found_at_load(fault, device, monkeypatch):
    """Replays of single sequences and eager passes are right."""
    honest, sizes = cuda_graphs.CapturedPass._capture, set()

    def capture(self, target):
        honest(self, target)
        if self.sequences == 1:
            return
        replay, numbers = self.graph.replay, self.numbers.clone()

        def wrong():
            sizes.add((self.sequences, self.rows))
            if fault == "inputs of the capture":
                self.numbers.copy_(numbers)
            replay()
            if fault == "wrong result":
                self.results[0][1] += torch.randn_like(self.results[0][1])

        self.graph.replay = wrong

    monkeypatch.setattr(cuda_graphs.CapturedPass, "_capture", capture)
    model = tiny_model("llama", initializer_range=0.1)
    tree_attention, reason = captured_attention(model, probe(model).facts, "sdpa")
    assert tree_attention is None
    assert "logits there differ from those of its own passes" in reason
    assert sizes == {(2, 16)}  # trees of 8 and 9 rows


class HostReads(TorchDispatchMode):
    """Records what a capture forbids: values read or created on the host, and copies between devices."""

    NAMES = frozenset(
        {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        devices = {
            x.device for x in (*args, result) if torch.is_tensor(x) and (x.dim() or name == "_to_copy")
        }
        if name in self.NAMES or (name in ("_to_copy", "copy_") and len(devices) > 1):
            self.found.append(name)
        return result


@pytest.mark.parametrize("family", [*CHOSEN, "gemma3", "olmo2", "cohere2", "qwen3-moe"])
def test_nothing_is_read_on_the_host_inside_a_pass(family):
    model = tiny_model(family, initializer_range=0.1).to(DEVICE)
    facts = probe(model).facts
    tree_attention, reason = captured_attention(model, facts)
    if tree_attention is None and torch.cuda.is_available():
        pytest.skip(reason)
    tree_attention.attend = attention.get("sdpa")
    target = CudaGraphTarget(model, facts, tree_attention, 64)
    target.prefill([(slot, prompt) for slot, prompt in enumerate(PROMPTS)])
    target.graphs.drop_passes()
    tree = trial_tree(3, 96)
    target.forward([(0, tree)])
    target.forward([(0, tree), (1, tree)])
    with HostReads() as watch:
        for one in target.passes.values():
            one.evaluate(target)
    assert not watch.found
    assert [one.sequences for one in target.passes.values()] == [1, 2]
    with HostReads() as watch:  # the mode works
        int(torch.ones(1, device=DEVICE))
        torch.ones(2, device=DEVICE).nonzero()
        torch.ones(3, device="meta").copy_(torch.ones(3))
    assert watch.found == ["_local_scalar_dense", "nonzero", "copy_"]


@pytest.mark.parametrize("waits", [None, (2, 4), (1, 64)])
def test_a_pass_that_reads_on_the_host_is_not_captured(waits, device, monkeypatch):
    """Waits inside a custom operator are found too, because the device reports them."""
    from lookahead.hf import cuda_graphs as module

    seen, honest = [], module.CapturedPass.evaluate

    def evaluate(self, target):
        size = self.sequences, self.rows
        seen.append((size, device.mode))
        if size == waits:
            device.wait()
        return honest(self, target)

    monkeypatch.setattr(module.CapturedPass, "evaluate", evaluate)
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=512)
    attention, reason = captured_attention(model, probe(model).facts, "sdpa")
    sizes = [*((1, rows) for rows in BUCKETS), (2, 4)]
    # All buckets are compiled first, then watched.
    assert seen[: 2 * len(sizes)] == [*((size, 0) for size in sizes), *((size, "warn") for size in sizes)]
    assert device.mode == 0
    assert (attention is None) == (waits is not None)
    if waits:
        assert f"reads values on the host in its pass ({__file__}:" in reason


@pytest.mark.parametrize("error", [ALLOCATOR, CUBLAS, DRIVER])
@pytest.mark.parametrize("when", [0, "warn"], ids=["first", "watched"])
def test_without_memory_for_large_steps_at_load_the_others_are_captured(when, error, device, monkeypatch):
    honest, held = cuda_graphs.CapturedPass.evaluate, [0]

    def evaluate(self, target):
        results = honest(self, target)
        if self.sequences * self.rows >= 64 and device.mode == when:
            held.clear()
            raise error
        held.append(max(target.graphs._logits))
        return results

    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=512)
    facts = probe(model).facts
    monkeypatch.setattr(cuda_graphs.CapturedPass, "evaluate", evaluate)
    with pytest.warns(RuntimeWarning) as said:
        tree_attention, reason = captured_attention(model, facts, "sdpa")
    monkeypatch.setattr(cuda_graphs.CapturedPass, "evaluate", honest)  # by now, there is memory
    assert "attention by sdpa" in reason
    assert max(held) <= 32  # after the error, no memory is held for the logits of larger steps
    (line,) = [str(one.message) for one in said]
    assert line.startswith("not enough memory to check passes of 64 rows or more; they run uncaptured")
    target = CudaGraphTarget(model, facts, tree_attention, 512)
    target.prefill([(slot, PROMPTS[0]) for slot in range(4)])
    for sequences, rows in ((1, 32), (1, 33), (2, 16), (4, 16)):
        device.log.clear()
        for _ in range(3):
            chain = TokenTree.of([3] * rows, range(-1, rows - 1))
            target.forward([(slot, chain) for slot in range(sequences)])
        captures = sum(what == "capture" for what, *_ in device.log)
        assert captures == (sequences * rows <= 32)


def test_without_memory_for_one_row_at_load_the_attention_kernel_is_not_blamed(device, monkeypatch):
    def evaluate(self, target):
        raise ALLOCATOR

    monkeypatch.setattr(cuda_graphs.CapturedPass, "evaluate", evaluate)
    monkeypatch.setattr(TreeAttention, "backend", "triton")
    model = tiny_model("llama")
    tree_attention, reason = captured_attention(
        model, probe(model).facts, "sdpa"
    )  # a warning is an error here
    assert tree_attention is None
    assert "cannot be captured (OutOfMemoryError: CUDA out of memory." in reason


@pytest.mark.parametrize("dead", [True, False])
def test_an_error_of_the_device_is_no_refusal(dead, monkeypatch):
    from lookahead.hf import cuda_graphs as module

    def fail(*given, **named):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "compare", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail if dead else lambda device: None)
    model = tiny_model("llama").to(DEVICE)
    facts = probe(model).facts
    if dead:
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            captured_attention(model, facts, "sdpa")
    else:
        assert "cannot be captured (AcceleratorError" in captured_attention(model, facts, "sdpa")[1]


def test_graphs_of_a_cache_that_moves_are_dropped_first_with_their_pool(model, device):
    """An allocator's pool must not be reused once all its graphs are gone."""
    target = captured(model, 16)
    target.prefill([(0, PROMPTS[0])])
    for _ in range(2):
        target.forward([(0, TokenTree(3))])
    held, honest = [], target.cache.reserve
    target.cache.reserve = lambda *room: (held.append(dict(target.passes)), honest(*room))
    target.forward([(0, trial_tree(3, 96))])  # it has room for 16 tokens
    assert not held
    for _ in range(2):
        target.forward([(0, TokenTree.of([3] * 10, range(-1, 9)))])
    assert held == [{}]
    assert [entry[2] for entry in device.log if entry[0] == "capture"] == [1, 2]


def test_cache_and_passes_are_taken_over_by_the_next_target(model):
    shared = TreeAttention(model, attention.get("auto", model.device))
    first = captured(model, 64, shared)
    cache = first.cache
    assert_same_as_autoregressive(first, PROMPTS[:1], "5,4,7", 20)
    other = captured(model, 64, shared)  # while the first is in use
    assert other.cache is not cache
    del first
    gc.collect()
    second = captured(model, 64, shared)
    assert second.cache is cache
    assert second.passes
    assert not any(storage.any() for storage in cache._storage.values())  # no trace of the last sequence
    assert_same_as_autoregressive(second, PROMPTS[:1], "5,4,7", 20)
    del second, other
    gc.collect()
    assert len(shared.idle) == 1  # one is enough


def test_cache_and_passes_end_with_the_weights_that_they_read():
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    first = make_target(model, path="cuda-graph")
    cache = first.cache
    del first
    gc.collect()
    assert make_target(model, path="cuda-graph").cache is cache
    weight = model.model.norm.weight
    weight.data = weight.data.clone()  # graphs read weights at fixed addresses
    assert make_target(model, path="cuda-graph").cache is not cache


def test_inference_mode_leaves_nothing_that_cannot_be_written_later(model):
    shared = TreeAttention(model, attention.get("auto", model.device))
    with torch.inference_mode():
        assert_same_as_autoregressive(captured(model, 16, shared), PROMPTS[:1], "5,4,7", 40)
    gc.collect()
    assert shared.idle
    assert_same_as_autoregressive(captured(model, 16, shared), PROMPTS[:1], "5,4,7", 60)


def test_logits_outlive_the_next_step(model):
    target = captured(model)
    target.prefill([(0, PROMPTS[0])])
    (scores,) = target.forward([(0, TokenTree(3))])
    row, best = scores.row(0), scores.row(0).clone()
    target.commit([(0, [0])])
    target.forward([(0, TokenTree(9))])
    assert torch.equal(row, best)


def test_nan_logits_of_a_captured_pass_are_an_error(model):
    from lookahead.core import NumericalError

    target = captured(model)
    target.prefill([(0, PROMPTS[0])])
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    norm.data.fill_(torch.nan)
    (scores,) = target.forward([(0, TokenTree(3))])
    norm.data.copy_(kept)
    with pytest.raises(NumericalError, match="logits are NaN"):
        scores.best(0)

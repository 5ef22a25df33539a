"""The step in buckets of rows over a static cache: the same text; capture itself needs a GPU."""

import gc
import importlib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from families import tiny_model
from lookahead import attention
from lookahead.core import SettingsError, TokenTree
from lookahead.targets.attention_hook import TreeAttention
from lookahead.targets.cuda_graphs import (
    BUCKETS,
    CudaGraphTarget,
    bucket_of,
    buffer_size,
    captured_attention,
    fill,
)
from lookahead.targets.equivalence import trial_tree
from lookahead.targets.paths import make_target, probe
from lookahead.testing import assert_same_as_autoregressive

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
    buffer = torch.full((buffer_size(8),), -1, dtype=torch.int32)
    fill(buffer, tree, 33, 8)
    assert buffer.tolist() == [
        33,
        *[7, 8, 9, 5, 7, 7, 7, 7],
        *[0, 1, 2, 1, 0, 0, 0, 0],
        *[0b1, 0b11, 0b111, 0b1001, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "several"])
def test_captured_passes_give_the_text_of_plain_decoding(model, prompts):
    target = captured(model, 16)  # so that it grows several times
    generations = assert_same_as_autoregressive(target, prompts, (5, 4, 7), 60)
    assert sum(g.stats.accepted for g in generations) > 0
    assert target.cache.capacity >= 64
    assert {bucket for _, bucket in target.passes} <= set(BUCKETS)
    assert target.passes


def test_same_logits_as_the_ordinary_pass(model):
    ordinary = make_target(model, path="transformers")
    target = captured(model)
    tree = TokenTree(3)
    tree.add_candidate([4, 5, 6])
    tree.add_candidate([4, 9])
    for step in range(3):
        both = []
        for one in (ordinary, target):
            if not step:
                one.prefill([(0, PROMPTS[0])])
            (scores,) = one.forward([(0, tree)])
            both.append(torch.stack([scores.row(node) for node in range(len(tree))]))
            one.commit([(0, [0, 1, 4])])
        assert (both[0] - both[1]).abs().max() < 1e-4


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
    except SettingsError as error:  # some mixtures of experts choose theirs on the host
        if not torch.cuda.is_available():
            raise
        pytest.skip(str(error))
    assert target.path == "cuda-graph"
    assert "attention by" in target.reason
    generations = assert_same_as_autoregressive(target, PROMPTS[:1], (5, 4, 7), 40)
    generations += assert_same_as_autoregressive(target, PROMPTS, "prompt-lookup", 30)
    assert target.passes
    assert sum(g.stats.accepted for g in generations) > 0
    assert model.config._attn_implementation == before
    # The same text as on the ordinary path; and the model is as it was for whoever else uses it.
    (plain,) = assert_same_as_autoregressive(
        make_target(model, path="transformers"), PROMPTS[:1], "plain", 40
    )
    assert plain.tokens == generations[0].tokens


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "a bias by distance"),
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


def test_a_gpu_takes_it_without_being_asked(monkeypatch):
    from lookahead.targets import paths

    monkeypatch.setattr(paths, "on_gpu", lambda model: True)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    assert make_target(model).path == "cuda-graph"
    assert make_target(model, path="transformers").path == "transformers"


@pytest.mark.parametrize("how", ["refused", "wrong"])
def test_it_falls_back_and_says_so_once(how, monkeypatch):
    from lookahead.targets import cuda_graphs, paths

    monkeypatch.setattr(paths, "on_gpu", lambda model: True)
    if how == "refused":
        monkeypatch.setattr(cuda_graphs.CapturedPass, "run", cannot_be_captured)
    else:
        honest = cuda_graphs.fill

        def wrong(buffer, tree, length, bucket):
            honest(buffer, tree, length, bucket)
            buffer[1 + bucket] += len(tree) > 1  # the root's depth

        monkeypatch.setattr(cuda_graphs, "fill", wrong)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    named = "cannot be captured" if how == "refused" else "logits there differ"
    with pytest.warns(RuntimeWarning, match=f"steps are not captured: .*{named}"):
        target = make_target(model)
    assert target.path == "transformers"
    assert named in target.reason
    again = make_target(model)  # a second warning would be an error here
    assert_same_as_autoregressive(again, PROMPTS, (5, 4, 7), 20)


@pytest.mark.skipif(not attention.has_triton(), reason="triton is not installed")
def test_a_kernel_that_does_not_compile_leaves_the_path_with_sdpa(monkeypatch):
    def broken(*args, **named):
        raise RuntimeError("no such instruction on this card")

    broken.__module__ = "lookahead.attention.triton"
    monkeypatch.setattr(importlib.import_module("lookahead.attention.triton"), "attend", broken)
    model = tiny_model("llama", initializer_range=0.1).to(DEVICE)
    facts = probe(model).facts
    with pytest.warns(RuntimeWarning, match="no such instruction on this card.*using sdpa"):
        tree_attention, reason = captured_attention(model, facts, "triton")
    assert "attention by sdpa" in reason
    target = CudaGraphTarget(model, facts, tree_attention, 64)
    assert_same_as_autoregressive(target, PROMPTS[:1], (5, 4, 7), 20)


class HostReads(TorchDispatchMode):
    """Notes what a capture does not allow: values read on the host, or made there, and copies between devices."""

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
    target.prefill([(0, PROMPTS[0])])
    tree = trial_tree(3, 96)
    target.forward([(0, tree)])
    one = target.passes[0, bucket_of(len(tree))]
    with HostReads() as watch:
        one.evaluate(target)
    assert not watch.found
    with HostReads() as watch:  # the watch works
        int(torch.ones(1, device=DEVICE))
        torch.ones(2, device=DEVICE).nonzero()
        torch.ones(3, device="meta").copy_(torch.ones(3))
    assert watch.found == ["_local_scalar_dense", "nonzero", "copy_"]


def test_a_pass_that_reads_on_the_host_is_not_captured(monkeypatch):
    from lookahead.targets import cuda_graphs as module

    watch = module.host_reads
    monkeypatch.setattr(module, "host_reads", lambda target: watch(target) or "_local_scalar_dense")
    with pytest.raises(SettingsError, match="reads values on the host in its pass"):
        make_target(tiny_model("llama"), path="cuda-graph")


class FakePass:
    """A pass as a device would see it: whether it waits for the host while that is an error."""

    def __init__(self, slot, bucket, device):
        self.bucket = bucket

    def evaluate(self, target):
        target.seen.append((self.bucket, target.mode))
        if target.mode == "error" and self.bucket == target.waits:
            raise RuntimeError("called a synchronizing CUDA operation")


@pytest.mark.parametrize("waits", [None, 32])
def test_every_bucket_is_compiled_and_then_watched_for_waiting(waits, monkeypatch):
    """A fake device; what waits inside a custom operator is seen too, since it is the device that tells."""
    from lookahead.targets import cuda_graphs as module

    target = SimpleNamespace(
        mode=0, waits=waits, seen=[], model=SimpleNamespace(device=torch.device("cuda:0"))
    )
    target.with_room = lambda *given: nullcontext()
    monkeypatch.setattr(module, "CapturedPass", FakePass)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(target, "mode", mode))
    found = module.host_reads(target)
    assert target.mode == 0  # as it was
    assert target.seen[: len(BUCKETS)] == [(bucket, 0) for bucket in BUCKETS]
    assert ("synchronizing" in found) == (waits is not None)
    if waits is None:
        assert target.seen[len(BUCKETS) :] == [(bucket, "error") for bucket in BUCKETS]


@pytest.mark.parametrize("dead", [True, False])
def test_an_error_of_the_device_is_no_refusal(dead, monkeypatch):
    from lookahead.targets import cuda_graphs as module

    def fail(*given):
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


def test_graphs_of_a_cache_that_moved_leave_their_pool_to_nobody(model, monkeypatch):
    """An allocator's pool must not be used again once all its graphs are gone."""
    handles = iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    store = captured(model, 16).graphs
    store.on_gpu, store.memory_pool = True, 0
    store.reserve(1, 10)
    assert store.memory_pool == 0
    store.reserve(1, 100)
    assert (store.memory_pool, store.passes) == (1, {})


def test_cache_and_passes_are_taken_over_by_the_next_target(model):
    shared = TreeAttention(model, attention.get("auto", model.device))
    first = captured(model, 64, shared)
    cache = first.cache
    assert_same_as_autoregressive(first, PROMPTS[:1], (5, 4, 7), 20)
    other = captured(model, 64, shared)  # while the first is in use
    assert other.cache is not cache
    del first
    gc.collect()
    second = captured(model, 64, shared)
    assert second.cache is cache
    assert second.passes
    assert not any(storage.any() for storage in cache._storage.values())  # nothing of the last text is left
    assert_same_as_autoregressive(second, PROMPTS[:1], (5, 4, 7), 20)
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
    weight.data = weight.data.clone()  # graphs read the weights where they lay
    assert make_target(model, path="cuda-graph").cache is not cache


def test_inference_mode_leaves_nothing_that_cannot_be_written_later(model):
    shared = TreeAttention(model, attention.get("auto", model.device))
    with torch.inference_mode():
        assert_same_as_autoregressive(captured(model, 16, shared), PROMPTS[:1], (5, 4, 7), 40)
    gc.collect()
    assert shared.idle
    assert_same_as_autoregressive(captured(model, 16, shared), PROMPTS[:1], (5, 4, 7), 60)


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

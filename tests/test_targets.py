"""The cache with in-place commits, the masks, and the probe that catches silent errors."""

from contextlib import nullcontext

import pytest
import torch

import lookahead
import lookahead.hf.target as target_module
from families import tiny_model
from lookahead.core import Engine, OutOfMemory, Request, TokenTree
from lookahead.core.target import BIT_EQUAL, CHECKED, UP_TO_ROUNDING
from lookahead.cpu.target import CpuTarget
from lookahead.drafters import Lookahead, Plain, as_drafter
from lookahead.hf import masks, tree_cache
from lookahead.hf.attention import pack_bits, unpack_bits
from lookahead.hf.batch_rows import BatchRowsTarget
from lookahead.hf.cuda_graphs import CudaGraphTarget
from lookahead.hf.exact_mode import ExactTarget
from lookahead.hf.masks import LayerTypes, attention_masks, stack_rows
from lookahead.hf.paths import PATHS, make_target, probe
from lookahead.hf.target import PlainTarget, TransformersTarget
from lookahead.hf.tree_cache import TreeCache
from lookahead.llamacpp.target import LlamaCppTarget
from lookahead.testing import assert_same_as_autoregressive, run


def branching_tree():
    tree = TokenTree(5)
    tree.add_candidate([6, 7])
    tree.add_candidate([6, 8, 9])
    tree.add_candidate([10])
    return tree


def test_bits_equal_the_trees_own_mask():
    trees = [branching_tree(), TokenTree(1)]
    bits = unpack_bits(pack_bits([tree.ancestors for tree in trees], 7))
    assert bits[0, :6, :6].tolist() == trees[0].mask()
    assert not bits[0, :6, 6:].any()
    assert bits[1, 0].tolist() == [True] + [False] * 6
    assert bits[:, :, 0].all()  # padding attends to the root, so no row is empty


def drawn(text, columns):
    """Rows of the drawing in a docstring: a row's name, then one character per column."""
    lines = [line.split()[: columns + 1] for line in text.splitlines()]
    return {name: marks for name, *marks in filter(None, lines) if len(marks) == columns}


def test_the_mask_drawn_in_the_docstring_is_that_of_a_lookahead_step():
    tree = TokenTree(1)
    a1 = tree.add(11, 0)
    a2 = tree.add(12, a1)
    for number, parent in enumerate((0, a1, a2)):
        tree.add(20 + number, parent, needs_logits=True)
    tree.add_candidate([30, 31])
    _, positions = stack_rows([tree], [2], len(tree))
    mask = attention_masks(
        LayerTypes(("full_attention",), 0, 0), [tree], [2], positions, torch.float32, torch.device("cpu")
    )
    rows = drawn(masks.__doc__, len(tree))
    names = ["r", "a1", "a2", "b0", "b1", "b2", "c0", "c1"]
    assert [rows[name] for name in names] == [
        ["#" if value == 0 else "." for value in row] for row in mask[0, 0, :, 2:].tolist()
    ]
    assert rows["row"] == names
    assert list(map(int, rows["depth"])) == tree.depths


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_masks_follow_logical_positions(kind):
    tree, length = branching_tree(), 4
    types = LayerTypes((kind,), sliding_window=3, chunk=3)
    _, positions = stack_rows([tree], [length], len(tree))
    mask = attention_masks(types, [tree], [length], positions, torch.float32, torch.device("cpu"))
    at = [*range(length), *(length + depth for depth in tree.depths)]
    for row in range(len(tree)):
        for column in range(length + len(tree)):
            seen = column < length or bool(tree.ancestors[row] >> (column - length) & 1)
            if kind == "sliding_attention":
                seen = seen and at[length + row] - at[column] < 3
            elif kind == "chunked_attention":
                seen = seen and at[length + row] // 3 == at[column] // 3
            assert (mask[0, 0, row, column] == 0) == seen


def fill(cache, slots, lengths, rows, base):
    cache.lengths.update(zip(slots, lengths, strict=True))
    cache.place(slots, lengths, rows)
    states = base + torch.arange(len(slots) * rows).float().view(len(slots), 1, rows, 1).expand(-1, 2, -1, 4)
    seen = cache.layers[0].update(states, states + 0.5)
    cache.layers[1].update(states + 1000, states + 1000.5)
    return states, seen


def test_rows_are_written_moved_and_kept_while_storage_grows():
    cache = TreeCache([(2, 4, 4), (2, 4, 4)], torch.float32, torch.device("cpu"), capacity=8)
    states, (keys, values) = fill(cache, [0], [0], 5, 0.0)
    assert torch.equal(keys, states)
    assert torch.equal(values, states + 0.5)
    fill(cache, [0], [5], 6, 100.0)
    assert cache.capacity == 16
    cache.move([(0, 5, [0, 2, 5])])
    for layer, extra in ((0, 0), (1, 1000)):
        keys, values = cache.read(0, 8)[layer]
        assert keys[0, 0, :, 0].tolist() == [x + extra for x in (0, 1, 2, 3, 4, 100, 102, 105)]
        assert torch.equal(values, keys + 0.5)


def test_sequences_of_different_length_share_a_pass():
    cache = TreeCache([(2, 4, 4), (2, 4, 4)], torch.float32, torch.device("cpu"), capacity=8)
    fill(cache, [2], [0], 3, 0.0)
    fill(cache, [0], [0], 1, 50.0)
    assert cache.slots == 4
    _, (keys, _) = fill(cache, [0, 2], [1, 3], 2, 100.0)
    assert keys.shape == (2, 2, 5, 4)
    assert keys[0, 0, :3, 0].tolist() == [50, 100, 101]
    assert keys[1, 0, :, 0].tolist() == [0, 1, 2, 102, 103]


def test_nothing_is_moved_where_the_path_lies_in_place(monkeypatch):
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"))
    fill(cache, [0], [0], 5, 0.0)
    monkeypatch.setattr(tree_cache, "to_device", None)
    cache.move([(0, 0, [0, 1, 2])])
    with pytest.raises(TypeError):
        cache.move([(0, 0, [0, 2])])


def test_rows_of_all_sequences_are_moved_at_once():
    cache = TreeCache([(2, 4, 4), (2, 4, 4)], torch.float32, torch.device("cpu"), capacity=8)
    fill(cache, [0], [0], 5, 0.0)
    fill(cache, [1], [0], 5, 100.0)
    cache.move([(0, 0, [0, 3]), (1, 1, [1, 2, 3])])
    assert cache.read(0, 3)[0][0][0, 0, :, 0].tolist() == [0, 3, 2]
    assert cache.read(1, 5)[1][0][0, 0, :, 0].tolist() == [1100, 1102, 1103, 1104, 1104]


def test_growing_keeps_what_is_in_use_and_frees_the_old_memory_first_if_nothing_is(monkeypatch):
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"), capacity=8)
    fill(cache, [0], [0], 6, 0.0)
    cache.lengths[0] = 4
    cache.reserve(2, 20)
    assert (cache.slots, cache.capacity) == (2, 32)
    assert cache.read(0, 7)[0][0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]  # pending rows too
    held, honest = [], torch.zeros

    def zeros(*given, **named):
        held.append(list(cache._storage))
        return honest(*given, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    cache.reserve(4, 20)
    cache.lengths.clear()
    cache.reserve(8, 20)
    assert held == [[(2, 4)], []]
    cache.free()
    assert cache.bytes == 0
    cache.reserve(3, 20)
    assert (cache.slots, cache.capacity, cache.bytes) == (4, 256, 4 * 4 * 2 * 256 * 4 * 4)


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_without_room_for_two_caches_sequences_wait_on_the_host(room, monkeypatch):
    """A device refuses the first allocations: both caches, the doubled one, the one of the needed size."""
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"), capacity=256)
    fill(cache, [0], [0], 4, 0.0)
    cache.lengths[0] = 4
    honest, refused = torch.zeros, []

    def zeros(*given, **named):
        if len(refused) < room:
            refused.append(given)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return honest(*given, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError) if room == 3 else nullcontext():
        cache.reserve(1, 514)
    assert cache.capacity == (1024, 1024, 768, 256)[room]
    assert cache.read(0, 5)[0][0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 0]


def test_without_room_for_any_cache_sequences_wait_until_there_is_room(monkeypatch):
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"), capacity=256)
    for slot, end in ((0, 300), (1, 4)):
        cache.reserve(2, end)
        fill(cache, [slot], [0], end, 100.0 * slot)
        cache.lengths[slot] = end
    honest, tried, room = torch.zeros, [], 0

    def zeros(count, slots, heads, capacity, size, **named):
        tried.append((slots, capacity))
        if capacity > room:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return honest(count, slots, heads, capacity, size, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        cache.reserve(2, 514)
    assert tried == [(2, 1024), (2, 1024), (2, 768), (2, 512)]
    assert cache.bytes == 0
    tried.clear()
    room = 256
    with pytest.raises(torch.AcceleratorError, match="out of memory"):  # not "KeyError"
        cache.place([1], [4], 1)
    assert min(tried) == (2, 512)  # the longest sequence needs it
    del cache.lengths[0]  # it ended
    cache.place([1], [4], 1)
    assert (cache.slots, cache.capacity) == (2, 256)
    assert cache.read(1, 5)[0][0][0, 0, :, 0].tolist() == [100, 101, 102, 103, 0]
    room = 1024
    cache.reserve(2, 514)
    assert cache.read(1, 5)[0][0][0, 0, :, 0].tolist() == [100, 101, 102, 103, 0]


def test_a_cache_without_memory_asks_only_for_the_slots_in_use(monkeypatch):
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"), capacity=256)
    for slot in range(8):
        cache.reserve(slot + 1, 4)
        fill(cache, [slot], [0], 4, 100.0 * slot)
        cache.lengths[slot] = 4
    honest, tried = torch.zeros, []

    def zeros(count, slots, heads, capacity, size, **named):
        tried.append((slots, capacity))
        if slots > 2:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return honest(count, slots, heads, capacity, size, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        cache.reserve(8, 300)
    assert cache.bytes == 0
    for slot in range(2, 8):
        del cache.lengths[slot]
    cache.place([1], [4], 1)
    assert (cache.slots, cache.capacity) == (2, 256)
    assert cache.read(1, 5)[0][0][0, 0, :, 0].tolist() == [100, 101, 102, 103, 0]


def test_a_cache_that_cannot_double_allocates_only_the_slots_in_use(monkeypatch):
    cache = TreeCache([(2, 4, 4)] * 2, torch.float32, torch.device("cpu"), capacity=256)
    cache.reserve(8, 4)
    fill(cache, [1], [0], 4, 0.0)
    cache.lengths[1] = 4
    honest = torch.zeros

    def zeros(count, slots, heads, capacity, size, **named):
        if slots > 2:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return honest(count, slots, heads, capacity, size, **named)

    monkeypatch.setattr(torch, "zeros", zeros)
    cache.reserve(2, 300)
    assert (cache.slots, cache.capacity) == (2, 512)


@pytest.mark.parametrize("drafter", ["4,4,4", "jacobi:block_size=4", "prompt-lookup"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt-neox"])
def test_many_sequences_in_one_pass(family, drafter):
    model = tiny_model(family, initializer_range=0.1)
    target = TransformersTarget(model, probe(model).facts, 16)
    prompts = [[3, 4, 5, 3, 4, 5, 3], [9] * 11, [20, 21], [7, 8, 7, 8, 7]]
    assert_same_as_autoregressive(target, prompts, drafter, 40, frozenset({2}))
    assert target.lengths == {}


def test_the_positions_of_mpt_are_a_limit():
    """MPT calls its number of positions max_seq_len, and its ALiBi bias has as many."""
    llm = lookahead.LLM(tiny_model("mpt", initializer_range=0.1))
    assert llm.context == 256
    prompt = [3, 4, 5] * 80
    plain = llm.generate(prompt, max_new_tokens=16, drafter="plain")
    assert len(plain.tokens) == 16
    assert llm.generate(prompt, max_new_tokens=16, drafter="adaptive:rows=64").tokens == plain.tokens


@pytest.mark.parametrize("path", ["transformers", "cpu"])
def test_sequences_that_join_late_and_leave_gaps(path):
    model = tiny_model("llama", initializer_range=0.1)
    made = make_target(model, path)
    target = type(made)(made.compiled if path == "cpu" else model, made.facts, 16)
    prompts = [[5, 6, 5, 6], [7, 8, 9], [30, 31, 30]]
    engine = Engine(lambda: target)
    limits = [50, 4, 30]
    joined = []
    for prompt, limit in zip(prompts, limits, strict=True):
        joined.append(engine.add(Request(prompt, Lookahead(4, 4, 4), limit)))
        engine.step()
        engine.step()
    while engine.busy:
        engine.step()
    for sequence, prompt, limit in zip(joined, prompts, limits, strict=True):
        (plain,) = run(make_target(model), [Request(prompt, Plain(), limit)])
        assert sequence.tokens == plain.tokens


def test_the_models_last_position_is_used_and_not_passed():
    target = make_target(tiny_model("gpt2", n_positions=32))
    (ours,) = assert_same_as_autoregressive(target, [[3, 4, 3, 4, 3]], "7,5,7", 27)
    assert len(ours.tokens) == 27


#: Frequencies that change at 40 tokens.
LONG_ROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [4.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 40,
    },
}


@pytest.mark.filterwarnings("ignore:lookahead.generate runs this model on the slower")
def test_a_rotary_base_that_changes_with_length():
    """Rows on both sides of the change cannot share a pass; trees stop before it."""
    for family, extra in (
        ("llama-dynamic-ntk", {}),
        ("phi3", LONG_ROPE),
    ):
        model = tiny_model(family, initializer_range=0.1, **extra)
        prompt = torch.tensor([[5, 6, 7, 8] * 5])
        plain = model.generate(prompt, max_new_tokens=44, eos_token_id=None)
        from lookahead import generate

        ours = model.generate(prompt, max_new_tokens=44, eos_token_id=None, custom_generate=generate)
        assert ours.tolist() == plain.tolist()
        # On either side of the change, sequences are evaluated one after the other, as if they were alone.
        target = make_target(model)
        requests = [Request([5, 6, 7] * n, Lookahead(), 44) for n in (3, 13)]
        alone = [run(target, [request])[0].tokens for request in requests]
        assert [sequence.tokens for sequence in run(target, requests)] == alone


@pytest.mark.parametrize("path", ["transformers", "plain"])
def test_a_text_does_not_depend_on_a_longer_one_before_it(path):
    """transformers keeps the longest sequence's frequencies, so its output depends on the call before."""
    model = tiny_model("llama-dynamic-ntk")
    prompt = [3 + i * i % 89 for i in range(60)]
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
    first, second = (
        model.generate(ids, attention_mask=mask, max_new_tokens=60, eos_token_id=None)[0, 60:].tolist()
        for _ in range(2)
    )
    assert first != second
    target = make_target(model, path=path)
    for method in ("lookahead", "autoregressive", "lookahead"):
        model.generate(torch.ones(1, 90, dtype=torch.long), max_new_tokens=30, eos_token_id=None)
        (ours,) = run(target, [Request(prompt, as_drafter(method), 60)])
        assert ours.tokens == first


def test_the_lm_head_runs_only_on_rows_that_are_read():
    model = tiny_model("llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    target = make_target(model, path="transformers")
    seen.clear()
    (ours,) = run(target, [Request([3, 4, 5] * 4, Lookahead(10, 5, 3), 20)])
    assert max(seen) < max(ours.stats.rows_per_step)


def break_positions(monkeypatch):
    honest = target_module.stack_rows

    def wrong(trees, lengths, rows):
        ids, positions = honest(trees, lengths, rows)
        return ids, positions[:, :1] + torch.arange(rows)

    monkeypatch.setattr(target_module, "stack_rows", wrong)


def break_masks(monkeypatch):
    honest = target_module.attention_masks

    def wrong(*args):
        return torch.zeros_like(honest(*args))

    monkeypatch.setattr(target_module, "attention_masks", wrong)


def break_commits(monkeypatch):
    monkeypatch.setattr(TreeCache, "move", lambda *args: None)


@pytest.mark.parametrize("fault", [break_positions, break_masks, break_commits])
def test_the_probe_lets_no_silent_error_through(fault, monkeypatch):
    fault(monkeypatch)
    model = tiny_model("llama")
    found = probe(model)
    assert found.mode == "batch-rows"
    assert "differently from causal passes" in found.reason
    assert isinstance(make_target(model), BatchRowsTarget)


@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention"])
def test_an_attention_without_masks_is_probed_and_stepped_under_one_that_takes_them(own):
    model = tiny_model("llama", initializer_range=0.1)
    model.config._attn_implementation_internal = own
    assert probe(model).mode == "tree"
    assert_same_as_autoregressive(
        make_target(model, path="transformers"), [[3, 4, 3, 4, 3]], max_new_tokens=12
    )
    assert model.config._attn_implementation == own


def test_rows_to_keep_go_to_the_device_only_where_some_are_left_out(monkeypatch):
    """Copying them waits for the device, and a step with only candidates needs all its rows."""
    target = make_target(tiny_model("llama"), path="transformers")
    target.prefill([(0, [3, 4, 5])])
    honest, kept = target_module.run_model, []

    def watch(*given, **named):
        kept.append("logits_to_keep" in named)
        return honest(*given, **named)

    monkeypatch.setattr(target_module, "run_model", watch)
    target.forward([(0, branching_tree())])
    tree = branching_tree()
    tree.add(11, 0)  # a window row, whose logits are not read
    target.forward([(0, tree)])
    assert kept == [False, True]


def test_the_probe_is_asked_once_per_model():
    model = tiny_model("llama")
    before = probe(model)
    assert probe(model) is before
    lookahead.refresh(model)
    assert probe(model) is not before


def test_writes_of_transformers_itself_do_not_repeat_the_probe():
    """Frequencies of some rotary positions in every pass, and the length of a static cache."""
    prompt = torch.tensor([[5, 6, 7, 8] * 3])
    model = tiny_model("phi3", **LONG_ROPE)
    before = probe(model)
    model.generate(prompt, max_new_tokens=40, eos_token_id=None)
    assert probe(model) is before
    model = tiny_model("llama")
    before = probe(model)
    for count in (4, 8):
        model.generate(prompt, max_new_tokens=count, cache_implementation="static", disable_compile=True)
    assert probe(model) is before


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_survived(monkeypatch, error):
    model = tiny_model("llama", initializer_range=0.1)
    target = make_target(model, path="transformers")
    honest = TransformersTarget._pass

    def small(self, trees):
        if max(len(tree) for _, tree in trees) > 12:
            raise error
        return honest(self, trees)

    monkeypatch.setattr(TransformersTarget, "_pass", small)
    with pytest.warns(RuntimeWarning, match="did not fit"):
        (ours,) = run(target, [Request([3, 4, 5] * 3, Lookahead(), 40)])
    monkeypatch.undo()
    (plain,) = run(make_target(model), [Request([3, 4, 5] * 3, Plain(), 40)])
    assert ours.tokens == plain.tokens


def test_other_errors_of_the_model_are_not_mistaken_for_memory(monkeypatch):
    target = make_target(tiny_model("llama"), path="transformers")
    monkeypatch.setattr(target.model, "forward", lambda **k: (_ for _ in ()).throw(RuntimeError("shape")))
    (sequence,) = run(target, [Request([3, 4], Lookahead(), 4)])
    assert sequence.finish_reason == "error"
    assert not isinstance(sequence.error, OutOfMemory)
    assert "RuntimeError: shape" in str(sequence.error)


def test_every_path_of_a_target_has_its_promise():
    kinds = [CpuTarget, CudaGraphTarget, ExactTarget, BatchRowsTarget, TransformersTarget, PlainTarget]
    guaranteed = {kind.path: kind.guarantee.startswith("bit-equal") for kind in kinds}
    assert guaranteed == {path.name: path.bit_equal for path in PATHS}
    assert {kind.guarantee for kind in (*kinds, LlamaCppTarget)} == {BIT_EQUAL, CHECKED, UP_TO_ROUNDING}

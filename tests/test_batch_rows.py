"""Models with recurrent or convolutional state draft by batch rows and match model.generate."""

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import lookahead
from lookahead.core import OutOfMemory, Request, SettingsError, TokenTree
from lookahead.drafters import Adaptive, Plain, as_drafter
from lookahead.hf import batch_rows
from lookahead.hf import target as transformers_target
from lookahead.hf.batch_rows import BatchRowsTarget, leaf_paths
from lookahead.hf.paths import NAMES, make_target, probe
from lookahead.testing import run

DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SSM = {"mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
ALONE = {"n_groups": 1, "head_dim": 16, "chunk_size": 64}
#: Drafted by batch rows. The first four are tested in every way.
DRAFTED = {
    "mamba2": {"state_size": 8, "num_heads": 8, **ALONE},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "falcon_h1": {**SSM, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "qwen3_5_text": DELTA,
    "bamba": {**SSM, "mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **SSM,
        "mamba_n_heads": 8,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
}
FAMILIES = tuple(DRAFTED)[:4]
#: One row per step: a multi-token scan starts without the state, or clamps where the recurrence does not.
ONE_ROW = {
    "mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "head_dim": 16,
    },
}
#: They keep their state outside the given cache.
REFUSED = {
    "rwkv": {"attention_hidden_size": 64},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 16, "head_dim": 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
}
ROWS = "5,4,7"
NEW = 20
ADAPTIVE = Adaptive(rows=8)


def build(family, seed=0, **overrides):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "vocab_size": 96,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.1,
    }
    sizes |= {"initializer_range": 0.2} if family in {**ONE_ROW, **REFUSED} else {}
    special = {**DRAFTED, **ONE_ROW, **REFUSED}[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**sizes, **special, **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


model_of = functools.cache(build)


def prompts():
    half = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([half, half], dim=1)  # repetitive, so that there is something to draft
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = 0
    return ids, mask


SAMPLED = {"do_sample": True, "top_k": 4, "temperature": 0.7, "repetition_penalty": 1.1}


def generate(family, sampled, eos=None, **ours):
    (ids, mask), model = prompts(), model_of(family)
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "eos_token_id": eos, **(SAMPLED if sampled else {"do_sample": False})}
    out = model.generate(ids, attention_mask=mask, **options, **ours)
    return out.tolist(), torch.random.get_rng_state().tolist()


reference = functools.cache(generate)


def drafted(family, sampled, drafter, eos=None):
    stats = []
    ours = {"custom_generate": lookahead.generate, "drafter": drafter}
    return *generate(family, sampled, eos, **ours, stats=stats), stats


@pytest.mark.parametrize(
    ("drafter", "sampled"),
    [(ADAPTIVE, False), (ADAPTIVE, True), ("3,3,3", False), ("prompt-lookup", True)],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_batch_is_that_of_generate(family, drafter, sampled):
    text, state, stats = drafted(family, sampled, drafter)
    assert (text, state) == reference(family, sampled)
    assert {one.path for one in stats} == {"batch-rows"}
    assert max(max(one.rows_per_step) for one in stats) > 1
    if drafter == ADAPTIVE:
        assert sum(one.accepted for one in stats) > 0


@pytest.mark.parametrize("family", [name for name in DRAFTED if name not in FAMILIES])
def test_further_families_draft_by_batch_rows(family):
    text, _, stats = drafted(family, False, ADAPTIVE)
    assert text == reference(family, False)[0]
    assert {one.path for one in stats} == {"batch-rows"}
    assert sum(one.accepted for one in stats) > 0


def test_step_times_decide_how_many_rows_where_nothing_else_is_said():
    assert drafted("lfm2", False, None)[:2] == reference("lfm2", False)


def test_an_end_token_inside_an_accepted_path():
    rows, ended = reference("lfm2", False)[0], 0
    for place in range(26, 38, 3):
        eos = rows[1][place]
        text, _, stats = drafted("lfm2", False, ADAPTIVE, eos)
        assert text == generate("lfm2", False, eos)[0]
        ended += stats[1].accepted > 0
    assert ended > 0


def follow(family):
    """Compare logits with causal passes for every way of carrying the state over.

    Rows are kept; pending tokens go into the next pass, a separate pass, or a single-row step.
    """
    model = model_of(family)
    target = BatchRowsTarget(model)
    texts = {0: list(range(5, 25)), 1: [7]}
    target.prefill(list(texts.items()))
    bush = [0, 0, 0, 0, 1, 5, 2]  # leaves 6 (deepest), 7, 3 and 4

    def step(parents, path, slots=(0, 1)):
        trees = {}
        for slot in slots:
            tree = trees[slot] = TokenTree(texts[slot][-1] % 90 + 3)
            for parent in parents:
                tree.add((7 * len(tree) + 5 * slot + len(texts[slot])) % 96, parent, needs_logits=True)
        for slot, scores in zip(slots, target.forward(list(trees.items())), strict=True):
            tree = trees[slot]
            leaves = [texts[slot] + tree.path_tokens(node) for node in range(len(tree))]
            for node, leaf in enumerate(leaves):
                with torch.no_grad():
                    own = model(torch.tensor([leaf]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(scores.row(node), own, atol=3e-4, rtol=1e-3)
        target.commit([(slot, path) for slot in slots])
        for slot in slots:
            texts[slot] += [trees[slot].tokens[node] for node in path]

    def pending():
        return [len(target._pending[slot]) for slot in (0, 1)]

    step(bush, [0, 1, 5, 6])  # fills its row
    assert pending() == [0, 0]
    step(bush, [0, 2, 7])  # a whole path, but its row is padded
    step(bush, [0], slots=(1,))
    assert pending() == [3, 4]
    step([0, 1, 2], [0, 1, 2, 3])  # one row, filled, after pending tokens
    assert pending() == [0, 0]
    step(bush, [0, 2])
    step([0, 1], [0, 1])
    step([], [0], slots=(0,))  # a single-row step absorbs pending tokens
    assert pending() == [0, 4]
    step([0, 1], [0])
    assert pending() == [1, 5]
    step(bush, [0, 4])  # four rows: the second slot's five tokens would be too many
    assert pending() == [3, 2]
    step([], [0])
    assert pending() == [0, 0]
    for slot in (0, 1):
        target.release(slot)
    assert not target._caches


def keep_another_row(monkeypatch):
    honest = DynamicCache.reorder_cache
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda cache, row: honest(cache, 0 * row + (row == 0)))


def forget_pending(monkeypatch):
    commit = BatchRowsTarget.commit

    def broken(self, paths):
        commit(self, paths)
        for pending in self._pending.values():
            pending[:] = pending[-1:]

    monkeypatch.setattr(BatchRowsTarget, "commit", broken)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_text(family):
    follow(family)


@pytest.mark.parametrize("fault", [keep_another_row, forget_pending])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_fails_with_a_wrong_state(family, fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        follow(family)


def test_the_probe_sees_a_wrong_state(monkeypatch):
    keep_another_row(monkeypatch)
    found = probe(build("mamba2", num_hidden_layers=1))
    assert found.mode == "plain"
    assert "decoding one row per step" in found.reason


def test_the_probe_sees_states_that_are_not_copied(monkeypatch):
    monkeypatch.setattr(transformers_target, "_repeat", lambda state, rows: state)
    with pytest.raises(SettingsError, match="do not continue its sequence"):
        probe(build("mamba2", num_hidden_layers=1))


@pytest.mark.parametrize("family", ONE_ROW)
def test_models_whose_scan_differs_from_their_recurrence_go_one_row_a_step(family, monkeypatch):
    found = probe(model_of(family))
    assert found.mode == "plain"
    assert "nor can it evaluate its paths as batch rows (difference" in found.reason
    with pytest.warns(
        UserWarning, match="with plain decoding, without drafts: .* nor can it evaluate its paths"
    ):
        text, _, stats = drafted(family, False, None)
    assert text == reference(family, False)[0]
    assert {one.path for one in stats} == {"plain"}
    with pytest.raises(SettingsError, match="the batch-rows path is not available"):
        make_target(model_of(family), path="batch-rows")


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_keep_their_state_elsewhere_are_refused(family):
    with pytest.raises(SettingsError, match=r"use model\.generate without custom_generate"):
        probe(build(family))


def test_a_model_in_bfloat16_drafts_by_batch_rows():
    model = build("lfm2").to(torch.bfloat16)
    assert probe(model).mode == "batch-rows"
    target = make_target(model)
    drafted, plain = (
        run(target, [Request([5, 6, 7] * 4, drafter, 30)])[0] for drafter in (ADAPTIVE, Plain())
    )
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) == 30
    assert drafted.stats.accepted > 0


def test_paths_and_forced_targets():
    model = model_of("lfm2")
    assert make_target(model, path="batch-rows").path == "batch-rows"
    assert make_target(model, path="plain").path == "plain"
    with pytest.raises(SettingsError, match="the transformers path is not available"):
        make_target(model, path="transformers")


def test_rows_are_the_paths_to_the_deepest_nodes_that_are_read():
    tree = TokenTree(1)
    for token, parent, read in ((2, 0, True), (3, 1, True), (4, 2, False), (5, 0, False), (6, 4, True)):
        tree.add(token, parent, needs_logits=read)
    assert leaf_paths(tree) == [[0, 1, 2], [0, 4, 5]]


def test_scans_work_in_short_chunks_and_keep_their_size():
    model, seen = model_of("mamba2"), []
    mixers = [module for module in model.modules() if hasattr(module, "chunk_size")]
    for mixer in mixers:
        mixer.register_forward_pre_hook(lambda module, args: seen.append(module.chunk_size))
    target = BatchRowsTarget(model)
    (one,) = run(target, [Request([5, 6, 7] * 4, as_drafter(ROWS), 10)])
    assert one.error is None
    assert set(seen) == {64, batch_rows.MIN_CHUNK}
    assert {mixer.chunk_size for mixer in mixers} == {64}
    for mixer in mixers:
        mixer._forward_pre_hooks.clear()


def test_running_out_of_memory_leaves_every_state_as_it_was(monkeypatch):
    model, honest, calls = model_of("lfm2"), batch_rows.run_model, []
    make_target(model)  # its check needs memory

    def small(model, facts, cache, ids, positions, **named):
        calls.append(len(ids))
        logits = honest(model, facts, cache, ids, positions, **named)
        if len(ids) > 2 and len(calls) % 2:
            raise OutOfMemory("no room")
        return logits

    monkeypatch.setattr(batch_rows, "run_model", small)
    texts = [[5, 6, 7] * 4, [11, 12] * 5]
    with pytest.warns(RuntimeWarning, match="did not fit in memory"):
        ours = run(make_target(model), [Request(t, as_drafter(ROWS), 30) for t in texts])
    monkeypatch.undo()
    for one, text in zip(ours, texts, strict=True):
        (plain,) = run(make_target(model, path="plain"), [Request(text, Plain(), 30)])
        assert one.tokens == plain.tokens
    assert max(calls) > 2


@pytest.mark.parametrize(("family", "path"), [("lfm2", "plain"), ("lfm2", "batch-rows"), ("mamba", "plain")])
def test_a_sequence_that_ends_without_memory_changes_no_other(monkeypatch, family, path):
    """The other sequence has taken its step when memory runs out, and takes it again."""
    model = model_of(family)
    honest, calls = transformers_target.run_model, []

    def full(model, facts, cache, ids, positions, **named):
        if len(ids[0]) == 1 and int(positions[0, 0]) == 24:  # the fifth step of the longer sequence
            calls.append(1)
            raise OutOfMemory("no room")
        return honest(model, facts, cache, ids, positions, **named)

    (alone,) = run(make_target(model, path=path), [Request([11, 12] * 5, Plain(), 12)])
    monkeypatch.setattr(transformers_target, "run_model", full)
    requests = [Request([11, 12] * 5, Plain(), 12), Request([5, 6, 7, 8] * 5, Plain(), 12)]
    short, long = run(make_target(model, path=path), requests)
    assert calls
    assert isinstance(long.error, OutOfMemory)
    assert short.tokens == alone.tokens


def test_a_copy_that_does_not_fit_ends_one_sequence(monkeypatch):
    """Copies of the states of several sequences are made before each step."""
    honest = transformers_target.repeated

    def full(cache, rows):
        if cache.get_seq_length() == 24:
            raise MemoryError
        return honest(cache, rows)

    monkeypatch.setattr(transformers_target, "repeated", full)
    requests = [Request([11, 12] * 5, Plain(), 12), Request([5, 6, 7, 8] * 5, Plain(), 12)]
    short, long = run(make_target(model_of("lfm2"), path="plain"), requests)
    assert isinstance(long.error, OutOfMemory)
    (alone,) = run(make_target(model_of("lfm2"), path="plain"), [requests[0]])
    assert short.tokens == alone.tokens


def test_positions_that_change_with_the_length_go_one_row_a_step():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    found = probe(build("lfm2", rope_parameters=rope))
    assert found.mode == "plain"
    assert "rotary positions (dynamic) change with the length" in found.reason


def test_the_probe_is_the_same_for_an_engine(tmp_path):
    model_of("lfm2").save_pretrained(tmp_path)
    llm = lookahead.load(tmp_path)
    assert llm.model.probe.mode == "batch-rows" == llm.path
    drawn = {"max_new_tokens": 20, "temperature": 0.8, "seed": 3}
    ours = llm.generate([5, 6, 7] * 4, drafter=lookahead.Adaptive(rows=64), **drawn)
    assert ours.tokens == llm.generate([5, 6, 7] * 4, drafter="off", **drawn).tokens
    assert max(ours.stats.rows_per_step) > 1
    assert NAMES.index("batch-rows") < NAMES.index("plain")


@pytest.mark.parametrize(("family", "named"), [("lfm2", "past_key_values"), ("mamba2", "cache_params")])
def test_a_callers_cache_is_refused(family, named):
    """It could not be filled or read."""
    ids, model = prompts()[0][1:], model_of(family)
    cache = DynamicCache(config=model.config)
    with pytest.raises(SettingsError, match=named):
        model.generate(ids, max_new_tokens=2, custom_generate=lookahead.generate, **{named: cache})

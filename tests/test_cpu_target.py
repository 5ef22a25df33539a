"""The compiled path against its reference, the transformers target, and against plain decoding."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead.core import OutOfMemory, Request, SettingsError, Target, TokenTree
from lookahead.core.errors import Unsupported
from lookahead.cpu import formats
from lookahead.cpu.formats import FORMATS
from lookahead.cpu.target import CpuTarget, PassArrays
from lookahead.drafters import Plain
from lookahead.hf import module_families
from lookahead.hf.facts import ModelFacts
from lookahead.hf.module_families import REGISTRY, Spec, register, spec_of
from lookahead.hf.paths import make_target
from lookahead.hf.testing import tiny_model
from lookahead.sampling.scores import Logits
from lookahead.sampling.top import top_of_rows
from lookahead.testing import assert_same_as_autoregressive, run
from rows import row_of

VOCABULARY = 97
#: Bases that differ within a few tokens.
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biases-wide-heads": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-one-key-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-untied-head": ("Llama", {"tie_word_embeddings": False}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-half-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-one-key-head": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral-sliding": ("Mistral", {"sliding_window": 5}),
    "mistral-whole": ("Mistral", {"sliding_window": None}),
    "smollm3": ("SmolLM3", {"sliding_window": 5}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-one-key-head": ("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("Olmo3", {"sliding_window": 5}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-partial-rotary-sliding": (
        "Phi3",
        {
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "gpt2": ("GPT2", {"n_inner": 96}),
    "gpt2-scaled-by-layer": ("GPT2", {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True}),
}


def tiny(
    family: str = "llama", dtype: torch.dtype = torch.float32, norm_spread: float = 0.0, **changes: object
) -> torch.nn.Module:
    """A random model whose logits are far from uniform.

    Args:
        norm_spread: additional spread of the norm weights, as in trained models.
        changes: config fields.
    """
    name, extra = FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
        **changes,
    }
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**settings)
    torch.manual_seed(3)
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
            if "norm" in name or ".ln_" in name:
                parameter.add_((torch.rand_like(parameter) - 0.3) * norm_spread)
    return model.to(dtype)


def branched(seed: int, rows: int = 14) -> TokenTree:
    """Three branches, so a row's cache column is not its position; some rows need no logits."""
    tree = TokenTree(seed % VOCABULARY)
    for start in range(3):
        parent = 0
        for i in range((rows - 1) // 3):
            parent = tree.add((seed * (start + 2) + 5 * i + start) % VOCABULARY, parent, needs_logits=i != 1)
    return tree


def worst(a: object, b: object, nodes: list[int]) -> float:
    return max(float((row_of(a, n) - row_of(b, n)).double().abs().max()) for n in nodes)  # type: ignore[attr-defined]


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, divided by the standard deviation of the expected logits (at least 1)."""
    return float((logits - expected).double().abs().max() / expected.double().std().clamp(min=1))


def of_capacity(target: Target, capacity: int) -> CpuTarget:
    """A target on the same compiled model whose slots begin with this capacity."""
    assert isinstance(target, CpuTarget), target.reason
    return CpuTarget(target.compiled, target.facts, capacity, target.reason)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + seed) % VOCABULARY for i in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_transformers_target(family: str) -> None:
    model = tiny(family)
    reference, target = make_target(model, path="transformers"), of_capacity(make_target(model), 4)
    assert (reference.path, target.path) == ("transformers", "cpu"), target.reason
    lengths = {0: 9, 1: 23, 2: 1}
    start = [one.prefill([(s, prompt(n, s)) for s, n in lengths.items()]) for one in (reference, target)]
    assert max(worst(a, b, [0]) for a, b in zip(*start, strict=True)) < 2e-5
    for turn in range(3):
        trees = [(s, branched(5 * turn + s, 14 + 3 * s)) for s in lengths]
        both = [one.forward(trees) for one in (reference, target)]
        for (_, tree), a, b in zip(trees, *both, strict=True):
            assert worst(a, b, tree.needs_logits_nodes()) < 2e-5
        last = [(s, len(tree) - 1, tree) for s, tree in trees]
        paths = [(s, [n for n in range(end + 1) if tree.ancestors[end] >> n & 1]) for s, end, tree in last]
        for one in (reference, target):
            one.commit(paths)
    single = [(s, TokenTree(11 + s)) for s in lengths]
    for a, b in zip(reference.forward(single), target.forward(single), strict=True):
        assert worst(a, b, [0]) < 2e-5


@pytest.mark.parametrize("family", ["mistral-sliding", "phi3-partial-rotary-sliding", "starcoder2"])
def test_classes_with_one_mask_have_the_window_in_every_layer(family: str) -> None:
    """They ignore the types of layers in the config."""
    model = tiny(family, layer_types=["full_attention"] * 4)
    target = make_target(model)
    assert target.path == "cpu", target.reason
    (scores,) = target.prefill([(0, prompt(23))])
    with torch.no_grad():
        expected = model(torch.tensor([prompt(23)])).logits[0, -1]
    assert difference(row_of(scores, 0), expected) < 2e-5


#: Config fields that change what a model computes, with an alternative value: (family, field, value).
FIELDS = [
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 100.0}),
    ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}),
    ("llama", "rms_norm_eps", 0.1),
    ("llama", "hidden_act", "gelu_pytorch_tanh"),
    ("mistral-sliding", "sliding_window", 6),
    ("qwen2-half-sliding", "sliding_window", 6),
    ("qwen2-half-sliding", "max_window_layers", 3),
    ("qwen2-half-sliding", "use_sliding_window", False),
    ("qwen2-half-sliding", "layer_types", ["sliding_attention", "full_attention"] * 2),
    ("smollm3", "no_rope_layers", [1, 0, 1, 1]),
    ("smollm3", "use_sliding_window", True),
    ("granite", "embedding_multiplier", 1.0),
    ("granite", "residual_multiplier", 1.0),
    ("granite", "logits_scaling", 1.0),
    ("granite", "attention_multiplier", 0.25),
    ("olmo3", "sliding_window", 6),
    ("olmo3", "layer_types", ["full_attention", "sliding_attention"] * 2),
    ("phi3-partial-rotary-sliding", "sliding_window", 6),
    ("phi3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    ("gemma", "hidden_act", "silu"),
    ("gemma2", "query_pre_attn_scalar", 32),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "final_logit_softcapping", None),
    ("gemma2", "sliding_window", 6),
    ("gemma2", "layer_types", ["full_attention", "sliding_attention"] * 2),
    ("gemma3", "query_pre_attn_scalar", 32),
    ("gemma3", "final_logit_softcapping", 5.0),
    ("gemma3", "sliding_window", 6),
    ("gemma3", "layer_types", ["full_attention", "sliding_attention"] * 2),
    ("gemma3", "rope_parameters", GEMMA3_ROPE | {"sliding_attention": GEMMA3_ROPE["full_attention"]}),
    ("gemma3", "rope_parameters", GEMMA3_ROPE | {"full_attention": GEMMA3_ROPE["sliding_attention"]}),
    (
        "gemma3",
        "rope_parameters",
        GEMMA3_ROPE | {"full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}},
    ),
    ("starcoder2", "sliding_window", 6),
    ("starcoder2", "norm_epsilon", 0.1),
    ("gpt2", "activation_function", "silu"),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "layer_norm_epsilon", 0.1),
]


@pytest.mark.parametrize(
    ("family", "field", "value"), FIELDS, ids=[f"{f}-{n}-{i}" for i, (f, n, _) in enumerate(FIELDS)]
)
def test_a_field_of_the_config_counts_on_the_compiled_path_as_in_transformers(
    family: str, field: str, value: object
) -> None:
    """With equal weights, the field clearly changes the logits, and the compiled path changes with them."""
    before, after = tiny(family, norm_spread=2.0), tiny(family, **{field: value})
    after.load_state_dict(before.state_dict())
    text = prompt(40)
    with torch.no_grad():
        first, second = (model(torch.tensor([text])).logits[0, -1] for model in (before, after))
    assert difference(first, second) > 0.01, "no test of this family would see the field"
    target = make_target(after, path="cpu")
    assert difference(row_of(target.prefill([(0, text)])[0], 0), second) < 2e-5


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3", "smollm3"])
@pytest.mark.parametrize("method", ["lookahead", "prompt-lookup"])
def test_text_is_that_of_plain_decoding_on_either_path(family: str, method: str) -> None:
    model = tiny(family)
    target, reference = make_target(model), make_target(model, path="transformers")
    prompts = [prompt(n, n) for n in (3, 12, 40)]
    drafted = assert_same_as_autoregressive(target, prompts, method, 30)
    drafter = Plain()
    for sequence, text in zip(drafted, prompts, strict=True):
        assert sequence.tokens == run(reference, [Request(text, drafter, 30)])[0].tokens


def test_a_long_prompt_in_chunks_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.cpu import target as module

    for family in ("llama", "mistral-sliding"):
        model = tiny(family)
        whole = row_of(make_target(model).prefill([(0, prompt(50))])[0], 0)
        monkeypatch.setattr(module, "PROMPT_CHUNK", 7)
        assert torch.allclose(row_of(make_target(model).prefill([(0, prompt(50))])[0], 0), whole, atol=1e-5)
        monkeypatch.undo()


def test_a_slot_is_used_again_and_grows() -> None:
    model = tiny()
    target = of_capacity(make_target(model), 2)
    target.prefill([(3, prompt(40))])
    target.release(3)
    again = row_of(target.prefill([(3, prompt(9, 5))])[0], 0)
    assert torch.equal(again, row_of(make_target(model).prefill([(0, prompt(9, 5))])[0], 0))


def test_depth_ends_at_the_last_position() -> None:
    target = make_target(tiny(max_position_embeddings=32))
    target.prefill([(0, prompt(30))])
    assert target.depth_limit(0) == 1


def test_the_model_is_not_changed() -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(model.state_dict())
    versions = [p._version for p in model.parameters()]
    target = make_target(model)
    target.prefill([(0, prompt(9))])
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]


def test_a_default_dtype_of_the_caller_changes_nothing() -> None:
    """Modules may compute their rotary frequencies in it, so both paths get the same modules."""
    model = tiny()
    tree = branched(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        fresh = tiny(dtype=torch.float32)
        fresh.load_state_dict(model.state_dict())
        reference, target = make_target(fresh, path="transformers"), make_target(fresh)
        assert target.path == "cpu", target.reason
        first = [one.prefill([(0, prompt(9))])[0] for one in (reference, target)]
        second = [one.forward([(0, tree)])[0] for one in (reference, target)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert worst(*first, [0]) < 2e-5
    assert worst(*second, tree.needs_logits_nodes()) < 2e-5


def test_logits_may_be_written_to() -> None:
    row = row_of(make_target(tiny()).prefill([(0, prompt(9))])[0], 0)
    row[3] = -float("inf")  # as a logits processor does; inference-mode tensors would raise
    assert row[3] == -float("inf")


def test_bf16_is_near_the_transformers_target_and_a_row_does_not_depend_on_the_others() -> None:
    model = tiny(dtype=torch.bfloat16)
    reference, target = make_target(model, path="transformers"), make_target(model)
    assert target.path == "cpu", target.reason
    for one in (reference, target):
        one.prefill([(0, prompt(9))])
    tree = branched(7, 31)
    a, b = reference.forward([(0, tree)])[0], target.forward([(0, tree)])[0]
    spread = float(row_of(a, 0).float().std())
    assert worst(a, b, tree.needs_logits_nodes()) < 0.25 * spread
    alone = target.forward([(0, TokenTree(tree.tokens[0]))])[0]
    assert torch.equal(row_of(alone, 0), row_of(b, 0))


@pytest.mark.parametrize(
    ("build", "path", "words"),
    [
        (lambda: tiny(hidden_act="gelu"), "transformers", "silu, swish, gelu_new"),
        (
            lambda: tiny(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            ),
            "transformers",
            "rotary positions of type 'dynamic' change with the sequence length",
        ),
        (lambda: tiny().double(), "transformers", "the model is torch.float64"),
        # With dropout, two passes over the same tokens differ, so no tree can be compared.
        (
            lambda: tiny(attention_dropout=0.1).train(),
            "plain",
            "scores a token tree differently from causal passes",
        ),
        (lambda: tiny("gpt2").train(), "plain", "scores a token tree differently from causal passes"),
        (lambda: tiny_model("gpt_neox"), "transformers", "GPTNeoXForCausalLM is not an architecture"),
    ],
    ids=["gelu", "dynamic-rope", "float64", "dropout", "dropout-in-a-module", "another-class"],
)
def test_what_does_not_apply_falls_back_and_says_why(build: object, path: str, words: str) -> None:
    model = build()  # type: ignore[operator]
    target = make_target(model)
    assert target.path == path, target.reason
    assert words in target.reason
    with pytest.raises(SettingsError, match=f"the cpu path is not available.*{re.escape(words)}"):
        make_target(model, path="cpu")


def test_an_adapter_in_place_of_a_linear_is_not_passed_by() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = tiny()
    old = model.model.layers[0].self_attn.q_proj
    new = Adapted(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[0].self_attn.q_proj = new
    target = make_target(model)
    assert target.path == "transformers"
    assert "Adapted" in target.reason


def test_a_wrong_spec_is_caught_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "LlamaForCausalLM", REGISTRY["LlamaForCausalLM"])
    register("LlamaForCausalLM", Spec(rotates=lambda config, layer: layer != 1))
    target = make_target(tiny())
    assert target.path == "transformers"
    assert "differ" in target.reason


def test_a_spec_of_another_structure_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "LlamaForCausalLM", Spec(norm="model.last_norm"))
    target = make_target(tiny())
    assert target.path == "transformers"
    assert "LlamaForCausalLM does not have the structure that the compiled path supports (" in target.reason
    assert "last_norm" in target.reason


@pytest.mark.parametrize("shape", [(1, 16, 16), None], ids=["fewer heads", "no keys"])
def test_layers_with_keys_of_different_shapes_are_not_compiled(shape: tuple[int, int, int] | None) -> None:
    model = tiny()
    facts = ModelFacts(model)
    spec_of(model, facts)
    facts.shapes[-1] = shape
    with pytest.raises(Unsupported, match="the compiled path needs the same key shape in all layers"):
        spec_of(model, facts)


FAULTS = {
    "granite": {"residual_multiplier": ""},
    "olmo2": {"query_norm": ""},
    "olmo3": {"query_norm": ""},
    "phi3": {"rotates": lambda config, layer: layer != 1},
    "gemma": {"norm_offset": 0.0},
    "gemma2": {"attention_cap": ""},
    "gemma3": {"feed_forward_post_norm": ""},
    "starcoder2": {"norm_offset": 1.0},
    "gpt2": {"positions": ""},
}


@pytest.mark.parametrize("family", FAULTS)
def test_a_family_is_refused_where_one_part_of_its_spec_is_wrong(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    name = type(model).__name__
    monkeypatch.setitem(REGISTRY, name, dataclasses.replace(REGISTRY[name], **FAULTS[family]))
    target = make_target(model)
    assert target.path == "transformers"
    assert "differ" in target.reason


@pytest.mark.parametrize(("family", "window"), [("olmo3", 0), ("starcoder2", 6)])
def test_a_family_is_refused_where_its_windows_are_wrong(
    family: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_families, "layer_window", lambda config, layer: window)
    target = make_target(tiny(family))
    assert target.path == "transformers"
    assert "differ" in target.reason


@pytest.mark.parametrize("family", FAULTS)
def test_text_is_that_of_transformers_generate(family: str) -> None:
    model = tiny(family)
    model.generation_config.eos_token_id = None
    prompts = [prompt(n, n) for n in (12, 40)]
    drafted = assert_same_as_autoregressive(make_target(model, path="cpu"), prompts, "lookahead", 30)
    for sequence, text in zip(drafted, prompts, strict=True):
        ids = torch.tensor([text])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert sequence.tokens == found[0, len(text) :].tolist()


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(SettingsError, match="path must be one of 'auto', 'cpu'"):
        make_target(tiny(), path="fast")


def test_where_numba_cannot_compile_transformers_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.cpu import compiled_model

    def refused(name: str) -> int:
        raise RuntimeError("LLVM knows no such processor\nmore")

    monkeypatch.setattr(compiled_model, "address", refused)
    target = make_target(tiny())
    assert target.path == "transformers"
    assert "numba cannot compile" in target.reason
    assert "no such processor" in target.reason
    assert "more" not in target.reason
    with pytest.raises(SettingsError, match="no such processor"):
        make_target(tiny(), path="cpu")


#: Prints the path that a model takes, and compares adaptive's trees with the recorded ones. There, an overflow is an
#: error; in compiled code integers would wrap around silently.
WITHOUT_COMPILER = """
import gzip, json, warnings
import lookahead
import test_adaptive_golden as golden
from lookahead.drafters.adaptive.tree_growth import grow_tree
from lookahead.hf.testing import tiny_model
llm = lookahead.LLM(tiny_model("llama", seed=1))
target = llm.target()
print(target.path, target.reason)
print(len(llm.generate([3, 1, 4], max_new_tokens=4, drafter="lookahead").tokens))
assert grow_tree._run is grow_tree.function
warnings.simplefilter("error", RuntimeWarning)
recorded = json.loads(gzip.decompress(golden.GOLDEN.read_bytes()))
for mode in ("greedy", "sampled"):
    golden.compare(*golden.decode("all sources", mode == "sampled"), recorded[f"all sources, {mode}"])
"""


def test_without_numbas_compiler_transformers_serves_and_adaptive_drafts_the_same() -> None:
    folders = (Path(lookahead.__file__).parents[1], Path(__file__).parent)
    environment = os.environ | {
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    path, tokens = done.stdout.splitlines()
    assert path.startswith("transformers ")
    assert "NUMBA_DISABLE_JIT" in path
    assert tokens == "4"


def test_a_slot_that_grows_moves_no_other() -> None:
    target = make_target(tiny())
    assert isinstance(target, CpuTarget)
    target.prefill([(0, prompt(9)), (1, prompt(9))])
    here, there = (target.cache.layout(slot)[0] for slot in (0, 1))
    target.cache.make_room(0, 1000)
    assert target.cache.layout(0)[0] != here
    assert target.cache.layout(1)[0] == there
    first, second = target.forward([(0, branched(3, 15)), (1, branched(3, 15))])
    assert torch.equal(row_of(first, 0), row_of(second, 0))  # its contents moved with it


def test_memory_errors_say_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tiny())
    assert isinstance(target, CpuTarget)
    target.prefill([(0, prompt(9))])

    def full(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(target.compiled, "run", full)
    with pytest.raises(OutOfMemory, match="13 rows"):
        target.forward([(0, branched(3, 15))])


def test_a_llama_made_from_nothing_but_a_config_takes_the_compiled_path() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    assert make_target(LlamaForCausalLM(config)).path == "cpu"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_found_after_the_best_tokens_were_asked_for(sign):
    """A NaN from the processor has its sign bit set: as an integer, the smallest number."""
    memory = np.zeros(2 * 4 * (64 + 2 + 8 + 8), np.uint8)
    compiled = SimpleNamespace(
        logits_strides=(4 * 64, 4 * 2, 4 * 8, 4 * 8),
        vocabulary=64,
        fmt=SimpleNamespace(stored=FORMATS["packed", "float32"].stored),
    )
    numbers = memory.view(np.float32)
    numbers[:128] = np.arange(128)
    numbers[70] = np.copysign(np.float32("nan"), sign)  # row 1
    numbers[128:132] = 31, 63, np.nan, 127  # peaks
    ids, odds = top_of_rows(numbers[:128].reshape(2, 64), 8, numbers[128:132].reshape(2, 2))
    memory[4 * 132 : 4 * 148].view(np.int32)[:] = ids.reshape(-1)
    numbers[148:] = odds.reshape(-1)
    arrays = PassArrays.of(memory, compiled, 2)
    logits = Logits(arrays.logits, arrays.peaks, top=(arrays.ids, arrays.odds))
    assert np.array_equal(logits.top(8)[0], ids)
    assert logits.argmax(0) == 63
    assert logits.argmax(1) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_tokens_of_a_pass_are_those_of_its_logits(dtype):
    target = make_target(tiny_model().to(dtype), path="cpu")
    target.prefill([(0, [1, 2, 3]), (1, [4, 5])])
    scores = target.forward([(0, branched(5, 15)), (1, TokenTree(7))])
    logits = scores[0]._logits
    ids, odds = logits.top(24)
    expected_ids, expected_odds = top_of_rows(logits.rows, 24)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(odds, expected_odds)
    assert [logits.argmax(r) for r in range(len(ids))] == [
        int(logits.row(r).argmax()) for r in range(len(ids))
    ]


@pytest.mark.parametrize("path", ["cpu", "transformers"])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma"])
def test_a_window_in_the_config_of_a_class_without_windows_has_no_effect(family: str, path: str) -> None:
    model = tiny(family, sliding_window=5, layer_types=None)
    ids = prompt(40)
    (scores,) = make_target(model, path=path).prefill([(0, ids)])
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert torch.allclose(row_of(scores, 0).float(), expected, atol=1e-3)


def test_a_released_slot_gives_back_the_memory_by_which_it_has_grown() -> None:
    target = make_target(tiny())
    assert isinstance(target, CpuTarget)
    target.prefill([(0, prompt(9))])
    first = target.cache.storage[0].nbytes
    target.cache.make_room(0, 1000)
    assert target.cache.storage[0].nbytes > first
    target.release(0)
    assert target.cache.storage[0].nbytes == first


def test_memory_that_the_system_refuses_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **named: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(formats.mmap, "mmap", refused)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        formats.ArrayMemory(100)

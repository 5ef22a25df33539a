"""Models that change after compilation: what the next call detects, and what needs ``refresh``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import lookahead
from lookahead.hf.paths import make_target
from lookahead.hf.testing import tiny_model
from rows import row_of
from test_cpu_target import prompt, tiny


def assert_as_the_model_itself(model: torch.nn.Module) -> None:
    text = torch.tensor([prompt(40)])
    with torch.no_grad():
        expected = model(input_ids=text).logits[0, -1]
    found = row_of(make_target(model).prefill([(0, text[0].tolist())])[0], 0)
    assert torch.allclose(found, expected, atol=1e-4), make_target(model).path


def _halved(module: torch.nn.Module, arguments: object, output: object) -> object:
    return output * 0.5 if torch.is_tensor(output) else (output[0] * 0.5, *output[1:])  # type: ignore[index]


def _patch(module: torch.nn.Module) -> None:
    plain = module.forward
    module.forward = lambda *args, **keywords: plain(*args, **keywords) * 0.5


def _exchange(module: torch.nn.Module) -> None:
    module.register_forward_hook(_halved).remove()
    module.register_forward_hook(lambda *arguments: _halved(*arguments))


def _write(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.5)


def _replace(model: torch.nn.Module) -> None:
    old = model.model.layers[1].mlp.down_proj.weight
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(old.detach() * 0.5)


def _scale(model: torch.nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 0.3


SEEN: dict[str, tuple[Callable[[torch.nn.Module], object], str]] = {
    "a weight is written": (_write, "cpu"),
    "a weight is replaced": (_replace, "cpu"),
    "a weight's data is replaced": (
        lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 0.7),
        "cpu",
    ),
    "rotary frequencies are written": (lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "cpu"),
    "one layer's attention scale": (_scale, "cpu"),
    "an epsilon": (lambda m: setattr(m.model.norm, "variance_epsilon", 0.5), "cpu"),
    "a hook on a decoder layer": (lambda m: m.model.layers[1].register_forward_hook(_halved), "transformers"),
    "a hook on a norm": (lambda m: m.model.norm.register_forward_hook(_halved), "transformers"),
    "a hook on attention": (
        lambda m: m.model.layers[0].self_attn.register_forward_hook(_halved),
        "transformers",
    ),
    "a hook exchanged for another": (lambda m: _exchange(m.model.layers[3]), "transformers"),
    "a patched forward": (lambda m: _patch(m.model.layers[1].mlp), "transformers"),
}


@pytest.mark.parametrize("change", SEEN)
def test_a_change_is_seen_at_the_next_call(change: str) -> None:
    model = tiny("llama", max_position_embeddings=64)
    assert make_target(model).path == "cpu"
    apply, path = SEEN[change]
    apply(model)
    assert make_target(model).path == path
    assert_as_the_model_itself(model)


def test_a_sliding_window_is_seen() -> None:
    model = tiny("mistral-sliding")
    before = row_of(make_target(model).prefill([(0, prompt(40))])[0], 0)
    model.config.sliding_window = 17
    assert make_target(model).path == "cpu"
    assert_as_the_model_itself(model)
    assert not torch.allclose(row_of(make_target(model).prefill([(0, prompt(40))])[0], 0), before, atol=1e-3)


def test_hooks_for_every_module_are_not_passed_by() -> None:
    model = tiny()
    assert make_target(model).path == "cpu"
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        assert make_target(model).path == "transformers"
    finally:
        handle.remove()
    assert make_target(model).path == "cpu"


def test_an_llm_names_the_path_of_its_next_call() -> None:
    llm = lookahead.LLM(tiny())
    assert llm.path == "cpu"
    handle = llm.model.module.model.layers[1].register_forward_hook(_halved)
    assert llm.path == "transformers"
    handle.remove()
    assert llm.path == "cpu"


def test_a_model_that_is_left_alone_is_compiled_once() -> None:
    model = tiny()
    first = make_target(model).compiled
    model.generate(torch.tensor([prompt(5)]), max_new_tokens=3, do_sample=False)
    assert make_target(model).compiled is first


@pytest.fixture
def merged() -> torch.nn.Module:
    """A model after an adapter merge, which writes to ``weight.data``."""
    model = tiny_model("llama", seed=3, initializer_range=0.05)
    assert make_target(model).path == "cpu"
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    return model


def test_weights_written_behind_torchs_back_need_refresh(merged: torch.nn.Module) -> None:
    text = [5, 6, 7]
    stale = row_of(make_target(merged).prefill([(0, text)])[0], 0)
    lookahead.refresh(merged)
    fresh = row_of(make_target(merged).prefill([(0, text)])[0], 0)
    with torch.no_grad():
        expected = merged(input_ids=torch.tensor([text])).logits[0, -1]
    assert torch.allclose(fresh, expected, atol=1e-4)
    assert not torch.allclose(stale, expected, atol=1e-4)


def test_refresh_of_an_llm(merged: torch.nn.Module) -> None:
    llm = lookahead.LLM(merged)
    lookahead.refresh(llm)
    ids = torch.tensor([[5, 6, 7]])
    expected = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert llm.generate([5, 6, 7], max_new_tokens=20).tokens == expected[0, 3:].tolist()


def test_refresh_of_an_llm_empties_its_prefix_cache() -> None:
    model = tiny("llama")
    llm = lookahead.LLM(model, prefix_cache=2)
    before = llm.generate([5, 6, 7], max_new_tokens=20).tokens
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weight.data += 0.5
    lookahead.refresh(llm)
    after = llm.generate([5, 6, 7], max_new_tokens=20).tokens
    assert after == lookahead.LLM(model).generate([5, 6, 7], max_new_tokens=20).tokens
    assert after != before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_compiled_model_that_nobody_holds_is_freed(family: str) -> None:
    """The compiled copy is cached with the model and must not keep the model alive."""
    model = tiny(family)
    target = make_target(model)
    assert target.path == "cpu", target.reason
    target.prefill([(0, prompt(5))])
    gone = weakref.ref(model)
    del model, target
    gc.collect()
    assert gone() is None

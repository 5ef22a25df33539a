"""Tree attention inside real transformers models: same completion, no mask, every layer checked."""

import pytest
import torch

from families import tiny_model
from lookahead.core import SettingsError
from lookahead.hf.attention import get
from lookahead.hf.attention_hook import NAME, TreeAttention
from lookahead.hf.cuda_graphs import CudaGraphTarget
from lookahead.hf.paths import probe
from lookahead.testing import assert_same_as_autoregressive

PROMPTS = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2", "gpt-oss", "deepseek-v3"])
def test_same_text_and_no_mask(family, monkeypatch):
    import lookahead.hf.target as module

    model = tiny_model(family, initializer_range=0.1)
    before = model.config._attn_implementation
    facts = probe(model).facts
    attention, calls = TreeAttention(model, get("sdpa")), []
    honest = attention.attend

    def count(*given, **named):
        calls.append(1)
        return honest(*given, **named)

    attention.attend = count
    monkeypatch.setattr(module, "attention_masks", None)  # building a mask now fails
    target = CudaGraphTarget(model, facts, attention)
    generations = assert_same_as_autoregressive(target, PROMPTS, "5,4,7", 40)
    assert sum(g.stats.accepted for g in generations) > 0
    assert len(calls) >= 2 * generations[0].stats.steps  # two layers
    assert model.config._attn_implementation == before


def test_a_model_that_ignores_attention_functions_is_refused():
    model = tiny_model("stablelm")
    before = model.config._attn_implementation
    with pytest.raises(SettingsError, match="does not accept attention functions"):
        TreeAttention(model, get())
    assert model.config._attn_implementation == before


def test_a_model_that_attends_in_chunks_is_refused():
    model = tiny_model("llama")
    model.config.attention_chunk_size = 8
    with pytest.raises(SettingsError, match="LlamaForCausalLM attends in chunks, which the tree attention"):
        TreeAttention(model, get())


def test_a_model_that_does_not_call_it_in_every_layer_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(model.config, "num_hidden_layers", 3)
    monkeypatch.setattr(model.config, "layer_types", None, raising=False)
    with pytest.raises(SettingsError, match="called the tree attention in 2 of its 3 layers"):
        TreeAttention(model, get())
    assert model.config._attn_implementation != NAME


def test_masks_and_passes_of_others_are_refused():
    model = tiny_model("llama")
    attention = TreeAttention(model, get("reference"))
    one = torch.ones(1, 1, dtype=torch.int32)
    rows = 0 * one[0], one[None], 0 * one
    with attention.installed(model, *rows):
        model(input_ids=one.long())
        with pytest.raises(SettingsError, match="accepts no mask"):
            model(input_ids=one.long(), attention_mask=torch.zeros(1, 1, 1, 1))
    model.set_attn_implementation(NAME)
    with pytest.raises(SettingsError, match="only serves lookahead"):
        model(input_ids=one.long())

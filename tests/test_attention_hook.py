"""Tree attention inside real transformers models: the same text, no mask, every layer counted."""

import pytest
import torch

from lookahead.core import SettingsError
from lookahead.targets.attention_hook import NAME, causal, enable, enabled
from lookahead.targets.factory import make_target, probe
from lookahead.testing import assert_same_as_autoregressive, tiny_model

PROMPTS = [[5, 9, 14, 5, 9, 14, 5, 9], [7, 8, 9, 10, 7, 8, 9]]


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2", "gpt-oss", "deepseek-v3"])
def test_same_text_and_no_mask(family, monkeypatch):
    import lookahead.targets.transformers as module

    model = tiny_model(family, initializer_range=0.1)
    plain_probe = probe(model).difference
    attention = enable(model, "sdpa")
    assert enabled(model) is attention
    found = probe(model)
    assert found.mode == "tree", found.reason
    assert found.difference < max(1e-3, 4 * plain_probe)
    monkeypatch.setattr(module, "attention_masks", None)  # whoever makes a mask now fails
    attention.calls = 0
    target = make_target(model, path="transformers")
    generations = assert_same_as_autoregressive(target, PROMPTS, "lookahead", (5, 4, 7), 40)
    assert sum(g.stats.accepted for g in generations) > 0
    assert attention.calls >= 2 * generations[0].stats.steps  # two layers


def test_a_model_that_ignores_attention_functions_is_refused():
    model = tiny_model("bloom")
    before = model.config._attn_implementation
    with pytest.raises(SettingsError, match="does not take attention functions"):
        enable(model)
    assert model.config._attn_implementation == before
    assert enabled(model) is None


def test_a_model_that_does_not_call_it_in_every_layer_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(model.config, "num_hidden_layers", 3)
    monkeypatch.setattr(model.config, "layer_types", None, raising=False)
    with pytest.raises(SettingsError, match="called the tree attention in 2 of its 3 layers"):
        enable(model)
    assert model.config._attn_implementation != NAME


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0, "window": 300}, {"sinks": True}])
def test_prefill_is_causal_attention(options):
    torch.manual_seed(0)
    query = torch.randn(1, 4, 300, 16).double()
    key, value = torch.randn(2, 1, 2, 300, 16).double()
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    whole = causal(query, key, value, **options)
    one_by_one = [
        causal(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1], **options)
        for i in range(300)
    ]
    assert (whole - torch.cat(one_by_one, dim=2)).abs().max() < 1e-5


def test_a_mask_is_refused():
    model = tiny_model("llama")
    enable(model, "reference")
    with pytest.raises(SettingsError, match="takes no mask"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), attention_mask=torch.zeros(1, 1, 3, 3))

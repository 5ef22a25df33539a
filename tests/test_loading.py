"""What ``load`` says about a model that it has read and cannot use, on tiny models in memory."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead
from lookahead.core import OutOfMemory, SettingsError
from lookahead.hf.load import Checkpoint, check_causal
from lookahead.hf.model import HFModel
from lookahead.hf.testing import tiny_model
from lookahead.loading import _quantized
from lookahead.model import Probe
from lookahead.options import LoadOptions


def refused(words, call, *arguments):
    """Expect an error of one line with these words."""
    with pytest.raises(SettingsError, match=re.escape(words)) as error:
        call(*arguments)
    assert "\n" not in str(error.value)


def test_short_names_of_dtypes_are_accepted():
    assert lookahead.load(lookahead.BUNDLED, dtype="bf16").dtype == "bfloat16"
    assert lookahead.load(lookahead.BUNDLED, dtype="fp32").dtype == "float32"


def test_packed_weights_need_a_class_of_the_compiled_path():
    refused(
        "weights='q8_0' needs a model that the compiled CPU path supports, but GPTNeoXForCausalLM is not one: "
        "GPTNeoXForCausalLM is not an architecture of the compiled path",
        _quantized,
        HFModel(tiny_model("gpt_neox")),
        "q8_0",
    )


def test_packed_weights_need_token_trees(monkeypatch):
    monkeypatch.setattr(HFModel, "probe", Probe("plain", "", None, None))
    refused(
        "weights='q4_0' needs a model that the compiled CPU path supports, but LlamaForCausalLM is not one: "
        "it cannot evaluate token trees",
        _quantized,
        HFModel(tiny_model("llama")),
        "q4_0",
    )


def test_a_causal_model_passes_its_check():
    check_causal(tiny_model("llama"), "a model")


def test_a_model_that_needs_other_inputs_is_refused(monkeypatch):
    def forward(**inputs):
        raise ValueError("pixel_values must be given\nand more")

    model = tiny_model("llama")
    monkeypatch.setattr(model, "forward", forward)
    refused(
        "a model cannot evaluate plain token ids: pixel_values must be given", check_causal, model, "a model"
    )


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [
        ("float32", "check its weights"),
        ("float16", "float16 overflows in some models; load it with dtype='bfloat16'"),
    ],
)
def test_logits_that_are_nan_are_refused(dtype, cure):
    model = tiny_model("llama").to(getattr(torch, dtype))
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    refused(
        f"a model's logits must not be NaN, but those of a model are NaN in {dtype} for every token tried; {cure}",
        check_causal,
        model,
        "a model",
    )


def test_weights_that_do_not_fit_are_said_in_one_line(tmp_path, monkeypatch):
    def full(*arguments, **keywords):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    tiny_model("gpt_neox").save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path), tmp_path, None, LoadOptions())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(
        OutOfMemory, match=f"^{tmp_path} did not fit in memory; use a smaller dtype or model$"
    ):
        checkpoint.read_model("auto", "cpu")


@pytest.mark.parametrize("name", ["trust_remote_code", "local_files_only", "exact"])
def test_a_switch_is_a_bool_and_not_a_text(name):
    """The text "false" is true, so it would allow what it forbids."""
    with pytest.raises(SettingsError, match=f"^{name} must be true or false, got 'false'$"):
        lookahead.load("tiny", **{name: "false"})

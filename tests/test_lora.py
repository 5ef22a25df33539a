"""PEFT adapters loaded, merged, unmerged, switched and removed: output equals plain generate."""

import importlib
from importlib.util import find_spec

import pytest
import torch

import lookahead
from lookahead.core import SettingsError
from lookahead.hf.paths import make_target
from lookahead.hf.testing import tiny_model

pytestmark = [
    # Compiled passes do not support unmerged adapters.
    pytest.mark.filterwarnings("ignore:lookahead.generate runs this model on the slower"),
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]
PROMPT = torch.tensor([[5, 6, 7, 5, 6, 9, 11]])
GREEDY = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 24, "do_sample": False}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8}
#: Strong enough that every adapter changes the output.
SETTINGS = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.fixture(scope="module")
def peft():
    """The library, imported only where used because the import takes a second per process."""
    return importlib.import_module("peft")


def adapter(peft):
    return peft.LoraConfig(**SETTINGS, init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.fixture
def model():
    made = tiny_model("llama", seed=1, initializer_range=0.1)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture
def folders(peft, tmp_path):
    """Two adapters on disk."""
    found = []
    for seed, name in enumerate(("first", "second")):
        base = tiny_model("llama", seed=1, initializer_range=0.1)
        torch.manual_seed(seed)
        peft.get_peft_model(base, adapter(peft)).save_pretrained(tmp_path / name)
        found.append(str(tmp_path / name))
    return found


def text(model):
    """Check sampled and greedy output against plain generate; return the greedy sequence."""
    for options in (SAMPLED, GREEDY):
        torch.manual_seed(0)
        plain = model.generate(input_ids=PROMPT, **options)
        torch.manual_seed(0)
        ours = model.generate(input_ids=PROMPT, custom_generate=lookahead.generate, **options)
        assert ours.tolist() == plain.tolist()
    return tuple(plain[0].tolist())


def test_an_adapter_through_its_life(peft, model, folders):
    base = text(model)
    assert make_target(model).path == "cpu"
    adapted = peft.PeftModel.from_pretrained(model, folders[0]).eval()
    first = text(adapted)
    assert make_target(model).path == "transformers"
    adapted.load_adapter(folders[1], "second")
    assert text(adapted) == first
    adapted.set_adapter("second")
    second = text(adapted)
    assert len({base, first, second}) == 3
    for _ in range(2):
        adapted.merge_adapter()
        assert text(adapted) == second
        adapted.unmerge_adapter()
        assert text(adapted) == second
    adapted.set_adapter("default")
    assert text(adapted) == first
    with adapted.disable_adapter():
        assert text(adapted) == base
    assert text(adapted) == first
    merged = adapted.merge_and_unload()
    assert text(merged) == first
    assert make_target(merged).path == "cpu"


def test_an_adapter_that_is_taken_off(peft, model, folders):
    base = text(model)
    adapted = peft.PeftModel.from_pretrained(model, folders[0]).eval()
    assert text(adapted) != base
    assert text(adapted.unload()) == base
    assert make_target(model).path == "cpu"


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # caused by how transformers calls peft
def test_adapters_that_transformers_loads(model, folders):
    base = text(model)
    model.load_adapter(folders[0], "first")
    model.load_adapter(folders[1], "second")
    model.eval()
    texts = set()
    for name in ("first", "second"):
        model.set_adapter(name)
        texts.add(text(model))
    assert len(texts | {base}) == 3
    model.disable_adapters()
    assert text(model) == base
    model.enable_adapters()
    assert text(model) in texts


def test_a_loaded_model_with_an_adapter(peft, model, folders):
    adapted = peft.PeftModel.from_pretrained(model, folders[0]).eval()
    llm = lookahead.LLM(model)
    for method in ("adaptive", "lookahead", "autoregressive"):
        tokens = llm.generate(PROMPT[0].tolist(), max_new_tokens=24, drafter=method).tokens
        assert tuple(PROMPT[0].tolist() + tokens) == text(adapted)


def test_a_merge_between_two_calls_needs_refresh(peft, model, folders):
    """merge_and_unload writes to ``weight.data``, which is undetectable if no call ran with the adapter."""
    base = text(model)
    merged = peft.PeftModel.from_pretrained(model, folders[0]).eval().merge_and_unload()
    assert merged is model
    lookahead.refresh(model)
    assert text(model) != base


def test_virtual_tokens_are_refused(peft, model):
    """PEFT adds them in a method that transformers' own loop calls."""
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(model, settings).eval()
    with pytest.raises(SettingsError, match="virtual tokens"):
        tuned.generate(input_ids=PROMPT, custom_generate=lookahead.generate, **GREEDY)
    with tuned.disable_adapter():
        text(tuned)

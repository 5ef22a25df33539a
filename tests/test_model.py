"""The interface of a model: an ``LLM`` on any implementation, and what is known about a transformers module."""

import gc
import threading
import weakref

import pytest

import lookahead
from lookahead.core import SettingsError
from lookahead.drafters import Plain
from lookahead.hf.model import HFModel
from lookahead.hf.testing import tiny_model
from lookahead.testing import FakeModel


def test_an_llm_needs_no_more_than_the_interface():
    llm = lookahead.LLM(FakeModel(40, eos=[7]))
    assert (llm.dtype, llm.vocabulary, llm.eos, llm.path) == ("float32", 40, {7}, "fake")
    options = {"max_new_tokens": 120, "ignore_eos": True}
    plain, drafted = (llm.generate([1, 2, 3], drafter=each, **options) for each in (Plain(), "7,5,7"))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.steps < plain.stats.steps
    assert "".join(llm.stream([1, 2, 3], **options)) == ""  # no tokenizer
    with pytest.raises(SettingsError, match="path 'cpu' is not available for FakeModel"):
        llm.target("cpu")


def test_a_model_that_cannot_draft_is_decoded_plainly():
    llm = lookahead.LLM(FakeModel(40, drafts=False))
    result = llm.generate([1, 2, 3], drafter="7,5,7", max_new_tokens=20)
    assert set(result.stats.rows_per_step) == {1}


def test_what_is_no_model_is_refused():
    with pytest.raises(SettingsError, match="a transformers causal language model is needed, got str"):
        lookahead.LLM("a model")


def held(model):
    with model.lock():
        pass


def test_models_of_one_module_share_its_lock_and_results_which_end_with_it():
    module = tiny_model()
    one, other = HFModel(module), HFModel(module)
    one.state["curves"] = {"a": 1}
    assert other.state is one.state
    assert one.probe is other.probe
    with one.lock():
        waiting = threading.Thread(target=held, args=(other,))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join()
    one.forget()
    assert other.state == {}
    ended = weakref.ref(module)
    del module, one, other, waiting
    gc.collect()
    assert ended() is None


def test_the_version_shows_a_change():
    model = HFModel(tiny_model())
    before = model.version
    assert model.version == before
    model.module.get_input_embeddings().weight.data.mul_(1)
    with model.lock():
        assert model.version == before  # computed once in the block, and torch does not count writes to .data
    model.forget()
    assert model.version != before


def test_checksums_depend_on_every_weight_or_on_samples():
    model = HFModel(tiny_model())
    whole, sampled = model.checksum(), model.checksum(16)
    weight = model.module.get_input_embeddings().weight.data
    weight[1, 1] += 1
    assert model.checksum() != whole
    assert model.checksum(16) == sampled


def test_sampling_that_a_generation_config_suggests():
    module = tiny_model()
    assert HFModel(module).sampling == {}
    module.generation_config.update(do_sample=True, top_p=0.9)
    assert HFModel(module).sampling == {"temperature": 1.0, "top_p": 0.9}

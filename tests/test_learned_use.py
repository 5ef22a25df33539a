"""Learned heads and tables are used on every path and by every integration, and change no text."""

import httpx
import pytest
import torch

import lookahead
from families import tiny_model
from learned import save_table, with_free_head
from lookahead.core import Request
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of, table_file, tokenizer_key
from lookahead.drafters.prepare import Preparation
from lookahead.hf import attention
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.cuda_graphs import CudaGraphTarget
from lookahead.hf.model import HFModel
from lookahead.hf.paths import make_target, probe
from lookahead.testing import run
from serving import serving
from toy import VOCABULARY, tokenizer

PROMPTS = [[5, 9, 14, 5, 9], [7, 8, 9]]
NEW = 40
#: Nothing but the head, or the table, proposes tokens.
WITH_HEAD = Adaptive(rows=8, sources=())
WITH_TABLE = Adaptive(rows=4, sources=("base",))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def with_head(tmp_path, monkeypatch):
    return with_free_head(tmp_path / "head", monkeypatch, 96, rows=8, sources=())


def target_of(path):
    """(model, target); captured passes run uncaptured on a CPU."""
    model = tiny_model("llama", initializer_range=0.1)
    if path == "cuda-graph":
        model = model.to("cuda") if torch.cuda.is_available() else model
        own = TreeAttention(model, attention.get("auto", model.device))
        return model, CudaGraphTarget(model, probe(model).facts, own, 64)
    return model, make_target(model, path=path)


def decoded(model, target, drafter):
    prepare = Preparation(HFModel(model), True, lambda: target)
    sequences = run(target, [Request(prompt, prepare(drafter, target), NEW) for prompt in PROMPTS])
    return [sequence.result.checked() for sequence in sequences]


@pytest.mark.parametrize("path", ["cpu", "transformers", "cuda-graph"])
def test_rows_of_a_head_change_no_text(path, with_head):
    model, target = target_of(path)
    plain = decoded(model, target, Plain())
    for result, expected in zip(decoded(model, target, with_head), plain, strict=True):
        assert result.tokens == expected.tokens
        assert len(result.tokens) == NEW
        assert result.stats.path == path
        assert result.stats.drafted > result.stats.steps
        assert result.stats.drafter["head_calls"] > 0
    # All of these rows were the head's.
    assert [result.stats.drafted for result in decoded(model, target, WITH_HEAD)] == [0, 0]


@pytest.mark.parametrize("path", ["transformers", "cuda-graph"])
def test_broken_verification_of_the_rows_of_a_head_is_noticed(path, with_head, accept_a_wrong_node):
    model, target = target_of(path)
    plain = [result.tokens for result in decoded(model, target, Plain())]
    assert [result.tokens for result in decoded(model, target, with_head)] != plain


def generated(model, **drafting):
    """(tokens, statistics) of ``model.generate``, as transformers decodes without drafting options."""
    ids, stats = torch.tensor([[5, 9, 14, 5, 9], [7, 8, 9, 7, 8]]), []
    if drafting:
        drafting |= {"custom_generate": lookahead.generate, "stats": stats}
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0}
    torch.manual_seed(7)
    return model.generate(ids, **options, **drafting).tolist(), stats


def tiny(family="llama", **config):
    """A model without end tokens."""
    model = tiny_model(family, initializer_range=0.1, **config)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("family", "path"), [("llama", "cpu"), ("gpt-neox", "transformers")])
def test_rows_of_a_head_change_no_text_of_custom_generate(family, path, sampled, with_head):
    model = tiny(family)
    model.generation_config.do_sample = sampled
    plain, _ = generated(model)
    tokens, stats = generated(model, drafter=with_head)
    assert tokens == plain
    for each in stats:
        assert each.path == path
        assert each.drafted > each.steps
        assert each.drafter["head_calls"] > 0
    _, stats = generated(model, drafter=WITH_HEAD)
    assert [each.drafted for each in stats] == [0, 0]


def test_custom_generate_finds_a_learned_table():
    model, own = tiny(vocab_size=VOCABULARY), tokenizer()
    plain, _ = generated(model)
    _, without = generated(model, drafter=WITH_TABLE, tokenizer=own)
    save_table(table_file(tokenizer_key(own)), VOCABULARY, plain)
    tokens, stats = generated(model, drafter=WITH_TABLE, tokenizer=own)
    assert tokens == plain
    assert [each.drafted for each in without] == [0, 0]
    assert all(each.drafter["accepted_by_base"] > NEW / 2 for each in stats)


def test_the_server_finds_a_learned_table():
    llm = lookahead.LLM(tiny(vocab_size=VOCABULARY), tokenizer())
    prompt = "def add("
    plain = llm.generate(prompt, max_new_tokens=NEW, drafter=Plain())
    save_table(table_file(key_of(llm.model)), VOCABULARY, [llm.encode(prompt) + plain.tokens])
    with serving(llm, drafter=str(WITH_TABLE)) as served:
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "lookahead": {"stats": True}}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["text"] == plain.text
    assert choice["lookahead"]["stats"]["num_accepted_draft_tokens"] > NEW / 2

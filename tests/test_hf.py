"""The drop-in returns what model.generate returns and refuses by name what it does not support."""

import functools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import lookahead
from families import tiny_model
from learned import with_free_head
from lookahead import Adaptive, Lookahead, NGramPool
from lookahead.core import SettingsError
from lookahead.hf import batch_sequence
from lookahead.hf.custom_generate import generate
from lookahead.hf.paths import make_target
from lookahead.hf.sampling import GeneratorNoise, RowNoise


@functools.cache
def model_of(family="llama", init=0.1):
    return tiny_model(family, initializer_range=init, eos_token_id=[2, 5, 9])


def prompts(batch=2, padded=True):
    half = torch.randint(10, 96, (batch, 7), generator=torch.Generator().manual_seed(2))
    ids = torch.cat([half, half], dim=1)
    mask = torch.ones_like(ids)
    if padded and batch > 1:
        ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(inputs=None, model=None, drafted=None, **options):
    """(plain, ours); checks that the generator states agree."""
    model = model if model is not None else model_of()
    inputs = inputs if inputs is not None else prompts()
    options.setdefault("max_new_tokens", 48)
    results = []
    ours = {"custom_generate": generate, **(drafted or {"drafter": "5,4,7"})}
    for extra in ({}, ours):
        torch.manual_seed(7)
        made = {key: value() if callable(value) else value for key, value in options.items()}
        results.append((model.generate(**inputs, **made, **extra), torch.random.get_rng_state()))
    (plain, plain_state), (ours, state) = results
    assert torch.equal(plain_state, state), "the generator ended elsewhere"
    return plain, ours


class CountingCriteria(StoppingCriteria):
    """Stops where the last three tokens sum to a multiple of 11, and counts its calls."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        return input_ids[:, -3:].sum(dim=1) % 11 == 0


class NoOddAfterOdd(LogitsProcessor):
    """Path-dependent: scores depend on the true prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        odd = input_ids[:, -1] % 2 == 1
        scores[odd, 1::2] -= 1.5
        return scores


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "cold": {"do_sample": True, "temperature": 0.3},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": {"do_sample": True, "top_p": 0.7, "temperature": 1.3},
    "min-p": {"do_sample": True, "min_p": 0.1},
    "typical": {"do_sample": True, "typical_p": 0.6},
    "repetition": {"repetition_penalty": 1.4},
    "no-repeat": {"no_repeat_ngram_size": 2},
    "encoder-no-repeat": {"encoder_no_repeat_ngram_size": 2},
    "encoder-repetition": {"encoder_repetition_penalty": 1.3},
    "min-new-tokens": {"min_new_tokens": 30},
    "bad-words": {"bad_words_ids": [[11], [12, 13], [50]]},
    "suppress": {"suppress_tokens": [20, 21, 22, 23]},
    "sequence-bias": {"sequence_bias": [[[30], 4.0], [[31, 32], 5.0]]},
    "forced-eos": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (5, 1.2)},
    "eos-list": {"eos_token_id": [3, 17, 40, 41, 42, 43, 44, 45]},
    "one-eos": {"eos_token_id": 33, "pad_token_id": 1},
    "processor": {"logits_processor": lambda: LogitsProcessorList([NoOddAfterOdd()])},
    "processor-sampled": {
        "logits_processor": lambda: LogitsProcessorList([NoOddAfterOdd()]),
        "do_sample": True,
    },
    "criteria": {"stopping_criteria": lambda: StoppingCriteriaList([CountingCriteria()])},
    "criteria-sampled": {
        "stopping_criteria": lambda: StoppingCriteriaList([CountingCriteria()]),
        "do_sample": True,
    },
    "max-length": {"max_length": 31, "max_new_tokens": None},
    "one-token": {"max_new_tokens": 1},
    "several-returned": {"do_sample": True, "num_return_sequences": 3, "top_k": 8},
}


#: Options that reach other code on the transformers path, or alone; the rest differ only in transformers' processors.
APART = ("greedy", "sampled", "eos-list", "processor", "processor-sampled", "several-returned")
CASES = [
    *(("llama", 3, name) for name in OPTIONS),  # on the compiled path
    *(("llama", 1, name) for name in (*APART, "one-eos")),
    *(("phi", batch, name) for batch in (1, 3) for name in APART),  # on the transformers path
]


@pytest.mark.parametrize(("family", "batch", "name"), CASES)
def test_the_output_equals_that_of_model_generate(family, batch, name):
    plain, ours = both(prompts(batch), model_of(family), **OPTIONS[name])
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize(("family", "batch", "name"), CASES)
def test_a_light_head_gives_the_output_of_model_generate(family, batch, name, tmp_path, monkeypatch):
    model = model_of(family)
    head = with_free_head(
        tmp_path / "head", monkeypatch, model.config.vocab_size, model.config.hidden_size, rows=8
    )
    plain, ours = both(prompts(batch), model, {"drafter": head}, **OPTIONS[name])
    assert ours.tolist() == plain.tolist()


def test_prompts_of_int32_give_sequences_of_int64():
    plain, ours = both(prompts() | {"input_ids": prompts()["input_ids"].int()}, max_new_tokens=3)
    assert torch.equal(ours, plain)
    assert ours.dtype == plain.dtype


#: Fixed rows, because the budget may choose plain decoding for steps this small.
ADAPTIVE = {"drafter": Adaptive(rows=24)}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "name", ["greedy", "sampled", "top-p", "repetition", "eos-list", "processor-sampled"]
)
def test_equal_output_where_the_drafter_sees_the_coming_noise(name, batch):
    plain, ours = both(prompts(batch), drafted=ADAPTIVE, **OPTIONS[name])
    assert ours.tolist() == plain.tolist()


def test_equality_fails_when_a_wrong_node_is_accepted(accept_a_wrong_node):
    plain, ours = both(prompts(1), eos_token_id=None)
    assert ours.tolist() != plain.tolist()
    accept_a_wrong_node.clear()
    plain, ours = both(prompts(1), eos_token_id=None, do_sample=True, top_k=3)
    assert ours.tolist() != plain.tolist()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_scores_logits_and_cache(batch, sampled):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, ours = both(prompts(batch), repetition_penalty=1.2, do_sample=sampled, **options)
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        theirs, mine = getattr(plain, name), getattr(ours, name)
        assert len(theirs) == len(mine) == plain.sequences.shape[1] - 14
        for a, b in zip(theirs, mine, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(b, a, atol=2e-4, rtol=1e-4)
    if batch == 1:
        assert isinstance(ours.past_key_values, DynamicCache)
        assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
        for mine, theirs in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [1, 2])
def test_scores_where_a_row_ended_long_before_the_longest(seed):
    """A new drafter continues padded rows for their scores, long after their noise was discarded."""
    model = tiny_model("llama", seed=1, initializer_range=0.05)
    torch.manual_seed(seed)
    ids = torch.randint(10, 96, (3, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"return_dict_in_generate": True, "output_scores": True, "do_sample": True}
    plain, ours = both(inputs, model, ADAPTIVE, max_new_tokens=150, eos_token_id=3, **options)
    ends = [[*row.tolist(), 3].index(3) for row in plain.sequences[:, 8:]]
    assert max(ends) - min(ends) > 64
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for a, b in zip(plain.scores, ours.scores, strict=True):
        torch.testing.assert_close(b, a, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("wanted", ["output_scores", "output_logits"])
def test_scores_where_padding_is_the_end_token(family, wanted):
    """Usual for models without a padding token: a row that has ended continues over end tokens."""
    options = {"return_dict_in_generate": True, wanted: True, "eos_token_id": [2, 5, 9, 30, 40, 50, 60]}
    plain, ours = both(prompts(3), model_of(family), pad_token_id=2, **options)
    ends = [
        next((i for i, t in enumerate([*row, 2]) if t in options["eos_token_id"]), 0)
        for row in plain.sequences[:, 14:].tolist()
    ]
    assert len(set(ends)) > 1
    assert ours.sequences.tolist() == plain.sequences.tolist()
    name = wanted.removeprefix("output_")
    for a, b in zip(getattr(plain, name), getattr(ours, name), strict=True):
        torch.testing.assert_close(b, a, atol=2e-4, rtol=1e-4)


def path_of(model, **options):
    stats = []
    model.generate(**prompts(1), max_new_tokens=8, custom_generate=generate, stats=stats, **options)
    return stats[0].path


def test_the_compiled_path_serves_scores_and_caches_and_stays_after_outputs_were_captured():
    model = tiny_model("llama", initializer_range=0.1)
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    assert path_of(model) == path_of(model, **everything) == "cpu"
    compiled = make_target(model).compiled
    # transformers leaves hooks on the layers; afterwards they do nothing.
    model.generate(
        **prompts(1),
        max_new_tokens=2,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    assert any(module._forward_hooks for module in model.modules())
    assert path_of(model) == "cpu"
    assert make_target(model).compiled is compiled, "the model was compiled again"


def test_leaving_the_compiled_path_is_warned_about_once_by_name():
    model = tiny_model("llama", initializer_range=0.1)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *given: None)
    with pytest.warns(UserWarning, match="slower transformers path: .* has hooks"):
        assert path_of(model) == "transformers"
    assert path_of(model) == "transformers"  # warnings are errors here
    handle.remove()
    assert path_of(model) == "cpu"


def test_a_direct_call_says_what_to_call():
    inputs = prompts()
    for call in (lambda: generate(model_of(), **inputs), lambda: generate("a prompt", max_new_tokens=5)):
        with pytest.raises(SettingsError, match=r"model\.generate\(\*\*inputs, custom_generate="):
            call()


def test_autocast_is_refused_and_leaves_nothing_behind():
    """Autocast changes rounding: compiled passes ignore it, and a probe result would outlive it."""
    model = tiny_model("llama", initializer_range=0.1)
    for _ in range(2):  # before the first use of the model, and after it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for use in (lambda: path_of(model), lambda: lookahead.LLM(model)):
                with pytest.raises(SettingsError, match=r"torch\.autocast must be off") as error:
                    use()
                assert "\n" not in str(error.value)
        assert path_of(model) == "cpu"


def test_autocast_is_refused_in_a_later_call_that_reuses_the_target():
    llm = lookahead.LLM(tiny_model("llama", initializer_range=0.1), prefix_cache=2)
    llm.generate([5, 9, 14], max_new_tokens=4)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(SettingsError, match="autocast must be off"),
    ):
        llm.generate([5, 9, 14], max_new_tokens=4)
    assert llm.generate([5, 9, 14], max_new_tokens=4).stats.path == "cpu"


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamically_quantized_layers_are_refused_by_name(family):
    model = torch.ao.quantization.quantize_dynamic(
        tiny_model(family, initializer_range=0.1), {torch.nn.Linear}, dtype=torch.qint8
    )
    for use in (lambda: path_of(model), lambda: lookahead.LLM(model)):
        with pytest.raises(
            SettingsError, match=r"must not be quantized dynamically, and .*layers\.0"
        ) as error:
            use()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2"])
def test_the_compiled_path_hands_back_the_models_own_cache(family, dtype):
    model = tiny_model(family, initializer_range=0.1, eos_token_id=None).to(dtype)
    out = model.generate(
        **prompts(1), max_new_tokens=9, custom_generate=generate, return_dict_in_generate=True
    )
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=out.sequences[:, :-1], past_key_values=theirs)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.06}
    for mine, layer in zip(out.past_key_values.layers, theirs.layers, strict=True):
        assert mine.keys.dtype == dtype
        torch.testing.assert_close(mine.keys, layer.keys, **tolerance)
        torch.testing.assert_close(mine.values, layer.values, **tolerance)


def test_a_text_in_bf16_does_not_depend_on_earlier_calls():
    """Rows of a larger pass round differently, so step times learned earlier must not choose its size."""
    model = tiny_model("phi", seed=2, initializer_range=0.1, eos_token_id=None).to(torch.bfloat16)
    inputs = {"input_ids": torch.randint(10, 96, (1, 14), generator=torch.Generator().manual_seed(2))}
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    runs = [model.generate(**inputs, **options, custom_generate=generate) for _ in range(4)]
    texts = {tuple(run.sequences[0].tolist()) for run in runs}
    assert len(texts) == 1


def test_an_exception_of_the_callers_own_code_is_raised_as_it_is():
    class Failing(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        model_of().generate(
            **prompts(2), max_new_tokens=5, custom_generate=generate, stopping_criteria=[Failing()]
        )


def test_the_noise_of_a_row_is_given_up_once_the_row_does_not_need_it():
    stream = GeneratorNoise(2, 5, torch.device("cpu"))
    torch.manual_seed(3)
    drawn = [torch.stack([stream.at(step, row) for row in range(2)]) for step in range(6)]
    torch.manual_seed(3)
    expected = [torch.empty(2, 5).exponential_(1) for _ in range(6)]
    assert all(map(torch.equal, drawn, expected))
    later = RowNoise(stream, 1, start=2, temperature=1.0)
    assert torch.equal(later.at(3), drawn[5][1])
    stream.forget([4, 2], furthest=5)
    with pytest.raises(KeyError):
        stream.at(3, 0)
    assert torch.equal(stream.at(4, 0), drawn[4][0])
    assert torch.equal(stream.at(2, 1), drawn[2][1])
    assert stream.at(4, 0).untyped_storage().nbytes() == 5 * 4, "it would keep the noise of other rows"
    stream.settle(5)  # as after five steps of plain sampling: the sixth draw is repeated
    assert torch.equal(torch.empty(2, 5).exponential_(1), drawn[5])


def test_a_users_empty_cache_is_filled():
    cache = DynamicCache(config=model_of().config)
    out = model_of().generate(
        **prompts(1), max_new_tokens=20, past_key_values=cache, custom_generate=generate, eos_token_id=None
    )
    assert cache.get_seq_length() == out.shape[1] - 1


def test_a_criterion_is_asked_once_per_token_and_never_overrun():
    asked = []
    for extra in ({}, {"custom_generate": generate}):
        criterion = CountingCriteria()
        out = model_of().generate(
            **prompts(1), max_new_tokens=60, eos_token_id=None, stopping_criteria=[criterion], **extra
        )
        asked.append((criterion.asked, out.tolist()))
    assert asked[0] == asked[1]
    assert asked[1][0] == len(asked[1][1][0]) - 14


class Recorder:
    """A streamer that records what it gets."""

    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("bound", [False, True])
def test_a_streamer_gets_the_same_pieces(bound):
    theirs, mine = Recorder(), Recorder()
    model_of().generate(**prompts(1), max_new_tokens=30, streamer=theirs)
    if bound:  # the prompt is not put, because model.generate is unaware of the streamer
        ours = functools.partial(generate, streamer=mine)
        model_of().generate(**prompts(1), max_new_tokens=30, custom_generate=ours)
        theirs.pieces = theirs.pieces[1:]
    else:
        model_of().generate(**prompts(1), max_new_tokens=30, streamer=mine, custom_generate=generate)
    assert mine.pieces == theirs.pieces
    assert mine.ended == theirs.ended == 1


def test_stop_strings_through_a_ready_criterion(letter_tokenizer):
    from transformers import StopStringCriteria

    def criteria():
        return StoppingCriteriaList([StopStringCriteria(letter_tokenizer, ["4", "A", "b:"])])

    plain, ours = both(prompts(1), stopping_criteria=criteria, eos_token_id=None)
    assert ours.tolist() == plain.tolist()
    plain, ours = both(prompts(3), stopping_criteria=criteria, eos_token_id=None, do_sample=True)
    assert ours.tolist() == plain.tolist()


@pytest.fixture
def letter_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("bound", [False, True])
def test_stop_strings_with_a_tokenizer(letter_tokenizer, bound):
    """transformers removes the tokenizer from the keywords before it looks for those of a callable."""
    model, options = model_of(), {"max_new_tokens": 48, "eos_token_id": None}
    whole = model.generate(**prompts(1), **options)[0, 14:].tolist()
    stop = letter_tokenizer.decode(whole[20:22])
    options |= {"stop_strings": ["never there", stop], "tokenizer": letter_tokenizer}
    ours = functools.partial(generate, stats=[]) if bound else generate
    plain, fast = (
        model.generate(**prompts(1), **options, **extra) for extra in ({}, {"custom_generate": ours})
    )
    assert fast.tolist() == plain.tolist()
    assert plain.shape[1] < 14 + 48


def test_prefix_allowed_tokens_knows_the_row():
    def allowed(batch_id, ids):
        return list(range(10 + 20 * batch_id, 40 + 20 * batch_id))

    model = model_of()
    results = [
        model.generate(
            **prompts(3), max_new_tokens=20, prefix_allowed_tokens_fn=allowed, eos_token_id=None, **extra
        ).tolist()
        for extra in ({}, {"custom_generate": generate})
    ]
    assert results[0] == results[1]


def test_max_time_ends_a_text():
    out = model_of().generate(
        **prompts(1),
        max_new_tokens=20,
        stopping_criteria=[MaxTimeCriteria(0.0)],
        custom_generate=generate,
        eos_token_id=None,
    )
    assert out.shape[1] == 15


@pytest.mark.parametrize("length", [40, 10])
def test_a_callers_length_criterion_replaces_that_of_max_new_tokens(length):
    """If the prompt already meets it, one token is emitted."""

    def criteria():
        return StoppingCriteriaList([MaxLengthCriteria(length)])

    plain, ours = both(prompts(1), stopping_criteria=criteria, eos_token_id=None, max_new_tokens=5)
    assert ours.tolist() == plain.tolist()
    assert ours.shape[1] == max(length, 15)


class EveryThird(LogitsProcessor):
    """Keeps state: every third token of a sequence is even."""

    def __init__(self):
        self.called = 0

    def __call__(self, input_ids, scores):
        self.called += 1
        scores = scores.clone()
        if self.called % 3 == 0:
            scores[:, 1::2] = -float("inf")
        return scores


class Fixed:
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("a handle")

    def __call__(self, input_ids, scores):
        return scores


def test_sequences_of_a_batch_do_not_share_the_state_of_a_processor():
    plain, ours = both(prompts(3), logits_processor=lambda: [EveryThird()], eos_token_id=None)
    assert ours.tolist() == plain.tolist()
    with pytest.raises(SettingsError, match=r"Fixed must allow copy\.deepcopy.*a handle"):
        model_of().generate(
            **prompts(2), max_new_tokens=5, custom_generate=generate, logits_processor=[Fixed()]
        )
    shared = torch.nn.Linear(1, 1)
    processor = EveryThird()
    processor.model = shared
    first, second = (batch_sequence.for_row(LogitsProcessorList([processor]), 2)[0] for _ in range(2))
    assert first is not second
    assert first.model is second.model is shared, "a model is not copied"


def test_a_criterion_with_one_answer_for_all_sequences_is_refused():
    class Once(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return bool(input_ids[0, -1] % 7 == 0)

    options = {"max_new_tokens": 20, "eos_token_id": None, "custom_generate": generate}
    with pytest.raises(SettingsError, match=r"shape \(batch,\) for several sequences, but Once returned"):
        model_of().generate(**prompts(2), stopping_criteria=[Once()], **options)
    plain, ours = both(prompts(1), stopping_criteria=lambda: [Once()], eos_token_id=None)
    assert ours.tolist() == plain.tolist()


def test_tokens_are_chosen_on_the_device_of_the_prompt():
    """As in transformers, whose prompts may be on the CPU with a model on a GPU."""
    criteria = batch_sequence.Criteria(StoppingCriteriaList())
    given = (torch.arange(3), 4, None, criteria, None, 1.0)
    elsewhere, here = (
        batch_sequence.Row(0, *given, torch.device(device), None, None, None) for device in ("meta", "cpu")
    )
    assert elsewhere.choose().process is not None
    assert not hasattr(here.choose(), "process")


def test_settings_from_keywords_config_or_the_models_own(tmp_path):
    def rows(**extra):
        stats = []
        model.generate(**prompts(1), max_new_tokens=40, custom_generate=generate, stats=stats, **extra)
        return max(stats[0].rows_per_step)

    model = tiny_model("llama", eos_token_id=None, initializer_range=0.1)
    by_keyword = rows(drafter=Lookahead(3, 3, 2))
    assert by_keyword <= 10
    theirs = {"WINDOW_SIZE": 3, "LEVEL": 3, "GUESS_SET_SIZE": 2}
    model.generation_config = GenerationConfig(lookahead_drafter=theirs, pad_token_id=0)
    assert rows() == by_keyword
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert rows() == by_keyword
    assert rows(drafter="plain") == 1
    assert rows(drafter="1,1,0") == 1


def test_keywords_of_a_drafter_are_no_keywords_of_generate():
    model = tiny_model("llama", eos_token_id=None, initializer_range=0.1)
    for extra in ({"method": "plain"}, {"window_size": 3}, {"pool": NGramPool(15)}):
        with pytest.raises((SettingsError, ValueError), match=next(iter(extra))):
            model.generate(**prompts(1), max_new_tokens=4, custom_generate=generate, **extra)


def test_a_pool_is_kept_across_calls():
    drafter, steps = Lookahead(pool=NGramPool(15)), []
    for _ in range(2):
        stats = []
        model_of().generate(
            **prompts(1),
            max_new_tokens=60,
            custom_generate=generate,
            drafter=drafter,
            stats=stats,
            eos_token_id=None,
        )
        steps.append(stats[0].steps)
    assert steps[1] < steps[0]


REFUSED = {
    "num_beams": {"num_beams": 3},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "guidance_scale": {"guidance_scale": 1.5},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "drafter must be one of": {"drafter": "beam"},
    "window_size must be": {"drafter": {"window_size": 0}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_by_name(what):
    if what == "cache_implementation" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip(
            "a CUDA build of torch has no streams without a GPU, and transformers takes one for this cache"
        )
    with pytest.raises(SettingsError, match=what):
        model_of().generate(**prompts(2), max_new_tokens=5, custom_generate=generate, **REFUSED[what])


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_the_cache_of_a_padded_prompt_continues_its_text(family, implementation):
    model = model_of(family)
    inputs = {name: rows[:1] for name, rows in prompts(3).items()}
    mask = inputs["attention_mask"]
    assert 0 in mask  # padded
    options = {"max_new_tokens": 8, "eos_token_id": None, "return_dict_in_generate": True}
    found = []
    for extra in ({}, {"custom_generate": generate}):
        first = model.generate(**inputs, **options, cache_implementation=implementation, **extra)
        cache = first.past_key_values
        text = torch.cat([first.sequences, torch.tensor([[11, 12, 13]])], dim=1)
        seen = torch.cat([mask, mask.new_ones(1, text.shape[1] - mask.shape[1])], dim=1)
        continued = dict(options, cache_implementation=None, past_key_values=cache)
        if implementation is None:  # a static cache has no room for more
            text = model.generate(input_ids=text, attention_mask=seen, **continued).sequences
        found.append((type(cache), int(cache.get_seq_length()), text.tolist()))
    assert found[0] == found[1]


def test_no_cache_is_returned_where_none_is_used():
    options = {"max_new_tokens": 5, "use_cache": False, "return_dict_in_generate": True}
    plain, ours = both(prompts(1), **options)
    assert plain.past_key_values is ours.past_key_values is None
    assert ours.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("sampled", [False, True])
def test_invalid_values_are_removed_as_in_transformers(sampled):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    found = []
    for extra in ({}, {"custom_generate": generate}):
        torch.manual_seed(1)
        options = {"max_new_tokens": 20, "do_sample": sampled, "remove_invalid_values": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such a model decodes plainly
            found.append(model.generate(**prompts(1), **options, **extra).tolist())
    assert found[0] == found[1]


def test_user_code_that_indexes_rows_is_told_that_it_sees_one():
    class Second(LogitsProcessor):
        def __call__(self, ids, scores):
            scores[1] += 1
            return scores

    class Rows(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return torch.tensor([bool(ids[b, -1] == 3) for b in range(2)])

    for options in ({"logits_processor": [Second()]}, {"stopping_criteria": [Rows()]}):
        with pytest.raises(
            SettingsError, match="must not index rows of the batch, because here each call sees one"
        ):
            model_of().generate(**prompts(2), max_new_tokens=5, custom_generate=generate, **options)


# transformers 5.18 takes the device of weights that are not in memory for the model's, and warns before it calls us.
@pytest.mark.filterwarnings(r"ignore:You are calling .generate\(\) with the `input_ids`:UserWarning")
def test_models_without_usable_weights_or_cache_are_refused():
    offloaded = tiny_model("llama")
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    with pytest.raises(SettingsError, match="must be in memory"):
        offloaded.generate(**prompts(1), max_new_tokens=5, custom_generate=generate)
    training = tiny_model("llama").train()
    training.gradient_checkpointing_enable()
    with pytest.raises(SettingsError, match=r"call model.eval\(\) first"):
        training.generate(**prompts(1), max_new_tokens=5, custom_generate=generate)


def test_unsupported_arguments_are_refused_by_name():
    model, inputs = model_of(), prompts(2)
    with pytest.raises(SettingsError, match="assistant_model"):
        model.generate(**prompts(1), max_new_tokens=5, custom_generate=generate, assistant_model=model)
    with pytest.raises(SettingsError, match="does not support a streamer with 2 sequences"):
        model.generate(**inputs, max_new_tokens=5, custom_generate=generate, streamer=Recorder())
    full = model.generate(**prompts(1), max_new_tokens=5, return_dict_in_generate=True).past_key_values
    with pytest.raises(SettingsError, match="past_key_values with"):
        model.generate(
            torch.ones(1, 40, dtype=torch.long),
            max_new_tokens=5,
            custom_generate=generate,
            past_key_values=full,
        )
    right = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)}
    with pytest.raises(SettingsError, match="padded on the left"):
        model.generate(**right, max_new_tokens=5, custom_generate=generate)
    with pytest.raises(SettingsError, match="synced_gpus"):
        model.generate(**prompts(1), max_new_tokens=5, custom_generate=generate, synced_gpus=True)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(SettingsError, match="does not support inputs_embeds; pass input_ids"):
        model.generate(inputs_embeds=embeds, max_new_tokens=5, custom_generate=generate)


WATERMARK = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
ANOTHER_WAY = "omit it, or call model.generate without custom_generate"


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (1, {"penalty_alpha": 0.6}, f"penalty_alpha (contrastive search); {ANOTHER_WAY}"),
        (1, {"dola_layers": "low"}, f"dola_layers; {ANOTHER_WAY}"),
        (1, {"constraints": ["a constraint"]}, f"constraints; {ANOTHER_WAY}"),
        (1, {"force_words_ids": [[11]]}, f"force_words_ids; {ANOTHER_WAY}"),
        (1, {"prefill_chunk_size": 4}, f"prefill_chunk_size; {ANOTHER_WAY}"),
        (
            2,
            {"watermarking_config": WATERMARK, "do_sample": True},
            "a SynthID watermark for several sequences; pass one sequence",
        ),
        (
            2,
            {"past_key_values": lambda config: DynamicCache(config=config)},
            "past_key_values for several sequences; pass one sequence",
        ),
        (
            1,
            {"past_key_values": lambda config: StaticCache(config=config, max_cache_len=64)},
            f"past_key_values of type StaticCache; {ANOTHER_WAY}",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_other_loops_are_refused_by_name(batch, options, message):
    model = model_of()
    given = {name: value(model.config) if callable(value) else value for name, value in options.items()}
    with pytest.raises(SettingsError, match=re.escape(f"lookahead.generate does not support {message}")):
        model.generate(**prompts(batch), max_new_tokens=5, custom_generate=generate, **given)


def test_positions_other_than_the_tokens_own_are_refused():
    model, inputs = model_of("gpt2"), prompts(2)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).masked_fill(inputs["attention_mask"] == 0, 1)
    options = {"max_new_tokens": 12, "eos_token_id": None}
    plain, ours = (
        model.generate(**inputs, position_ids=positions, **options, **extra)
        for extra in ({}, {"custom_generate": generate})
    )
    assert ours.tolist() == plain.tolist()
    for given in (positions + 3, positions[:, :-1]):
        with pytest.raises(SettingsError, match="position_ids other than 0, 1, 2"):
            model.generate(**inputs, position_ids=given, custom_generate=generate, **options)


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )
    with pytest.raises(SettingsError, match="encoder-decoder"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=5, custom_generate=generate)


@pytest.mark.filterwarnings("ignore:lookahead.generate runs this model with plain decoding")
def test_nan_logits_are_an_error():
    from lookahead.core import NumericalError

    model = tiny_model("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(NumericalError, match="NaN"):
        model.generate(**prompts(1), max_new_tokens=5, custom_generate=generate)


@pytest.mark.filterwarnings("ignore:lookahead.generate runs this model")
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_threads_take_turns_on_a_model(family):
    """The check of a 16-bit model widens operands in its own thread; passes set its attention."""
    inputs = [{name: each[:, cut:] for name, each in prompts(1).items()} for cut in range(4)]
    options = {"max_new_tokens": 24, "eos_token_id": None, "custom_generate": generate, "drafter": "3,3,3"}
    alone = tiny_model(family, initializer_range=0.1, dtype=torch.bfloat16)

    def text(model, each):
        return model.generate(**each, **options).tolist()

    expected = [text(alone, each) for each in inputs]
    for _ in range(3):
        model = tiny_model(family, initializer_range=0.1, dtype=torch.bfloat16)
        weights = {name: weight.clone() for name, weight in model.named_parameters()}
        with ThreadPoolExecutor(len(inputs)) as threads:
            texts = list(threads.map(text, [model] * len(inputs), inputs))
        assert texts == expected
        for name, weight in model.named_parameters():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, weights[name]), name


def test_padding_inside_the_text_is_refused_where_windows_count_it():
    ids = torch.tensor([[5, 6, 0, 0, 7, 8, 5, 6, 7, 8, 5, 6]])
    mask = (ids != 0).long()
    for family, refused in (("llama", False), ("mistral", True)):
        model = tiny_model(family, **({"sliding_window": 4} if refused else {}))
        arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        if refused:
            with pytest.raises(SettingsError, match="padded on the left only"):
                model.generate(ids, **arguments, custom_generate=lookahead.generate)
            continue
        plain = model.generate(ids, **arguments)
        assert model.generate(ids, **arguments, custom_generate=lookahead.generate).tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["use_mtp", "assistant_early_exit"])
def test_options_of_other_decoders_are_refused_by_name(name):
    model = tiny_model("llama")
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    setattr(config, name, 1)
    with pytest.raises(SettingsError, match=name):
        model.generate(torch.tensor([[5, 6]]), generation_config=config, custom_generate=lookahead.generate)

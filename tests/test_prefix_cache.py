"""Prefix caching: equal completions from fewer rows, least recently used evicted first, nothing stale."""

import numpy as np
import pytest
import torch

import lookahead
from families import tiny_model
from lookahead.cli.chat import Conversation
from lookahead.core import Engine, NumericalError, OutOfMemory, Request, SettingsError, Target
from lookahead.core.prefix_cache import PrefixTarget, with_prefixes
from lookahead.drafters import Lookahead, Plain
from lookahead.hf.paths import make_target
from lookahead.testing import FakeTarget, run
from toy import VOCABULARY, tokenizer

SHARED = [11, 40, 7, 90, 40, 7, 33, 12] * 5


class Counting:
    """A target that also records the rows its prompts take."""

    keeps_prefixes = True

    def __init__(self, target):
        self._target, self.rows = target, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, prompts):
        before = {slot: self._target.lengths.get(slot, 0) for slot, _ in prompts}
        self.rows += [len(prompt) - before[slot] for slot, prompt in prompts]
        return self._target.prefill(prompts)


def decode(target, *prompts, new=12):
    requests = [Request(prompt, Lookahead(3, 3, 2), new) for prompt in prompts]
    return [sequence.tokens for sequence in run(target, requests)]


#: The compiled path, and the transformers path without and with sliding windows.
CASES = [("llama", "cpu"), ("llama", "transformers"), ("gemma2", "transformers")]


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    family, path = request.param
    model = tiny_model(family, initializer_range=0.1)
    return lambda: make_target(model, path=path)


def test_finished_sequences_are_dropped_for_the_memory_of_others():
    model = tiny_model("llama", initializer_range=0.1)
    target = PrefixTarget(make_target(model, path="cpu"), kept=8)
    engine = Engine(
        lambda: target, target=target, max_tokens=3 * 256
    )  # a slot has memory for at least 256 tokens
    found = []
    for number in range(6):
        prompt = [5 + number, *SHARED]
        sequences = [engine.add(Request(prompt, Plain(), 12)) for _ in range(2)]
        while engine.busy:
            engine.step()
            assert engine.running + len(target._idle) <= 3
        found += [sequence.tokens for sequence in sequences]
        assert len(target._idle) >= 2
    assert (
        found[::2]
        == found[1::2]
        == [decode(make_target(model, path="cpu"), [5 + n, *SHARED])[0] for n in range(6)]
    )


def test_a_prompt_goes_on_from_where_an_earlier_text_parts_from_it(case):
    counting = Counting(case())
    target = PrefixTarget(counting, kept=2)
    (first,) = decode(target, SHARED)
    longer = [*SHARED, *first, 5, 6, 7]
    assert decode(target, longer) == decode(case(), longer)
    assert counting.rows == [40, 4]  # the last token of a completion has no row yet
    other = [
        *SHARED[:30],
        50,
        51,
        52,
    ]  # another continuation: its prefix is copied, and the longer sequence stays
    assert decode(target, other) == decode(case(), other)
    again = [*longer, 8]
    assert decode(target, again) == decode(case(), again)
    assert counting.rows == [40, 4, 3, 1]
    assert decode(target, again) == decode(case(), again)
    assert counting.rows[-1] == 1  # the last token is always evaluated


def test_keys_and_values_have_the_same_bits_on_the_compiled_path():
    model = tiny_model("llama", initializer_range=0.1).to(torch.bfloat16)
    kept, fresh = (make_target(model, path="cpu") for _ in range(2))
    target = PrefixTarget(kept, kept=2)
    (first,) = decode(target, SHARED)
    prompt = [*SHARED, *first, 5, 6, 7]
    (ours,), (plain,) = target.prefill([(0, prompt)]), fresh.prefill([(0, prompt)])
    assert np.array_equal(ours.row(0), plain.row(0))
    target.release(0)
    (ours,) = target.prefill([(0, [*SHARED[:9], 3])])  # copied, as it is a short part of what is cached
    (plain,) = make_target(model, path="cpu").prefill([(0, [*SHARED[:9], 3])])
    assert np.array_equal(ours.row(0), plain.row(0))


def test_prompts_of_one_call_share_what_they_begin_with(case):
    counting = Counting(case())
    target = PrefixTarget(counting, kept=0)
    prompts = [[*SHARED, token] for token in (20, 21, 22)]
    assert decode(target, *prompts) == [tokens for prompt in prompts for tokens in decode(case(), prompt)]
    assert counting.rows == [41, 1, 1]
    assert counting.lengths == {}  # none is kept


def test_the_least_recently_used_goes_first():
    model = tiny_model("llama", initializer_range=0.1)
    counting = Counting(make_target(model))
    target = PrefixTarget(counting, kept=2)
    texts = [[10 + n] * 20 for n in range(3)]
    for prompt in (texts[0], texts[1], texts[0], texts[2]):  # the second is now the oldest
        decode(target, prompt, new=2)
    assert len(counting.lengths) == 2
    counting.rows.clear()
    for prompt in (texts[0], texts[2], texts[1]):
        decode(target, prompt, new=2)
    assert counting.rows == [1, 1, 20]
    assert len(counting.cache.storage) <= 4


def test_a_stale_row_would_be_seen(case):
    """The comparison can fail: one row of a wrong token changes the logits after it."""
    target = PrefixTarget(case(), kept=1)
    decode(target, SHARED)
    target._texts[0][3] = 50
    prompt = [*SHARED[:3], 50, *SHARED[4:], 5]
    (ours,), (plain,) = target.prefill([(0, prompt)]), case().prefill([(0, prompt)])
    assert target.reused[0] == len(SHARED)
    assert not np.allclose(ours.row(0), plain.row(0), atol=1e-3)


def test_a_wrapper_hides_no_property_of_its_target():
    inner = make_target(tiny_model("llama", initializer_range=0.1), path="transformers")
    inner.captures = inner.runs_compiled = True
    inner.depth_limit = lambda slot: 3
    target = PrefixTarget(inner, kept=1)
    own = {"keeps_prefixes", "reused"}
    names = [name for name in Target.__annotations__ if not name.startswith("_") and name not in own]
    assert len(names) == 9
    assert [getattr(target, name) for name in names] == [getattr(inner, name) for name in names]
    target.prefill([(5, [1, 2, 3])])
    assert (target.depth_limit(5), target.positions_left(5)) == (3, 256 - 1 - 3)


def test_a_failed_prompt_leaves_nothing_behind():
    class Failing(Counting):
        def prefill(self, prompts):
            if 99 in prompts[0][1]:
                raise NumericalError("no")
            return super().prefill(prompts)

    model = tiny_model("llama", initializer_range=0.1, vocab_size=120)
    counting = Failing(make_target(model))
    target = PrefixTarget(counting, kept=2)
    assert decode(target, [*SHARED, 99]) == [[]]
    assert decode(target, SHARED) == decode(make_target(model), SHARED)
    assert counting.rows == [40]


class Small(Counting):
    """A target with room for a number of sequences."""

    slots = 2

    def _check(self, slot):
        if len({*self._target.lengths, slot}) > self.slots:
            raise OutOfMemory("no room for another sequence")

    def prefill(self, prompts):
        self._check(prompts[0][0])
        return super().prefill(prompts)

    def reuse(self, slot, source, length):
        self._check(slot)
        self._target.reuse(slot, source, length)


@pytest.mark.parametrize("last", [[50] * 20, [*SHARED[:10], *[50] * 10]], ids=["new", "shared"])
def test_kept_sequences_make_room_for_a_prompt(last):
    model = tiny_model("llama", initializer_range=0.1)
    target = PrefixTarget(Small(make_target(model)), kept=2)
    decode(target, SHARED)
    decode(target, [90, 12] * 20)
    assert decode(target, last) == decode(make_target(model), last)
    assert decode(target, SHARED) == decode(make_target(model), SHARED)
    assert next(target._new) <= 3  # no slot is lost


def test_kept_sequences_make_room_for_a_step():
    model = tiny_model("llama", initializer_range=0.1)
    small = Small(make_target(model))
    target = PrefixTarget(small, kept=2)
    decode(target, SHARED)
    forward = small._target.forward

    def full(trees):
        if len(small._target.lengths) > 1:
            raise OutOfMemory("no room")
        return forward(trees)

    small.forward = full
    assert decode(target, [50] * 20) == decode(make_target(model), [50] * 20)


def test_reused_rows_take_no_room_from_other_prompts():
    model = tiny_model("llama", initializer_range=0.1)
    target = PrefixTarget(make_target(model), kept=2)
    engine = Engine(lambda: target, target=target, prompt_rows=16)
    for prompt in ([*SHARED, 1], [*SHARED, 2, 3], [*SHARED, 4, 5]):
        engine.add(Request(prompt, Plain(), 2))
        if prompt[-1] == 1:
            while engine.busy:
                engine.step()
    updates = engine.step()
    assert [len(update.tokens) for update in updates] == [1, 1]


# ------------------------------------------------------------------------------------ in LLM and chat


@pytest.fixture
def llm():
    made = lookahead.LLM(
        tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.1),
        tokenizer(chat=True),
        prefix_cache=2,
    )
    counted = []
    make = made.target

    def target(path="auto"):
        counted.append(Counting(make(path)))
        return counted[-1]

    made.target = target
    return made, counted


def test_calls_share_one_target_and_a_second_caller_gets_its_own(llm):
    llm, counted = llm
    options = {"max_new_tokens": 10, "drafter": Lookahead(3, 3, 2)}
    plain = lookahead.LLM(llm.model, llm.tokenizer)
    expected = [plain.generate([*SHARED, n], **options).tokens for n in (5, 6)]
    assert [llm.generate([*SHARED, n], **options).tokens for n in (5, 6)] == expected
    assert [target.rows for target in counted] == [[41, 1]]
    stream = llm.run([[*SHARED, 5]], **options)
    next(stream)
    assert llm.generate([*SHARED, 6], **options).tokens == expected[1]
    assert [target.rows for target in counted] == [[41, 1, 1], [41]]
    stream.close()  # between two steps: the prefix stays cached
    llm.generate([*SHARED, 7], **options)
    assert counted[0].rows == [41, 1, 1, 1]


def test_changed_weights_and_an_interrupt_begin_anew(llm, monkeypatch):
    llm, counted = llm
    options = {"max_new_tokens": 4, "drafter": Plain()}
    before = llm.generate(SHARED, **options).tokens
    with torch.no_grad():
        llm.model.module.get_input_embeddings().weight.mul_(-1)
    assert (
        llm.generate(SHARED, **options).tokens == lookahead.LLM(llm.model).generate(SHARED, **options).tokens
    )
    assert llm.generate(SHARED, **options).tokens != before
    assert [target.rows for target in counted] == [[40], [40, 1]]

    def interrupted(trees):
        raise KeyboardInterrupt

    monkeypatch.setattr(counted[1]._target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SHARED, **options)
    llm.generate(SHARED, **options)
    assert len(counted) == 3


def test_a_turn_does_not_read_the_whole_conversation_again(llm):
    llm, counted = llm
    options = {"max_new_tokens": 8, "drafter": Plain(), "ignore_eos": True}
    plain = Conversation(lookahead.LLM(llm.model, llm.tokenizer), "be brief")
    cached = Conversation(llm, "be brief")
    lengths = [0]
    for line in ("hello there, how are you", "and now", "tell me more"):
        assert "".join(cached.say(line, **options)) == "".join(plain.say(line, **options))
        lengths.append(len(cached.last.prompt_tokens))
    # At most the answer, whose text may be encoded as other tokens, and the new message.
    for rows, before, now in zip(counted[0].rows, lengths, lengths[1:], strict=False):
        assert rows <= now - before + 2
    assert len(counted[0].rows) == 3


def test_targets_that_cannot_keep_are_used_as_they_are():
    assert isinstance(with_prefixes(FakeTarget(), 2), FakeTarget)
    rope = tiny_model("llama-dynamic-ntk", initializer_range=0.1)
    assert not isinstance(with_prefixes(make_target(rope), 2), PrefixTarget)
    with pytest.raises(SettingsError, match="prefix_cache must be 0 or more, got -1"):
        with_prefixes(FakeTarget(), -1)

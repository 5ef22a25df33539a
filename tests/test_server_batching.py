"""Continuous batching in the engine loop: chunked prompts, one row budget, joining and leaving, faults."""

import json
import random
import re
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from lookahead.core import Engine, Request, SettingsError, greedy, loop
from lookahead.core.prefix_cache import PrefixTarget
from lookahead.drafters import Lookahead, Plain, as_drafter
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.server.grammar import Constraint, Grammars
from lookahead.server.logprobs import LogProbs, TokenLogProb
from lookahead.server.prediction import Predicted
from lookahead.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from lookahead.server.responses import CompletionAnswer
from lookahead.server.tools import CallReader, messages_of, with_tools
from lookahead.testing import FakeTarget, run
from lookahead.text.decoder import TextDecoder
from toy import tokenizer

VOCABULARY = 32


def requests(count, method="lookahead", **more):
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
    return [Request(prompt, as_drafter(method), 30, **more) for prompt in prompts]


def plain_texts(count):
    return [run(FakeTarget(VOCABULARY), [request])[0].tokens for request in requests(count, "plain")]


@pytest.mark.parametrize("row_budget", [1, 7, 64])
@pytest.mark.parametrize(
    ("prompt_rows", "method"),
    [(3, "lookahead"), (3, "prompt-lookup"), (3, "jacobi"), (1, "lookahead"), (1 << 20, "lookahead")],
)
def test_texts_do_not_depend_on_pieces_and_budget(prompt_rows, method, row_budget):
    engine = Engine(lambda: FakeTarget(VOCABULARY), prompt_rows=prompt_rows, row_budget=row_budget)
    made = [engine.add(request) for request in requests(6, method)]
    while engine.busy:
        steps = engine.step()
        rows = [step.rows for step in steps if step.tree is not None]
        assert sum(rows) <= max(row_budget, len(rows))
    assert [sequence.tokens for sequence in made] == plain_texts(6)


@pytest.mark.parametrize(("count", "most"), [(1, 120), (2, 240), (4, 256)])
def test_where_rows_are_cheap_no_tree_of_the_paper_is_cut(count, most):
    """With a GPU's cost curve, one sequence gets all rows that (15, 5, 15) requests; four share 256."""
    curve = CostCurve({0: {1: 1.0, 64: 1.1, 256: 1.5}})
    drafter = Lookahead(15, 5, 15)
    wide, narrow = (largest_passes(count, drafter, budget) for budget in (curve.budget, 64))
    assert max(narrow[0]) <= 64 < max(wide[0]) <= most
    assert wide[1] == narrow[1]
    whole, _ = largest_passes(count, drafter, 1 << 20)
    if count == 1:
        assert wide[0] == whole


def largest_passes(count, drafter, row_budget):
    """Rows of each pass over trees, and the completions."""
    engine = Engine(lambda: FakeTarget(VOCABULARY), row_budget=row_budget)
    made = [engine.add(Request([1 + i, 2, 3, 4, 5, 6], drafter, 60)) for i in range(count)]
    passes = []
    while engine.busy:
        rows = [step.rows for step in engine.step() if step.tree is not None]
        passes.append(sum(rows))
    return passes, [sequence.tokens for sequence in made]


def test_a_long_prompt_does_not_stall_the_others():
    engine = Engine(lambda: FakeTarget(VOCABULARY), prompt_rows=4)
    short = engine.add(Request([1], Plain(), 100))
    engine.step()
    long = engine.add(Request([2] * 80, Plain(), 5))
    before = len(short.tokens)
    while not long.tokens:
        engine.step()
    assert len(short.tokens) - before >= 80 // 4 - 1


def test_a_short_prompt_does_not_wait_for_all_long_ones_before_it():
    engine = Engine(lambda: FakeTarget(VOCABULARY), prompt_rows=8)
    long = [engine.add(Request([2 + i] * 200, Plain(), 3)) for i in range(4)]
    short = engine.add(Request([1] * 5, Plain(), 3))
    steps = 0
    while not short.tokens:
        engine.step()
        steps += 1
    assert steps <= 2
    # The others are evaluated one after the other, so that equal ones can share a prefix.
    while engine.busy:
        evaluated = [sequence.evaluated for sequence in long if not sequence.tokens]
        assert sum(each > 0 for each in evaluated) <= 1
        engine.step()


class Timed(FakeTarget):
    """Moves a clock: a pass takes 10 ms for each row, and the copy of a prefix takes 0.1 s."""

    keeps_prefixes = True
    clock = 0.0
    copy_seconds = 0.1
    copied = 0

    def prefill(self, prompts):
        Timed.clock += 0.01 * (sum(len(prompt) for _, prompt in prompts) - self.copied)
        self.copied = 0
        return super().prefill(prompts)

    def forward(self, trees):
        Timed.clock += 0.01 * sum(len(tree) for _, tree in trees)
        return super().forward(trees)

    def reuse(self, slot, source, length):
        Timed.clock += self.copy_seconds
        self.copied = length
        self.committed.pop(slot, None)


@pytest.mark.parametrize(
    "prompts", [[[1 + n] * 300 for n in range(8)], [[1] * 300] * 8], ids=["own", "shared"]
)
def test_prompts_pause_a_decoding_sequence_for_a_limited_time(monkeypatch, prompts):
    monkeypatch.setattr(loop, "monotonic", lambda: Timed.clock)
    target = PrefixTarget(Timed(VOCABULARY), kept=0)
    engine = Engine(lambda: target, target=target, prompt_rows=128)
    short = engine.add(Request([1] * 20, Plain(), 2000))
    while not short.tokens:
        engine.step()
    last, pauses, passes = Timed.clock, [], 0
    for prompt in prompts:
        engine.add(Request(prompt, Plain(), 2))
    while engine.waiting or engine.running > 1:
        passes += bool(engine.waiting or engine._prefilling)
        if any(update.sequence is short for update in engine.step()):
            pauses.append(Timed.clock - last)
            last = Timed.clock
    # A pass over prompts ends after its time and the prompt that it has begun. A step of trees follows.
    assert max(pauses) < loop.PROMPT_SECONDS + 0.1 + 0.01 * 10
    assert passes < 2.5 * sum(map(len, prompts)) * 0.01 / loop.PROMPT_SECONDS  # the time is used


def test_an_old_prompt_advances_beside_short_ones_that_take_all_time(monkeypatch):
    monkeypatch.setattr(loop, "monotonic", lambda: Timed.clock)
    monkeypatch.setattr(Timed, "copy_seconds", 0.3)
    target = PrefixTarget(Timed(VOCABULARY), kept=4)
    engine = Engine(lambda: target, target=target, prompt_rows=128)
    engine.add(Request([1] * 20, Plain(), 2000))
    engine.step()
    long = engine.add(Request([2] * 200, Plain(), 2))
    steps = 0
    while not long.tokens:
        for _ in range(4):
            engine.add(Request([1] * 20, Plain(), 1))
        engine.step()
        steps += 1
    assert steps < 100


def test_sequences_wait_until_there_is_memory_for_their_tokens():
    engine = Engine(lambda: FakeTarget(VOCABULARY), max_tokens=100)
    made = [engine.add(request) for request in requests(6)]  # up to 69 tokens each
    made.append(engine.add(Request([1] * 150, Plain(), 3)))  # more than fit, but alone
    most = 0
    while engine.busy:
        engine.step()
        running = engine.sequences[: engine.running]
        most = max(most, len(running))
        assert sum(each.most_tokens for each in running) <= 100 or len(running) == 1
    assert most > 1
    assert [sequence.tokens for sequence in made[:6]] == plain_texts(6)
    assert len(made[6].tokens) == 3


def test_every_prompt_token_is_read_with_the_row_before_it():
    for rows in (1, 5, 1 << 20):
        seen = []
        target = FakeTarget(VOCABULARY)
        (request,) = requests(
            1, read_prompt=lambda scores, node, token, seen=seen: seen.append((scores.best(node), token))
        )
        request.prompt = list(range(3, 20))
        engine = Engine(lambda target=target: target, prompt_rows=rows)
        engine.add(request)
        while engine.busy:
            engine.step()
        prompt = request.prompt
        assert seen == [(target.next_token(prompt[:i]), prompt[i]) for i in range(1, len(prompt))]


def test_joining_leaving_and_cancelling_between_steps():
    rng = random.Random(0)
    expected = plain_texts(20)
    engine = Engine(lambda: FakeTarget(VOCABULARY), prompt_rows=5, row_budget=24)
    waiting, running, done = list(enumerate(requests(20))), [], {}
    while waiting or engine.busy:
        if waiting and rng.random() < 0.4:
            index, request = waiting.pop(0)
            running.append((index, engine.add(request)))
        if running and rng.random() < 0.05:
            index, sequence = running.pop(rng.randrange(len(running)))
            engine.cancel(sequence)
            assert sequence.tokens == expected[index][: len(sequence.tokens)]
        engine.step()
        for index, sequence in running:
            if sequence.finish_reason is not None:
                done[index] = sequence.tokens
        running = [one for one in running if one[1].finish_reason is None]
    assert len(done) > 10
    assert all(tokens == expected[index] for index, tokens in done.items())
    assert engine.target.committed == {}


def test_predicted_tokens_are_counted_along_the_text():
    predicted = Predicted([1, 2, 3, 4, 5, 6, 7, 8])
    predicted.take([1])
    predicted.take([2, 3, 9])  # 2 and 3 were drafted
    predicted.take([5, 6])  # 5, 6 locate the position again
    predicted.take([7, 8, 10])
    assert (predicted.accepted, predicted.rejected) == (4, 4)
    assert Predicted([]).rejected == 0


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("hello < world", "hello < world", []),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", ["f"]),
        (
            'Well. <tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f"}',
            "Well. ",
            ["f", "f"],
        ),
        ('{"name": "f", "arguments": {"x": 1}}', "", ["f"]),
        ('{"name": "g", "arguments": {}}', '{"name": "g", "arguments": {}}', []),
        ('{"name": ["f"]}', '{"name": ["f"]}', []),
        ('{"name": {"f": 1}}', '{"name": {"f": 1}}', []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ("{" * 5000, "{" * 5000, []),
        (
            'Sure:\n```json\n{"name": "f", "arguments": {"a": "}\\"{"}}\n```\nDone.',
            "Sure:Done.",
            ["f"],
        ),
        ('```json\n{"x": 1}\n``` and more', '```json\n{"x": 1}\n``` and more', []),
        ("```python\nx = 1\n```", "```python\nx = 1\n```", []),
        ('<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>', "", ["f"]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "", ["f"]),
        (
            '{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {"y": [1, {}]}} bye',
            "bye",
            ["f", "f"],
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": 1', "", ["f"]),
    ],
)
def test_calls_are_found_in_a_text_that_comes_in_pieces(text, content, names):
    for size in (1, 3, len(text)):
        reader = CallReader({"f"}, first_only=False)
        pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
        pieces.append(reader.push("", end=True))
        assert "".join(shown for shown, _ in pieces).rstrip() == content.rstrip()
        assert [call["function"]["name"] for call in reader.calls] == names
        streamed = [""] * len(names)
        for _, changes in pieces:
            for change in changes:
                streamed[change["index"]] += change["function"]["arguments"]
        assert [call["function"]["arguments"] for call in reader.calls] == streamed
        assert all(re.fullmatch("[A-Za-z0-9]{9}", call["id"]) for call in reader.calls)


def test_a_grammar_that_cannot_be_made_says_what_is_missing(monkeypatch):
    grammars = Grammars(SimpleNamespace(tokenizer=None, eos=frozenset()))
    with pytest.raises(SettingsError, match=r"^response_format and tool_choice need a tokenizer and an end"):
        grammars.process(Constraint("json", {}, "response_format"))
    unusable = Grammars(SimpleNamespace(tokenizer=object(), eos={1}, vocabulary=8))
    with pytest.raises(
        SettingsError, match=r"^response_format and tool_choice cannot be used with this tokenizer: "
    ):
        unusable.process(Constraint("json", {}, "tool_choice"))
    for module in ("llguidance", "llguidance.hf"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=r"pip install '\.\[grammar\]'"):
        grammars.process(Constraint("json", {}, "response_format"))


@pytest.mark.parametrize(
    ("kind", "field", "item"),
    [
        (CompletionRequest, "prompt", -1),
        (CompletionRequest, "prompt", [-1]),
        (CompletionRequest, "stop", 1),
        (ChatRequest, "messages", {}),
        (ChatRequest, "tools", {}),
        (Message, "content", {}),
        (Message, "tool_calls", {}),
        (TokenizeRequest, "messages", {}),
        (DetokenizeRequest, "tokens", -1),
    ],
)
def test_a_long_list_of_wrong_items_has_few_errors(kind, field, item):
    with pytest.raises(ValidationError) as error:
        kind.model_validate({field: [item] * 10_000})
    assert error.value.error_count() < 20


def test_tools_are_told_where_the_template_does_not():
    messages = messages_of([Message(role="user", content="x")])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert with_tools(messages, tools, "{% for t in tools %}") is messages
    told = with_tools(messages, tools, "{{ messages }}")
    assert told[0]["role"] == "system"
    assert '"name": "f"' in told[0]["content"]


@pytest.mark.parametrize(
    ("text", "value"), [('{"x": 1}', {"x": 1}), ("no JSON", "no JSON"), ("[" * 50_000, "[" * 50_000)], ids=len
)
def test_the_arguments_of_a_call_reach_the_template_as_an_object(text, value):
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    messages = messages_of([Message(role="assistant", tool_calls=[call])])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == value
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    shown = tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False)
    assert shown == json.dumps(value)


def test_settings_come_from_options_environment_and_file(tmp_path, monkeypatch):
    from lookahead.server.settings import Settings

    file = tmp_path / "serve.yaml"
    file.write_text("port: 1000\nmax_queue: 3\nhost: 0.0.0.0\n")
    monkeypatch.setenv("LOOKAHEAD_MAX_QUEUE", "5")
    monkeypatch.setenv("LOOKAHEAD_PORT", "1001")
    settings = Settings.read({"port": 1002}, file)
    assert (settings.port, settings.max_queue, settings.host) == (1002, 5, "0.0.0.0")
    for text, message in (
        ("colour: red", "unknown setting 'colour'"),
        ("max_rows: x", "max_rows"),
        ("- 1", "YAML"),
        ("a: [", "YAML"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            Settings.read({}, file)
    with pytest.raises(SettingsError, match="exists"):
        Settings.read({}, tmp_path / "nowhere")
    monkeypatch.setenv("LOOKAHEAD_SERVICE_HOST", "10.0.0.1")  # Kubernetes, for a service with this name
    assert Settings.read({}).port == 1001
    with monkeypatch.context() as patch:
        patch.setenv("LOOKAHEAD_MAX_QUEU", "5")
        with pytest.raises(SettingsError, match=r"LOOKAHEAD_MAX_QUEU \(did you mean 'max_queue'\?\)"):
            Settings.read({})
    with pytest.raises(SettingsError, match="drafter must be one of"):
        Settings.read({"drafter": "magic"})
    assert Settings.read({"drafter": "code", "max_pool_keys": 5}).drafting() == Lookahead.preset(
        "code", max_pool_keys=5
    )
    assert Settings.read({"drafter": "7,4,3"}).drafting() == Lookahead(7, 4, 3)
    with pytest.raises(SettingsError) as error:
        Settings.read({"api_key": ["s3cret"]})
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("key", ["", " ", " s3cret", "s3cret\n"])
def test_an_api_key_that_no_client_can_send_is_refused(key, monkeypatch):
    from lookahead.server.settings import Settings

    monkeypatch.setenv("LOOKAHEAD_API_KEY", key)
    with pytest.raises(SettingsError, match="api_key must be at least 1 character") as error:
        Settings.read()
    assert "s3cret" not in str(error.value)


def test_max_body_bytes_alone_limits_a_prompt():
    text = "x" * (5 << 20)
    assert (
        CompletionRequest(prompt=text).prompt
        == ChatRequest(messages=[{"role": "user", "content": text}]).messages[0].content
    )


def test_the_likelier_of_two_tokens_with_the_same_text_counts():
    body = CompletionRequest(prompt="x", logprobs=2)
    answer = CompletionAnswer(body, "name", [Request([1], Plain(), 4)], None, "")
    answer.token_text = lambda token: "\ufffd"
    entry = answer.entry(answer.parts[0], TokenLogProb(5, -0.2, [(5, -0.2), (6, -3.0)]))
    assert entry["top"] == {"\ufffd": -0.2}


def echoed(prompt, ids, tokens, tokenizer):
    """A finished answer with echo and log-probabilities."""
    recorded = LogProbs(greedy, 0)
    recorded.prompt, recorded.tokens = (
        [TokenLogProb(t, 0.0, []) for t in some] for some in (ids[1:], tokens)
    )
    body = CompletionRequest(prompt=prompt, logprobs=0, echo=True)
    answer = CompletionAnswer(body, "name", [Request(ids, Plain(), 4, recorded)], tokenizer, "")
    text = TextDecoder(tokenizer, ids)
    for token in tokens:
        text.push(token)
    answer.parts[0].shown = text.drain()
    return answer


class Strips:
    """Decodes like SentencePiece: the space at the beginning of a text is stripped."""

    all_special_ids = (0,)
    words = ("<s>", " the", " cat", "s")

    def decode(self, tokens, skip_special_tokens=False, **_):
        words = (self.words[token] for token in tokens if token or not skip_special_tokens)
        return "".join(words).removeprefix(" ")


def test_token_texts_of_sentencepiece_keep_their_spaces_and_offsets():
    answer = echoed("the", [0, 1], [2, 3], Strips())
    assert [answer.token_text(token) for token in range(4)] == ["<s>", " the", " cat", "s"]
    choice = answer.complete(answer.parts[0])
    assert choice["text"] == "the cats"
    rest = [choice["text"][offset:] for offset in choice["logprobs"]["text_offset"]]
    assert rest == ["the cats", "the cats", " cats", "s"]


@pytest.mark.parametrize("prompt", ["<s>f\u00fcr </s> \u6771\u4eac", "f\u00fcr \U0001f642"])
def test_parts_of_a_character_have_its_offset_and_an_echo_is_the_string_given(prompt):
    """Each byte outside ASCII is a token, but for a few merges."""
    ours = tokenizer()
    ids, more = (ours(text).input_ids for text in (prompt, "\u6771na\u00efve"))
    answer = echoed(prompt, ids, more, ours)
    choice = answer.complete(answer.parts[0])
    text, shown = choice["text"], choice["logprobs"]
    assert text == prompt + "\u6771na\u00efve"
    decoded = [ours.decode((ids + more)[:count]).rstrip("\ufffd") for count in range(len(ids + more))]
    assert shown["text_offset"] == [len(begin) for begin in decoded]
    assert len(set(shown["text_offset"])) < len(ids + more)
    # As ids, the prompt is decoded without its special tokens; without echo, offsets begin at the completion.
    answer.body.prompt = ids
    assert answer.complete(answer.parts[0])["text"].startswith(ours.decode(ids, skip_special_tokens=True))
    (part,) = echoed(prompt, ids, more, ours).parts
    offsets = [answer.entry(part, TokenLogProb(token, 0.0, []))["offset"] for token in more]
    assert offsets == [len(ours.decode(more[:count]).rstrip("\ufffd")) for count in range(len(more))]

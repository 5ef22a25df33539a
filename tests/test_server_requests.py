"""What clients send: fields without effect, their own histories, vLLM's fields, tools, reasoning, log-likelihoods."""

import json
from types import SimpleNamespace

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders

import lookahead
from lookahead.core.verify import as_choose
from lookahead.server import prepare
from lookahead.server.grammar import Constraint, Grammars, _with_plain_tags
from lookahead.server.protocol import ChatRequest
from lookahead.server.reasoning import ThoughtReader
from lookahead.server.responses import ChatAnswer
from lookahead.server.tools import CallReader, demanded
from serving import serving
from test_server import SCHEMA, chat, events, no_end, post, text_of
from toy import save, trained


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    return lookahead.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_concurrent=8, served_model_name="toy", prompt_rows=32) as running:
        yield running


@pytest.fixture
def force(served, monkeypatch):
    """Make every completion a given text, because a random model writes no calls."""

    def forced_to(text):
        prepare = served.llm.prepare

        def forced(*given):
            request = prepare(*given)
            ids = iter([*served.llm.tokenizer(text, add_special_tokens=False).input_ids, *served.llm.eos])
            request.choose = as_choose(lambda scores, node: next(ids))
            return request

        monkeypatch.setattr(served.llm, "prepare", forced)

    return forced_to


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
USER = {"role": "user", "content": "hello"}


# ------------------------------------------------------------------------------------------ fields


@pytest.mark.parametrize("field", ["prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"])
def test_standard_fields_without_effect(served, field):
    assert text_of(post(served, **{field: "x"})) == text_of(post(served))


def test_a_suffix_comes_after_the_gap(served, monkeypatch):
    """The toy tokenizer has no tokens for this, so three letters stand for them."""
    monkeypatch.setattr(prepare, "FILL_IN", (("<no>", "b", "c"), ("a", "b", "c")))
    ids = served.llm.tokenizer("axbyzc", add_special_tokens=False).input_ids
    assert [served.llm.tokenizer.decode([token]) for token in ids] == list("axbyzc")
    given = {"max_tokens": 8, "suffix": "yz"}
    expected = text_of(post(served, prompt=ids, max_tokens=8))
    assert text_of(post(served, prompt="x", **given)) == expected
    assert text_of(post(served, prompt=[ids[1]], **given)) == expected


def test_fields_that_clients_send_with_their_defaults(served):
    both = {"store": True, "service_tier": "default", "stream_options": None, "seed": None, "unknown": None}
    completion = {"best_of": 1, "suffix": "", "max_tokens": 12}
    assert text_of(post(served, **both, **completion)) == text_of(post(served))
    asked = {
        "modalities": ["text"],
        "audio": None,
        "functions": None,
        "function_call": None,
        "verbosity": "low",
    }
    answer = chat(served, **both, **asked, top_logprobs=0, stop=None)
    assert answer["choices"][0]["message"] == chat(served)["choices"][0]["message"]
    assert events(served, stream_options={"include_obfuscation": False})
    for refused in ({"modalities": ["audio"]}, {"audio": {"voice": "x"}}, {"functions": [{}]}):
        assert chat(served, status=400, **refused)["error"]["param"].startswith(next(iter(refused)))


def test_keys_that_other_servers_answered_with_are_ignored(served):
    called = {
        "id": "call_1",
        "type": "function",
        "index": 0,
        "function": {"name": "add", "arguments": '{"x": 1}', "parsed_arguments": {"x": 1}},
    }
    turns = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        },
        USER | {"id": "msg_1", "copilot_cache_control": {"type": "ephemeral"}},
        {
            **{"role": "assistant", "content": None, "tool_calls": [called], "parsed": None, "refusal": None},
            **{"annotations": [], "audio": None, "function_call": None, "reasoning": "r"},
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "function", "name": "add", "content": "1"},
        {"role": "assistant", "content": "one", "reasoning_content": "r"},
        USER,
    ]
    tool = {**TOOL, "cache_control": {}, "function": TOOL["function"] | {"returns": {}}}
    plainly = [{k: v for k, v in turn.items() if k in ("role", "content")} for turn in turns]
    plainly[0]["content"] = "s"
    answer = chat(served, messages=turns, tools=[tool])
    assert answer["choices"][0]["message"]["content"] is not None
    assert chat(served, messages=[plainly[0], USER])["usage"]["prompt_tokens"] > 0


def test_minus_one_token_is_as_many_as_fit(served):
    answer = post(served, max_tokens=-1, logit_bias=no_end(served))
    assert answer["usage"]["total_tokens"] == served.server.ready.context
    assert post(served, status=400, max_tokens=-2)["error"]["param"] == "max_tokens"
    assert chat(served, status=400, max_tokens=0)["error"]["param"] == "max_tokens"


def test_top_p_of_zero_is_greedy(served):
    assert text_of(post(served, temperature=1, top_p=0)) == text_of(post(served))


def test_no_tokens_only_echo(served):
    answer = post(served, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    prompt = served.llm.encode("def add(a, b):\n    return a + b\ndef add(a")
    assert choice["text"] == "def add(a, b):\n    return a + b\ndef add(a"
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    shown = [c["text"] for e in events(served, max_tokens=0, echo=True) for c in e["choices"]]
    assert "".join(shown) == choice["text"]


def test_end_tokens_may_be_ignored_excluded_or_added(served):
    (end,) = served.llm.eos
    ends = {"logit_bias": {str(end): 100}}
    assert post(served, **ends)["usage"]["completion_tokens"] == 1
    assert post(served, **ends, ignore_eos=True)["usage"]["completion_tokens"] == 12
    assert post(served, **ends, min_tokens=5)["usage"]["completion_tokens"] == 6
    token = served.llm.encode("q")[0]
    answer = post(served, logit_bias={str(token): 100}, stop_token_ids=[token])
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_bytes_of_a_part_of_a_character(served):
    ids = served.llm.tokenizer("京", add_special_tokens=False).input_ids
    found = b""
    for token in ids:
        shown = chat(served, logprobs=True, max_tokens=1, logit_bias={str(token): 100})
        (entry,) = shown["choices"][0]["logprobs"]["content"]
        found += bytes(entry["bytes"])
    assert (len(ids) > 1, found) == (True, "京".encode())


@pytest.fixture
def client(served, openai):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_agents_recognise_a_full_context(client, openai):
    with pytest.raises(
        openai.BadRequestError, match=r"This model's maximum context length is 1024 tok"
    ) as seen:
        client.chat.completions.create(model="toy", messages=[USER | {"content": "x " * 3000}])
    assert (seen.value.code, seen.value.param) == ("context_length_exceeded", "messages")


# ------------------------------------------------------------------------------------------ prompts of chats


def test_the_last_message_can_be_continued(served):
    turns = [USER, {"role": "assistant", "content": "Once upon"}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(served, messages=turns, **asked, max_tokens=4)
    expected = served.llm.encode("user: hello\nassistant: Once upon")
    assert answer["usage"]["prompt_tokens"] == len(expected)
    error = chat(served, status=400, messages=turns, continue_final_message=True, add_generation_prompt=True)
    assert error["error"]["param"] == "continue_final_message"
    without = chat(served, messages=[USER], add_generation_prompt=False, max_tokens=4)
    assert without["usage"]["prompt_tokens"] == len(served.llm.encode("user: hello\n"))


def test_variables_of_the_chat_template(served, monkeypatch):
    template = "{{ 'thinking' if enable_thinking else 'not' }}{{ messages[0].content }}"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    for given, prompt in (({"enable_thinking": True}, "thinkinghello"), ({}, "nothello")):
        answer = chat(served, chat_template_kwargs=given, max_tokens=2)
        assert answer["usage"]["prompt_tokens"] == len(served.llm.encode(prompt))
    for name in ("chat_template", "tools", "tokenize", "add_generation_prompt"):
        error = chat(served, status=400, chat_template_kwargs={name: "x"})["error"]
        assert error["message"] == f"chat_template_kwargs: must not set {name!r}"


def test_a_chat_template_of_ones_own(llm, tmp_path):
    (tmp_path / "chat.jinja").write_text("<{{ messages[0].content }}>")
    with serving(llm, chat_template=tmp_path / "chat.jinja") as served:
        assert chat(served, max_tokens=2)["usage"]["prompt_tokens"] == len(llm.encode("<hello>"))


def test_the_template_is_rendered_before_the_first_request(llm, monkeypatch):
    rendered = []
    apply = llm.tokenizer.apply_chat_template
    monkeypatch.setattr(
        llm.tokenizer,
        "apply_chat_template",
        lambda *given, **more: rendered.append(1) or apply(*given, **more),
    )
    with serving(llm):
        assert rendered


# ------------------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nabc</think>\n\nhi <think>", False, ("\nabc", "hi <think>")),
        ("abc</think>\n\nhi", True, ("abc", "hi")),
        ("no tags", False, ("", "no tags")),
        ("<thin", False, ("", "<thin")),
        ("<think>cut", False, ("cut", "")),
        ("x</thi", True, ("x</thi", "")),
    ],
)
def test_reasoning_is_separated_piece_by_piece(text, inside, expected):
    for size in (1, 3, len(text)):
        reader = ThoughtReader(inside)
        pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
        pieces.append(reader.push("", end=True))
        assert tuple(map("".join, zip(*pieces, strict=True))) == expected


def test_reasoning_has_a_field_of_its_own(served, monkeypatch, force):
    force("<think>hm</think>\n\nHi!")
    message = chat(served, max_tokens=60)["choices"][0]["message"]
    assert "reasoning_content" not in message  # this template has no tags
    template = (
        "{% if not enable_thinking is defined %}</think>{% endif %}" + served.llm.tokenizer.chat_template
    )
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    message = chat(served, max_tokens=60)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Hi!")
    deltas = [
        c["delta"]
        for e in events(served, "/v1/chat/completions", messages=[USER], max_tokens=60)
        for c in e["choices"]
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi!"
    assert deltas[-1] == {}


def test_a_prompt_may_open_the_reasoning(llm):
    body = ChatRequest(messages=[USER])
    request = SimpleNamespace(prompt=llm.encode("assistant: <think>\n"))
    answer = ChatAnswer(body, "toy", [], llm.tokenizer, "", "<think></think>")
    assert answer.thought_reader(request).push("a</think>b") == ("a", "b")


# ------------------------------------------------------------------------------------------ tools


def forms(call):
    text = json.dumps(call)
    return [f"<tool_call>{text}</tool_call>", f"```json\n{text}\n```", text, f"{{{text}}}}}"]


@pytest.mark.parametrize("form", range(4), ids=["tagged", "fenced", "bare", "doubled"])
def test_calls_in_every_form_are_streamed_in_pieces(client, force, form):
    arguments = {"x": "a{b", "y": list(range(20))}
    force(forms({"name": "add", "arguments": arguments})[form])
    asked = {"model": "toy", "messages": [USER], "tools": [TOOL], "max_tokens": 200}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", arguments)
    assert len(call.id) == 9
    with client.chat.completions.stream(**asked) as stream:
        seen = list(stream)
    pieces = [event for event in seen if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 10
    final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert (final.finish_reason, final.message.content) == ("tool_calls", "")


def test_strict_tools_may_be_called_or_not(served):
    """The grammar leaves text free, and holds where a call begins."""
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    assert chat(served, tools=[strict])["choices"][0]["message"]["content"]
    body = ChatRequest(messages=[USER], tools=[strict, {"type": "function", "function": {"name": "sub"}}])
    for text, allowed in (
        ("no call", True),
        ('{"name": "x"}', True),
        ('Well <tool_call>{"name": "add", "arguments": {"name": "mul", "exact": true}}</tool_call>', True),
        ('<tool_call>\n{"name": "add", "arguments": {"name": "mul", "exact": true}}\n</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments": {"name": "div"', False),
        ('<tool_call>{"name": "other"', False),
        ('<tool_call>{"name": "sub", "arguments": {"any": [1]}}</tool_call> and more', True),
        ('```json\n{"name": "add", "arguments": {"x"', False),
        ('```json\n{\n  "name": "add",\n  "arguments": {"x"', False),
        ('```json\n{\n  "name": "add",\n  "arguments": {"name": "mul", "exact": true}\n}\n```', True),
        ('```json\n{"x": 1}', True),
        ('{"name": "add", "arguments": {"x"', False),
        ('{{"name": "add", "arguments": {"x"', False),
        ('<think>hm</think>\n\n{"name": "add", "arguments": {"x"', False),
        ('{"name": "sub", "arguments": {}}\n{"name": "add", "arguments": {"x"', False),
        ('So {"name": "add", "x": 1}', True),
    ):
        assert follows(served, demanded(body), text) == allowed, text


def test_further_keys_of_a_call_are_no_text():
    call = '{"name": "add", "arguments": {"x": 1}, "id": "a\\"}b", "ok": true}'
    for text in (call, f"{{{call}}}", f"<tool_call>{call}</tool_call>", f"```json\n{call}\n```"):
        reader = CallReader({"add"}, False)
        pieces = [reader.push(letter)[0] for letter in f"{text}\nDone, so."]
        assert "".join([*pieces, reader.push("", end=True)[0]]).strip() == "Done, so.", text
        assert [one["function"]["arguments"] for one in reader.calls] == ['{"x": 1}']


def test_a_call_that_the_grammar_has_not_checked_is_text():
    text = '{"arguments": {"x": 1}, "name": "add"}'
    assert CallReader({"add"}, False).push(text, end=True)[1]
    assert CallReader({"add"}, False, frozenset({"add"})).push(text, end=True) == (text, [])


@pytest.mark.parametrize("spelling", ["\u0120", "\u2581"], ids=["bytes", "spaces"])
def test_tags_of_the_vocabulary_are_text_for_a_grammar(spelling):
    """llguidance would forbid them, though the model begins its calls with them."""
    pytest.importorskip("llguidance")
    raw = Tokenizer.from_str(trained())
    if spelling == "\u2581":
        raw.decoder = decoders.Sequence([decoders.Replace(spelling, " "), decoders.ByteFallback()])
    names = "<begin>", "<tool call>", "<end>"
    raw.add_tokens([AddedToken(name, special=" " not in name) for name in names])
    begin, tag, end = map(raw.token_to_id, names)
    plain = _with_plain_tags(raw.to_str())
    assert json.loads(plain)["model"]["vocab"][f"<tool{spelling}call>"] == tag
    made = Tokenizer.from_str(plain)
    assert (made.token_to_id("<begin>"), made.token_to_id("<end>")) == (begin, end)
    size = raw.get_vocab_size()
    llm = SimpleNamespace(tokenizer=SimpleNamespace(backend_tokenizer=raw), eos={2}, vocabulary=size)
    for token, allowed in ((tag, True), (end, False)):
        matcher = Grammars(llm).process(Constraint("regex", "<tool call>a*", "tools"))._matcher
        assert matcher.consume_token(token) == allowed


def follows(served, constraint, text):
    """Whether a grammar allows a text."""
    matcher = served.server.ready._grammars.process(constraint)._matcher
    return all(map(matcher.consume_token, served.llm.tokenizer(text, add_special_tokens=False).input_ids))


def test_only_some_tools_may_be_allowed(served, monkeypatch):
    other = {"type": "function", "function": {"name": "sub"}}
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    answer = chat(served, tools=[TOOL, other], tool_choice=choice, max_tokens=200, temperature=1, seed=1)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    choice["allowed_tools"]["mode"] = "auto"
    alone = chat(served, tools=[TOOL], max_tokens=2)["usage"]["prompt_tokens"]
    assert (
        chat(served, tools=[TOOL, other], tool_choice=choice, max_tokens=2)["usage"]["prompt_tokens"] == alone
    )
    choice["allowed_tools"]["tools"][0]["function"]["name"] = "mul"
    error = chat(served, status=400, tools=[TOOL, other], tool_choice=choice)["error"]
    assert error["message"] == "tool_choice: must name one of tools (add, sub), got 'mul'"


# ------------------------------------------------------------------------------------------ grammars


@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        ({"json": SCHEMA}, lambda text: json.loads(text).keys() == {"name", "exact"}),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text).keys() == {"name", "exact"}),
        ({"regex": "[ab]{3}x"}, lambda text: len(text) == 4 and text[-1] == "x" and set(text[:3]) <= {*"ab"}),
        ({"choice": ["yes", 'n"o']}, lambda text: text in ("yes", 'n"o')),
        ({"grammar": 'start: "a" "b"+ "c"'}, lambda text: text.strip("b") == "ac" or text.startswith("ab")),
    ],
    ids=["schema", "schema as text", "regex", "choice", "grammar"],
)
def test_structured_outputs_as_in_vllm(served, structured, fits):
    answer = chat(served, structured_outputs=structured, temperature=1, seed=4, max_tokens=60)
    assert fits(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "structured",
    [{}, {"regex": "a", "choice": ["b"]}, {"regex": "("}, {"grammar": "nonsense"}, {"json": "no JSON"}],
)
def test_structured_outputs_that_are_refused(served, structured):
    assert chat(served, status=400, structured_outputs=structured)["error"]["param"] == "structured_outputs"


def test_json_objects_may_have_a_schema_as_in_llama_cpp(served):
    form = {"type": "json_object", "schema": {"const": "foo"}}
    answer = chat(served, response_format=form, max_tokens=20)
    assert answer["choices"][0]["message"]["content"] == '"foo"'
    for wrong in ({"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {}}}):
        asked = wrong | {"schema": form["schema"]}
        error = chat(served, status=400, response_format=asked)["error"]
        assert error["message"].startswith("response_format: schema belongs to the type json_object")


# ------------------------------------------------------------------------------------------ lm-eval


@pytest.mark.parametrize("ends", [True, False])
def test_log_likelihoods_that_lm_eval_reads(served, ends):
    """It drops the entry of the generated token, which is there even if that is an end token."""
    api = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    context, continuation = served.llm.encode("def add"), served.llm.tokenizer(" the").input_ids
    bias = dict.fromkeys(map(str, served.llm.eos), 100 if ends else -100)
    asked = {"prompt": context + continuation, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    outputs = httpx.post(f"{served.url}/v1/completions", json=asked | {"logit_bias": bias}).json()
    ((found, _),) = api.parse_logprobs(outputs, ctxlens=[len(context)])
    entries = post(served, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    expected = entries[len(context) : len(context) + len(continuation)]
    assert found == pytest.approx(sum(expected), abs=1e-4)

"""/v1/messages, used by Anthropic's own client: the same text and calls as a chat, whole and as events."""

import httpx
import pytest

import lookahead
from lookahead.server.messages_api import MessageAnswer, Turn
from serving import serving
from toy import save

anthropic = pytest.importorskip(
    "anthropic", reason="Anthropic's client is not installed (pip install anthropic)"
)
TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FIXED = {"model": "toy", "max_tokens": 24, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    llm = lookahead.load(folder, dtype="float32")
    with serving(llm, served_model_name="toy", api_key="s3cret") as running:
        yield running


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="s3cret", max_retries=0) as made:
        yield made


def of_chat(served, messages, **fields):
    """The first choice of a chat with the same conversation."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24} | fields
    reply = httpx.post(
        f"{served.url}/v1/chat/completions",
        json=body,
        headers={"Authorization": "Bearer s3cret"},
        timeout=240,
    )
    return reply.json()["choices"][0]


def test_a_message_has_the_text_of_a_chat_whole_and_as_events(served, client):
    user = {"role": "user", "content": "hello"}
    asked = {"messages": [user], "system": [{"type": "text", "text": "Be brief."}], **FIXED}
    whole = client.messages.create(**asked)
    text = of_chat(served, [{"role": "system", "content": "Be brief."}, user])["message"]["content"]
    assert [(block.type, block.text) for block in whole.content] == [("text", text)]
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 24)
    counted = client.messages.count_tokens(**{k: asked[k] for k in ("model", "messages", "system")})
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == total
    with client.messages.stream(**asked) as events:
        assert "".join(events.text_stream) == text
        final = events.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (text, whole.stop_reason)
    assert final.usage.output_tokens == 24
    stop = text[4:7]
    cut = client.messages.create(stop_sequences=[stop], **asked)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text.partition(stop)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(served, client, stream):
    asked = {"messages": [{"role": "user", "content": "weather?"}], "tools": [TOOL], **FIXED}
    asked |= {"tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 400}
    if stream:
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    after = client.messages.create(messages=turns, tools=[TOOL], **FIXED)
    function = {"name": "weather", "arguments": call.input}
    same = [
        asked["messages"][0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": call.id},
        {"role": "user", "content": "so?"},
    ]
    named = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    expected = of_chat(served, same, tools=[{"type": "function", "function": named}])
    assert after.content[0].text == expected["message"]["content"]


def test_errors_have_the_clients_classes(served, client, monkeypatch):
    user = [{"role": "user", "content": "hello"}]
    with pytest.raises(anthropic.BadRequestError, match="unknown or unsupported field 'stop'; did you mean"):
        client.messages.create(messages=user, **FIXED | {"extra_body": {"stop": "x"}})
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **FIXED)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="x").messages.create(messages=user, **FIXED)
    monkeypatch.setattr(MessageAnswer, "take", lambda *given: 1 / 0)
    with (
        pytest.raises(anthropic.APIStatusError, match="the server failed"),
        client.messages.stream(messages=user, **FIXED) as events,
    ):
        events.get_final_message()


def test_reasoning_of_earlier_turns_reaches_the_template():
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yes"}]
    turn = Turn.model_validate({"role": "assistant", "content": blocks})
    assert turn.messages() == [{"role": "assistant", "content": "yes", "reasoning_content": "hm"}]

"""/v1/responses, used by openai's own client: the same text, calls and JSON as a chat, whole and as events."""

import json
from types import SimpleNamespace

import httpx
import pytest

import lookahead
from lookahead.server import response_api
from lookahead.server.tools import CallReader
from serving import serving
from test_server import chat
from toy import save

openai = pytest.importorskip("openai")
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
    "strict": True,
}
FIXED = {"temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    return lookahead.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, served_model_name="toy") as running:
        yield running


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made.responses


def of_chat(served, messages, **fields):
    """The message of a chat with the same conversation."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    return chat(served, **body | fields)["choices"][0]["message"]


def test_a_response_has_the_text_of_a_chat_and_can_be_continued(served, client):
    user = {"role": "user", "content": "hello"}
    system = {"role": "system", "content": "Be brief."}
    first = client.create(model="toy", input="hello", instructions="Be brief.", metadata={"a": "b"}, **FIXED)
    text = of_chat(served, [system, user])["content"]
    assert first.output_text == text
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.usage.output_tokens, first.metadata) == (24, {"a": "b"})
    assert first.usage.input_tokens + 24 == first.usage.total_tokens
    # The instructions are not part of the conversation, as in OpenAI's API.
    more = [{"role": "user", "content": [{"type": "input_text", "text": "and now?"}]}]
    second = client.create(model="toy", input=more, previous_response_id=first.id, **FIXED)
    said = {"role": "assistant", "content": text}
    assert second.output_text == of_chat(served, [user, said, more[0]])["content"]
    # The whole conversation as items gives the same.
    items = [user, *(item.model_dump() for item in first.output), *more]
    assert client.create(model="toy", input=items, **FIXED).output_text == second.output_text


def test_events_add_up_to_the_response(served, client):
    client.create(model="toy", input="hello", **FIXED)  # later ones find the prompt in the prefix cache
    whole = client.create(model="toy", input="hello", **FIXED)
    text, kinds = "", []
    with client.stream(model="toy", input="hello", **FIXED) as stream:
        for number, event in enumerate(stream):
            kinds.append(event.type)
            assert event.sequence_number == number or event.type.endswith("delta")
            if event.type == "response.output_text.delta":
                text += event.delta
        final = event.response  # get_final_response wants a completed one
    assert text == final.output_text == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert final.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_output(served, client, stream):
    asked = {"model": "toy", "input": "weather?", "tools": [TOOL], "temperature": 0}
    asked |= {"tool_choice": {"type": "function", "name": "weather"}}
    if stream:
        with client.stream(**asked) as events:
            pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            answer = events.get_final_response()
        assert "".join(pieces) == answer.output[0].arguments
    else:
        answer = client.create(**asked)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.create(model="toy", input=[output], previous_response_id=answer.id, tools=[TOOL], **FIXED)
    function = {"name": "weather", "arguments": call.arguments}
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": call.call_id},
    ]
    given = {"tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]}
    assert after.output_text == of_chat(served, turns, **given)["content"]


def test_json_of_a_schema(served, client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = client.create(model="toy", input="x", text=form, temperature=0)
    assert json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.status == "completed"


def test_reasoning_text_and_calls_are_items_in_their_order():
    """Text and calls in turn, as only a trained model writes them."""
    answer = response_api.ResponseAnswer.__new__(response_api.ResponseAnswer)
    answer._output, answer._open, answer._number = [], False, 0
    answer.parts = [SimpleNamespace(finish="stop")]
    events = answer._extend("reasoning", "hm") + answer._extend("reasoning", "m")
    events += answer._extend("message", "Let me see.")
    reader = CallReader({"f"}, first_only=False)
    for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"x"', ": 1}}</tool_call>"):
        for call in reader.push(piece)[1]:
            events += answer._call(call)
    events += answer._extend("message", "Done.") + answer._close()
    assert [item["type"] for item in answer._output] == ["reasoning", "message", "function_call", "message"]
    assert answer._output[2]["arguments"] == '{"x": 1}'
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_x"}, "previous_response_id: the response 'resp_x' is not kept here"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"conversation": "x"}, "conversation"),
        ({"input": []}, "input"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served, fields, said):
    reply = httpx.post(f"{served.url}/v1/responses", json={"input": "x"} | fields)
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]["message"]


def test_conversations_are_kept_within_limits(served, client, monkeypatch):
    monkeypatch.setattr(response_api, "MOST_KEPT", 2)
    kept = [client.create(model="toy", input="x", **FIXED).id for _ in range(3)]
    assert len(served.server.conversations) == 2
    client.create(model="toy", input="y", previous_response_id=kept[2], store=False, **FIXED)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.create(model="toy", input="y", previous_response_id=kept[0], **FIXED)
    monkeypatch.setattr(response_api, "MOST_CHARACTERS", 1)
    client.create(model="toy", input="x", **FIXED)
    assert len(served.server.conversations) == 0


def test_an_error_in_a_stream_is_an_event(served, client, monkeypatch):
    monkeypatch.setattr(served.server.loop.engine.target, "forward", lambda *_: 1 / 0)
    events = list(client.create(model="toy", input="x", stream=True, **FIXED))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "step_failed"

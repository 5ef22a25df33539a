"""The server over HTTP: fields work as documented, completions equal plain decoding, errors are OpenAI's."""

import asyncio
import inspect
import itertools
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint

import fastapi
import httpx
import pytest
import torch

import lookahead
from lookahead.core import SettingsError
from lookahead.core.verify import as_choose
from lookahead.drafters import PromptLookup, names
from lookahead.drafters.prompt_lookup import PromptLookupDraftState
from lookahead.hf.testing import tiny_model
from lookahead.server import gate
from lookahead.server.app import create_app
from lookahead.server.grammar import Grammars
from lookahead.server.protocol import ChatRequest
from lookahead.server.settings import Settings
from lookahead.server.tools import demanded
from serving import Served, serving
from toy import VOCABULARY, save

PROMPT = "def add(a, b):\n    return a + b\ndef add(a"
#: Every token of the vocabulary occurs twice, so each token of a completion has been seen before.
REPEATED = [*range(3, VOCABULARY)] * 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    return lookahead.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_concurrent=8, max_queue=64, served_model_name="toy", prompt_rows=32) as running:
        yield running


@pytest.fixture(scope="module")
def client(served, openai):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def post(served, path="/v1/completions", status=200, **body):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | body
    if "messages" in body:
        del body["prompt"]
    reply = httpx.post(
        f"{served.url}{path}", json={k: v for k, v in body.items() if v is not ...}, timeout=60
    )
    assert reply.status_code == status, reply.text
    return reply.json()


def chat(served, text="hello", **body):
    return post(served, "/v1/chat/completions", **{"messages": [{"role": "user", "content": text}]} | body)


def no_end(served):
    """A bias against end tokens, which random models write."""
    return {str(token): -100 for token in served.llm.eos}


def banned(llm):
    """A logits processor that excludes end tokens."""

    def process(ids, scores):
        scores[0, list(llm.eos)] -= 100
        return scores

    return process


def text_of(answer):
    return [choice["text"] for choice in answer["choices"]]


def plain(served, prompt=PROMPT, **options):
    return served.llm.generate(prompt, drafter="off", **options)


# ------------------------------------------------------------------------------------------ completions


@pytest.mark.parametrize(
    "method", ["autoregressive", "adaptive:rows=16", "lookahead", "prompt-lookup", "jacobi"]
)
@pytest.mark.parametrize(
    "sampled", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.95}]
)
def test_texts_are_those_of_plain_decoding(served, method, sampled):
    options = {"lookahead": {"drafter": method, "stats": True}, "max_tokens": 40, **sampled}
    answer = post(served, prompt=REPEATED, **options)
    expected = plain(served, REPEATED, max_new_tokens=40, **(sampled if sampled["temperature"] else {}))
    assert text_of(answer) == [expected.text]
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    record = answer["choices"][0]["lookahead"]["stats"]
    assert (record["num_draft_tokens"] > 0) == (method != "autoregressive")
    histogram = record["acceptance_histogram"]
    assert sum(int(n) * steps for n, steps in histogram.items()) == record["num_accepted_draft_tokens"]


def test_same_seed_same_text_whatever_the_load(served):
    def one(seed):
        return text_of(post(served, prompt=PROMPT[: 10 + seed], temperature=1, seed=seed, max_tokens=30))[0]

    alone = [one(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == alone
    assert len(set(alone)) > 6


def test_a_wrong_token_would_be_seen(served, accept_a_wrong_node):
    options = {"lookahead": {"drafter": "lookahead"}, "max_tokens": 60}
    assert text_of(post(served, **options)) != [plain(served, max_new_tokens=60).text]


def test_n_several_prompts_and_echo(served):
    answer = post(served, prompt=["def add", "the quick"], n=2, temperature=1, seed=7, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for index, (prompt, text) in enumerate(
        zip(["def add"] * 2 + ["the quick"] * 2, text_of(answer), strict=True)
    ):
        assert text == prompt + plain(served, prompt, max_new_tokens=12, temperature=1.0, seed=7 + index).text
    ids = served.llm.encode("def add")
    assert text_of(post(served, prompt=ids)) == text_of(post(served, prompt="def add"))


def test_stop_strings_are_found_inside_accepted_paths_and_never_shown(served):
    whole = text_of(post(served, max_tokens=60))[0]
    stop = [whole[20:24], whole[30:33]]
    expected = whole[: min(whole.find(one) for one in stop)]
    answer = post(served, max_tokens=60, stop=stop, lookahead={"drafter": "lookahead"})
    assert text_of(answer) == [expected]
    assert answer["choices"][0]["finish_reason"] == "stop"
    pieces = [c["text"] for e in events(served, max_tokens=60, stop=stop) for c in e["choices"]]
    assert "".join(pieces) == expected


def test_penalties_and_bias_change_the_text_as_they_say(served):
    token = served.llm.encode("q")[0]
    assert set(post(served, logit_bias={str(token): 100})["choices"][0]["text"]) == {"q"}
    for field, value in (("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 3.0)):
        answer = post(served, **{field: value}, max_tokens=40, logit_bias={str(token): 3})
        drafted = post(
            served,
            **{field: value},
            max_tokens=40,
            logit_bias={str(token): 3},
            lookahead={"drafter": "jacobi"},
        )
        assert (
            text_of(answer)
            == text_of(drafted)
            != text_of(post(served, max_tokens=40, logit_bias={str(token): 3}))
        )
    # a biased token wins until its penalty cancels the bias
    assert text_of(post(served, logit_bias={str(token): 100}, frequency_penalty=2))[0].startswith("q")


def test_log_probabilities_are_the_targets_own(served):
    answer = post(served, logprobs=3, echo=True, max_tokens=5, lookahead={"drafter": "lookahead"})
    shown = answer["choices"][0]["logprobs"]
    ids = served.llm.encode(PROMPT)
    ids += plain(served, max_new_tokens=5).tokens
    with torch.no_grad():
        rows = served.llm.model.module(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    assert shown["token_logprobs"][0] is None
    assert shown["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert len(shown["tokens"]) == len(shown["top_logprobs"]) == len(ids)
    special = {token for token in ids if not served.llm.tokenizer.decode([token], skip_special_tokens=True)}
    parts = ["" if token in special else text for token, text in zip(ids, shown["tokens"], strict=True)]
    assert "".join(parts) == answer["choices"][0]["text"]
    known = len(served.llm.encode(PROMPT)) + 1  # a random completion may have broken characters
    assert shown["text_offset"][:known] == [len("".join(parts[:i])) for i in range(known)]
    # An end token is not part of the text, but it has an entry.
    (end,) = served.llm.eos
    ended = post(served, logprobs=1, echo=True, logit_bias={str(end): 100})["choices"][0]
    assert (ended["finish_reason"], ended["text"]) == ("stop", PROMPT)
    assert len(ended["logprobs"]["tokens"]) == len(served.llm.encode(PROMPT)) + 1
    assert chat(served, logprobs=True, logit_bias={str(end): 100})["choices"][0]["logprobs"]["content"] == []
    content = chat(served, logprobs=True, top_logprobs=2, max_tokens=4)["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert entry["logprob"] == pytest.approx(
            max(other["logprob"] for other in entry["top_logprobs"]), abs=1e-6
        )
        assert len(entry["top_logprobs"]) == 2


def test_an_echoed_prompt_does_not_block_the_event_loop(served, monkeypatch):
    decode, decoded = served.llm.tokenizer.decode, []

    def observed(ids, *rest, **more):
        # Text of several tokens is detokenized elsewhere.
        decoded.append((threading.current_thread().name, list(ids)))
        return decode(ids, *rest, **more)

    prompt = served.llm.encode("x = 1\n" * 30)
    with monkeypatch.context() as patched:
        patched.setattr(served.llm.tokenizer, "decode", observed)
        shown = post(served, prompt=prompt, logprobs=0, echo=True, max_tokens=1)["choices"][0]["logprobs"]
    for token in set(prompt):
        (thread,) = {name for name, ids in decoded if ids == [token]}
        assert thread.startswith("asyncio_")
        times = sum(ids == [token] for _, ids in decoded)
        assert times == 2 or token == prompt[0]  # its text, and whether it is special
    assert shown["tokens"][:-1] == [decode([token]) for token in prompt]


def test_predictions_seed_the_drafter_and_leave_the_text(served):
    # Capital letters, which this tokenizer never merges, so that encoding the text gives the emitted tokens.
    options = {"max_tokens": 80, "logit_bias": {str(served.llm.encode(c)[0]): 60 for c in "ABCDEFGHIJKL"}}
    whole = text_of(post(served, **options))[0]
    told = {"type": "content", "content": whole}
    options["lookahead"] = {"drafter": "prompt-lookup", "stats": True}
    answer = post(served, **options, prediction=told)
    assert text_of(answer) == [whole]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 50
    predicted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert predicted == len(served.llm.tokenizer(whole, add_special_tokens=False).input_ids)
    without = post(served, **options)
    steps = [a["choices"][0]["lookahead"]["stats"]["num_steps"] for a in (answer, without)]
    assert steps[0] < steps[1]
    wrong = post(served, **options, prediction={"type": "content", "content": "the quick brown fox " * 9})
    assert text_of(wrong) == [whole]


def test_shared_prefixes_are_found_again_and_leave_the_text(served):
    """The whole shared prefix counts as cached, although prompts are evaluated in chunks of 32 rows."""
    prompt = "the quick brown fox " * 12
    first = post(served, prompt=prompt)
    again = post(served, prompt=prompt + "jumps", lookahead={"drafter": "lookahead"})
    shared = len(served.llm.encode(prompt))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= shared - 2 > 32
    assert text_of(first) == [plain(served, prompt, max_new_tokens=12).text]
    assert text_of(again) == [plain(served, prompt + "jumps", max_new_tokens=12).text]


def test_cached_tokens_count_once_for_all_completions_of_a_prompt(served):
    for _ in range(2):  # the second time, the prompt of every completion is cached
        usage = post(served, prompt="pack my box with jugs " * 4, n=4, temperature=1, seed=1)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


# ------------------------------------------------------------------------------------------ streams


def events(served, path="/v1/completions", **body):
    """The events of a stream, parsed byte by byte."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True} | body
    if "messages" in body:
        del body["prompt"]
    with httpx.stream("POST", f"{served.url}{path}", json=body, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(reply.iter_raw())
    assert raw.endswith(b"data: [DONE]\n\n")
    frames = raw.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") and b"\n" not in frame and b"\r" not in frame for frame in frames)
    assert frames.pop() == b"data: [DONE]"
    return [json.loads(frame[6:]) for frame in frames]


def test_a_stream_byte_by_byte(served):
    whole = text_of(post(served, max_tokens=50))[0]
    found = events(
        served, max_tokens=50, stream_options={"include_usage": True}, lookahead={"drafter": "lookahead"}
    )
    *chunks, usage = found
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 50
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert len({chunk["id"] for chunk in found}) == 1
    assert all("usage" not in chunk for chunk in events(served))


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(served):
    found = events(served, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], n=2, seed=1)
    first, second = found[:2]
    assert [c["choices"][0]["index"] for c in (first, second)] == [0, 1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    ends = [c["choices"][0]["finish_reason"] for c in found if c["choices"][0]["finish_reason"]]
    assert len(ends) == 2


def test_completions_of_one_stream_are_those_of_plain_decoding(served):
    found = [
        choice
        for event in events(served, n=3, temperature=1, seed=7, max_tokens=20)
        for choice in event["choices"]
    ]
    for index in range(3):
        choices = [choice for choice in found if choice["index"] == index]
        expected = plain(served, max_new_tokens=20, temperature=1.0, seed=7 + index)
        assert "".join(choice["text"] for choice in choices) == expected.text
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + [expected.finish_reason]


def test_streamed_log_probabilities_are_those_of_the_whole_answer(served):
    options = {"logprobs": 2, "max_tokens": 20, "lookahead": {"drafter": "lookahead"}}
    whole = post(served, **options)["choices"][0]["logprobs"]
    streamed = [event["choices"][0]["logprobs"] for event in events(served, **options)]
    joined = {name: [one for part in streamed for one in part[name]] for name in whole}
    assert joined["tokens"] == whole["tokens"]
    assert joined["text_offset"] == whole["text_offset"]
    assert joined["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-5)
    assert [set(top) for top in joined["top_logprobs"]] == [set(top) for top in whole["top_logprobs"]]
    assert len(whole["tokens"]) == 20


def test_a_stream_shows_its_trees_where_asked(served):
    found = events(served, max_tokens=30, lookahead={"drafter": "lookahead", "trace": True})
    traced = [chunk["choices"][0]["lookahead"] for chunk in found[:-1]]  # the last has the finish reason
    assert sum(len(step["tokens"]) for step in traced) == 30
    assert all(len(step["tree"]) == len(step["parents"]) for step in traced[1:])


# ------------------------------------------------------------------------------------------ the official client


def test_the_official_client(client, served, openai):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    made = client.completions.create(model="toy", prompt=PROMPT, max_tokens=12, temperature=0)
    assert made.choices[0].text == plain(served, max_new_tokens=12).text
    turns = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model="toy", messages=turns, temperature=0, max_completion_tokens=12
    )
    stream = client.chat.completions.create(
        model="toy", messages=turns, temperature=0, max_completion_tokens=12, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content
    assert whole.choices[0].message.content == plain(served, turns, max_new_tokens=12).text
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="toy", prompt="x", best_of=2)


def test_the_official_client_asynchronously(served, openai):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i):
                stream = await client.completions.create(
                    model="toy", prompt=PROMPT, max_tokens=20, temperature=1, seed=i, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(8)))

    expected = [plain(served, max_new_tokens=20, temperature=1.0, seed=i).text for i in range(8)]
    assert asyncio.run(main()) == expected


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "mul"]}, "exact": {"type": "boolean"}},
    "required": ["name", "exact"],
    "additionalProperties": False,
}


def test_json_of_a_schema_with_drafting_on(client, served, openai):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    texts = set()
    for method in ("autoregressive", "lookahead", "prompt-lookup"):
        made = client.completions.create(
            model="toy",
            prompt=PROMPT,
            max_tokens=80,
            temperature=1,
            seed=2,
            extra_body={"response_format": form, "lookahead": {"drafter": method}},
        )
        texts.add(made.choices[0].text)
    (text,) = texts
    assert set(json.loads(text)) == {"name", "exact"}
    # The bias ends each string at once, and the object after its first entry.
    bias = {'"': 100, " ": 90, ":": 80, "}": 60}
    made = chat(
        served,
        response_format={"type": "json_object"},
        logit_bias={str(served.llm.encode(character)[0]): value for character, value in bias.items()},
        max_tokens=40,
        temperature=1,
        seed=3,
    )
    assert made["choices"][0]["finish_reason"] == "stop"
    assert json.loads(made["choices"][0]["message"]["content"]) == {"": ""}
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.completions.create(model="toy", prompt="x", extra_body={"response_format": bad})


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def test_tools_that_must_be_called(client):
    turns = [{"role": "user", "content": "add"}]
    choice = {"type": "function", "function": {"name": "add"}}
    options = {
        "model": "toy",
        "messages": turns,
        "tools": [TOOL],
        "temperature": 1,
        "seed": 1,
        "max_tokens": 200,
    }
    for asked in ("required", choice):
        made = client.chat.completions.create(**options, tool_choice=asked)
        (call,) = made.choices[0].message.tool_calls
        assert made.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "add"
        assert set(json.loads(call.function.arguments)) == {"name", "exact"}
        stream = client.chat.completions.create(**options, tool_choice=asked, stream=True)
        *pieces, last = [chunk.choices[0] for chunk in stream]
        called = [piece.delta.tool_calls[0] for piece in pieces if piece.delta.tool_calls]
        assert (called[0].function.name, len(called) > 5) == ("add", True)
        assert "".join(piece.function.arguments for piece in called) == call.function.arguments
        assert {piece.finish_reason for piece in pieces} == {None}
        assert (last.finish_reason, last.delta.tool_calls) == ("tool_calls", None)
        with client.chat.completions.stream(**options, tool_choice=asked) as helper:
            done = [event for event in helper if event.type == "tool_calls.function.arguments.done"]
        assert [event.arguments for event in done] == [call.function.arguments]
    answered = [
        *turns,
        made.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    again = client.chat.completions.create(**options | {"messages": answered, "max_tokens": 5})
    assert again.choices[0].finish_reason == "length"


LINKED = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/unit"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["unit", "next"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}


@pytest.mark.parametrize("schema", [LINKED, LINKED | {"$id": "https://example.org/linked"}])
@pytest.mark.parametrize("names", ["g", "fg"])
def test_the_parameters_of_a_required_tool_may_refer_to_themselves(served, schema, names):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema if name == "g" else SCHEMA}}
        for name in names
    ]
    answer = json.dumps({"name": "g", "arguments": {"unit": "C", "next": {"unit": "F", "next": None}}})
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice="required")
    allowed = Grammars(served.llm).process(demanded(body))
    ids = torch.tensor([[1]])
    tokens = served.llm.tokenizer(answer, add_special_tokens=False).input_ids
    for token in [*tokens, *served.llm.eos]:
        scores = allowed(ids, torch.zeros(1, served.llm.vocabulary))
        assert scores[0, token] == 0
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


@pytest.mark.parametrize(
    ("options", "count"), [({}, 2), ({"parallel_tool_calls": True}, 2), ({"parallel_tool_calls": False}, 1)]
)
def test_parallel_calls_may_be_forbidden(served, monkeypatch, options, count):
    """The completion is forced, because a random model makes no calls."""
    calls = [{"name": "add", "arguments": {"x": number}} for number in range(2)]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    ids = served.llm.tokenizer(text, add_special_tokens=False).input_ids
    tokens, prepare = iter([*ids, *served.llm.eos]), served.llm.prepare

    def forced(*given):
        request = prepare(*given)
        request.choose = as_choose(lambda scores, node: next(tokens))
        return request

    monkeypatch.setattr(served.llm, "prepare", forced)
    choice = chat(served, tools=[TOOL], max_tokens=len(ids) + 1, **options)["choices"][0]
    found = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert found == [call["arguments"] for call in calls][:count]
    assert choice["finish_reason"] == "tool_calls"


def test_a_history_of_calls_needs_no_tools_in_the_request(served):
    """The toy template supports no tools, so the call and its result become text."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    expected = served.llm.encode(
        'user: add\nassistant: <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n'
        "user: <tool_response>3</tool_response>\nassistant:"
    )
    assert post(served, "/tokenize", messages=turns, max_tokens=..., temperature=...)["tokens"] == expected
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = post(served, "/v1/chat/completions", messages=turns, **more)
        assert answer["usage"]["prompt_tokens"] == len(expected)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"best_of": 3}, "best_of", "best_of: Input should be 1"),
        ({"suffix": "x"}, "suffix", "suffix: needs a model with tokens for filling in the middle"),
        ({"suffix": "x", "echo": True}, "suffix", "suffix: and echo are mutually exclusive"),
        ({"temperature": "hot"}, "temperature", "temperature: Input should be a valid number"),
        ({"temperature": -1}, "temperature", "temperature: Input should be greater than or equal to 0"),
        ({"top_p": -1}, "top_p", "top_p: Input should be greater than or equal to 0"),
        ({"n": 1000}, "n", "n: a request may have at most 16 completions, got 1000"),
        ({"prompt": 5}, "prompt", "prompt: Input should be a valid string"),
        ({"prompt": ""}, "prompt", "prompt: the prompt must not be empty"),
        ({"prompt": [1, 2, 99999]}, "prompt", "prompt: token ids must be between 0 and 319, got 99999"),
        ({"prompt": "x " * 3000}, "prompt", "This model's maximum context length is 1024 tokens. However, "),
        ({"stop": [""]}, "stop", "stop must be a non-empty string"),
        ({"stop": ["x"] * 17}, "stop", "stop: List should have at most 16 items"),
        ({"stop": ["x" * 257]}, "stop.0", "at most 256 characters"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids must be 0 to 319, got 'x'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids must be 0 to 319, got '99999'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids must be 0 to 319, got '9999"),
        (
            {"lookahead": {"drafter": "9" * 5000 + ",5,15"}},
            "lookahead",
            "lookahead: drafter must be one of",
        ),
        (
            {"lookahead": {"drafter": "jacobi:block_size=" + "9" * 5000}},
            "lookahead",
            "block_size must be a whole number",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: needs stream"),
        ({"lookahead": {"drafter": "magic"}}, "lookahead", "lookahead: drafter must be one of"),
        (
            {"lookahead": {"drafter": "prompt-lookup", "window_size": 3}},
            "lookahead",
            "has no setting 'window_size'",
        ),
        (
            {"lookahead": {"window_size": 200, "ngram_size": 9, "guess_set_size": 200}},
            "lookahead",
            "lookahead: a step may have at most 256 rows",
        ),
        (
            {"lookahead": {"drafter": "adaptive:table=/etc/passwd"}},
            "lookahead",
            "only the server's own drafter may read a file (table)",
        ),
        (
            {"lookahead": {"drafter": "adaptive:head=/etc/passwd"}},
            "lookahead",
            "only the server's own drafter may read a file (head)",
        ),
        (
            {"lookahead": {"drafter": "prompt-lookup:max_ngram=4000"}},
            "lookahead",
            "max_ngram must be a whole number between 1 and 32",
        ),
        (
            {"lookahead": {"color": "blue"}},
            "lookahead.color",
            "unknown or unsupported field 'lookahead.color'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema must be given if and only if the type is json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
            "response_format",
            "json_schema must be given if and only if the type is json_schema",
        ),
        ({"prompt": ...}, "prompt", "prompt: Field required"),
        ({"lookahead": {"trace": True}}, "lookahead.trace", "lookahead.trace: needs stream"),
        (
            {"prediction": {"type": "content", "content": "x"}, "lookahead": {"drafter": "plain"}},
            "prediction",
            "prediction: the drafter",
        ),
        (
            {"prediction": {"type": "content", "content": "x " * 3000}},
            "prediction",
            "your prediction has",
        ),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "echo: with logprobs it cannot be streamed"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served, body, param, said):
    error = post(served, status=400, **body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]


def test_the_newer_limit_of_a_chat_counts(served):
    for more, count in (({}, 3), ({"max_completion_tokens": 4}, 4), ({"max_completion_tokens": -1}, 40)):
        answer = chat(served, max_tokens=3, logit_bias=no_end(served), stop=["q" * 40], **more)
        assert answer["usage"]["completion_tokens"] >= count
        if count < 40:
            assert answer["usage"]["completion_tokens"] == count


def test_a_model_that_cannot_be_loaded_is_logged_and_said(caplog):
    def load():
        raise SettingsError("no weights here")

    served = Served(load)
    with pytest.raises(SettingsError, match="no weights here"):
        served.start()
    try:
        # The engine's thread logs the error after it has set it.
        served.wait(lambda: "no weights here" in caplog.text, 10)
        for path in ("/health", "/v1/models"):
            reply = httpx.get(f"{served.url}{path}")
            assert (reply.status_code, "retry-after" in reply.headers) == (503, False)
            assert reply.json()["error"]["message"].startswith("the model could not be loaded; see its log")
    finally:
        served.stop()


def test_completions_that_never_fit_are_refused(llm):
    with serving(llm, max_concurrent=2, max_queue=1) as served:
        assert len(post(served, n=3, temperature=1, max_tokens=2)["choices"]) == 3
        error = post(served, status=400, n=4, temperature=1)["error"]
        assert error["message"] == "n: a request may have at most 3 completions, got 4"


def test_too_many_completions_are_refused_before_their_prompts_are_encoded(served, monkeypatch):
    encoded = []
    monkeypatch.setattr(served.server.ready, "encode", lambda *prompt: encoded.append(prompt) or [1])
    assert post(served, status=400, prompt=["x"] * 4000)["error"]["param"] == "n"
    assert chat(served, status=400, n=5000)["error"]["param"] == "n"
    assert not encoded


def test_unsupported_fields_are_refused_by_name(served):
    assert chat(served, status=400, top_logprobs=2)["error"]["param"] == "top_logprobs"
    assert chat(served, status=400, tool_choice="required")["error"]["param"] == "tool_choice"
    for choice, message in (
        ("any", "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"type": "function", "function": {}}, "tool_choice.function.name: Field required"),
    ):
        error = chat(served, status=400, tool_choice=choice)["error"]
        assert error["message"] == message
        assert error["param"] in message
    assert post(served, "/v1/chat/completions", 400, messages=[])["error"]["param"] == "messages"
    role = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "content" in post(served, "/v1/chat/completions", 400, messages=[role])["error"]["param"]
    for raw in (b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": NaN}', b'{"prompt":"\\ud800"}', b"[" * 50000):
        reply = httpx.post(
            f"{served.url}/v1/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), raw[:20]
    if (
        "strict_content_type" in inspect.signature(fastapi.FastAPI).parameters
    ):  # older versions take any body as JSON
        reply = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "x"}')
        assert "application/json" in reply.json()["error"]["message"]
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        reply = httpx.request(method, f"{served.url}{path}")
        assert (reply.status_code, set(reply.json())) == (status, {"error"})
    reply = httpx.post(f"{served.url}/v1/completions", content=b"x" * (5 << 20))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
    reply = httpx.post(f"{served.url}/v1/completions", content=(b"x" * (1 << 20) for _ in range(6)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("choice", "fields", "said"),
    [
        ("sub", {"tools": [TOOL]}, "tool_choice: must name one of tools (add), got 'sub'"),
        ("add", {}, "tool_choice: must name one of tools (none), got 'add'"),
    ],
)
def test_tools_that_cannot_be_required(served, choice, fields, said):
    named = {"type": "function", "function": {"name": choice}}
    error = chat(served, status=400, tool_choice=named, **fields)["error"]
    assert (error["param"], error["message"]) == ("tool_choice", said)


def test_a_format_applies_to_text_and_not_to_a_required_call(served):
    form = {"response_format": {"type": "json_object"}}
    (choice,) = chat(served, tools=[TOOL], tool_choice="required", max_tokens=200, **form)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    # Voluntary calls of strict functions and the format are two grammars.
    strict = [{"type": "function", "function": TOOL["function"] | {"strict": True}}]
    error = chat(served, status=400, tools=strict, **form)["error"]
    assert "calls must follow a schema and response_format are mutually exclusive" in error["message"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"request-1 of 2", True),
        (b"x" * 64, True),
        (b"x" * 65, False),
        (b"caf\xe9", False),
        (b"a\tb", False),
        (None, False),
    ],
    ids=["kept", "longest", "too long", "not ASCII", "not printable", "none"],
)
def test_a_request_has_the_id_that_the_client_gave_or_a_new_one(served, given, kept):
    headers = {} if given is None else {b"X-Request-Id": given}
    name = httpx.get(f"{served.url}/version", headers=headers).headers["x-request-id"]
    assert name == given.decode() if kept else re.fullmatch("[0-9a-f]{32}", name)


def test_keys_and_cross_origin(llm):
    with serving(llm, api_key="s3cret", cors_origins=["https://x.org"]) as served:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            reply = httpx.get(f"{served.url}/v1/models", headers=header)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        assert (
            httpx.get(f"{served.url}/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code
            == 200
        )
        assert httpx.get(f"{served.url}/health").status_code == 200
        reply = httpx.get(f"{served.url}/health", headers={"Origin": "https://x.org"})
        assert reply.headers["access-control-allow-origin"] == "https://x.org"
        asked = {"Origin": "https://x.org", "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{served.url}/v1/completions", headers=asked).status_code == 200


def test_keys_are_compared_in_a_time_that_says_nothing_about_them(monkeypatch):
    compared = []
    monkeypatch.setattr(gate.hmac, "compare_digest", lambda *keys: compared.append(keys) or True)
    app = create_app(Settings(api_key="s3cret"))

    async def ask():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})

    assert asyncio.run(ask()).status_code == 503  # the key passed, and the model is not loaded
    assert compared == [(b"Bearer wrong", b"Bearer s3cret")]


def test_without_a_prefix_cache_no_request_shows_what_others_asked(llm):
    with serving(llm, prefix_cache=0) as served:
        usages = [post(served, max_tokens=3, seed=1)["usage"] for _ in range(2)]
    assert usages[0] == usages[1]
    assert not usages[0]["prompt_tokens_details"]["cached_tokens"]


def test_the_models_full_name_is_accepted_unless_another_is_set(llm):
    named = lookahead.LLM(llm.model, llm.tokenizer, name="org/toy")
    with serving(named) as served:
        for name in ("toy", "org/toy"):
            assert post(served, model=name)["model"] == "toy"
            assert httpx.get(f"{served.url}/v1/models/{name}").json()["id"] == "toy"
        assert post(served, status=404, model="org")["error"]["code"] == "model_not_found"
    with serving(named, served_model_name="mine") as served:
        assert post(served, model="mine")["model"] == "mine"
        assert post(served, status=404, model="org/toy")["error"]["code"] == "model_not_found"


def test_paths_as_other_servers_have_them(served):
    for path in ("/health", "/readyz", "/livez"):
        for method in ("GET", "HEAD"):
            assert httpx.request(method, f"{served.url}{path}").status_code == 200
    for path in ("/completions", "/v1/completions/", "/completions/"):
        assert text_of(post(served, path)) == text_of(post(served))
    for path in ("/models", "/v1/models/", "/models/toy"):
        assert httpx.get(f"{served.url}{path}").status_code == 200, path
    assert httpx.post(f"{served.url}/chat/completions", json={}).json()["error"]["param"] == "messages"
    error = httpx.post(f"{served.url}/v1/embeddings", json={"input": "x"}).json()["error"]
    assert (error["code"], "sentence-transformers" in error["message"]) == ("not_supported", True)


def test_tokens_and_back(served):
    found = post(served, "/tokenize", prompt="für 東京", max_tokens=..., temperature=...)
    assert found["tokens"] == served.llm.encode("für 東京")
    assert found["count"] == len(found["tokens"])
    back = httpx.post(f"{served.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "für 東京"}
    assert httpx.post(f"{served.url}/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert httpx.post(f"{served.url}/tokenize", json={}).status_code == 400
    text = "x " * 2000  # longer than the context
    for prompt in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        assert httpx.post(f"{served.url}/tokenize", json=prompt).json()["count"] > 2000
    assert httpx.get(f"{served.url}/version").json() == {"version": "0.1.0"}


# ------------------------------------------------------------------------------------------ load


def test_a_client_that_goes_away_frees_its_slot(served, monkeypatch):
    engine, metrics = served.server.loop.engine, served.server.metrics
    step = engine.step
    monkeypatch.setattr(
        engine, "step", lambda: (time.sleep(0.005), step())[1]
    )  # the client leaves before the end
    before = metrics.success.labels("cancelled")._value.get()
    head = "POST /v1/completions HTTP/1.1\r\nHost: \r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    for stream in (True, False):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 900, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
            raw.sendall(head.format(len(body)).encode() + body)
            served.wait(lambda: served.server.loop.load_state[0] == 1)
        served.wait(lambda: served.server.loop.load_state == (0, 0))
    served.wait(lambda: metrics.success.labels("cancelled")._value.get() == before + 2, 20)
    served.wait(lambda: "num_requests_running 0.0" in httpx.get(f"{served.url}/metrics").text, 5)
    assert "kv_cache_tokens 0.0" in httpx.get(f"{served.url}/metrics").text


def test_the_row_budget_comes_from_the_cost_curve_if_none_is_set(llm):
    with serving(llm) as served:
        assert served.server.loop.engine.row_budget(1) >= 64
    with serving(llm, row_budget=7) as served:
        assert served.server.loop.engine.row_budget == 7


def test_a_full_queue_says_when_to_come_back(llm, monkeypatch):
    """The target may have fewer slots than --max-concurrent; nothing is encoded for a queue that is full."""
    with serving(llm, max_concurrent=9, max_queue=1) as served:
        served.server.loop.engine.target.max_sequences = 1
        gate = threading.Event()
        step = served.server.loop.engine.step
        served.server.loop.engine.step = lambda: (gate.wait(20), step())[1]
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(post, served, max_tokens=4) for _ in range(2)]
            served.wait(lambda: sum(served.server.loop.load_state) == 2)
            monkeypatch.setattr(served.server.ready, "encode", None)
            reply = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"})
            gate.set()
            assert all(future.result()["choices"] for future in futures)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"


class BrokenState(PromptLookupDraftState):
    error: Exception = RuntimeError("broken on purpose")

    def observe(self, *args):
        raise self.error


class Broken(PromptLookup):
    """A buggy drafter from another package."""

    def start(self, sequence):
        return BrokenState(self, sequence)


def test_a_fault_of_one_request_harms_no_other(served, monkeypatch):
    """A failing drafter ends its own request; a failing pass ends those in it; the server keeps running."""
    points = [EntryPoint("broken", f"{__name__}:Broken", names.GROUP)]
    monkeypatch.setattr(
        names, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)]
    )
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(post, served, max_tokens=60) for _ in range(4)]
        bad = pool.submit(post, served, status=500, lookahead={"drafter": "broken"})
        assert bad.result()["error"]["type"] == "server_error"
        monkeypatch.setattr(BrokenState, "error", SettingsError("not a setting of the request"))
        bad = post(served, status=500, lookahead={"drafter": "broken"})["error"]
        assert (bad["code"], bad["param"]) == ("decoding_failed", None)
        assert len({text_of(future.result())[0] for future in good}) == 1

    def failing(trees):
        raise RuntimeError("a pass that fails")

    served.server.loop.engine.target.forward = failing
    assert post(served, status=500)["error"]["code"] == "step_failed"
    assert text_of(post(served)) == [plain(served, max_new_tokens=12).text]


def test_adaptive_is_told_how_many_sequences_share_the_pass(served, monkeypatch):
    """Step times depend on the batch size, so a drafter that sees a batch of 1 uses the wrong times."""
    from lookahead.drafters.adaptive.draft_state import AdaptiveDraftState

    seen, draft = [], AdaptiveDraftState.draft

    def watched(self, max_depth, max_rows=1, batch=1):
        seen.append(batch)
        return draft(self, max_depth, max_rows, batch)

    monkeypatch.setattr(AdaptiveDraftState, "draft", watched)
    post(served, n=4, temperature=1, seed=1, max_tokens=20)
    assert max(seen) == 4


def test_fields_that_are_right_to_ignore(served):
    """OpenAI's clients send these by default."""
    plainly = text_of(post(served))
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert text_of(post(served, **fields)) == plainly
    answer = chat(served, reasoning_effort="low", **fields)
    assert answer["choices"][0]["message"]["content"] == chat(served)["choices"][0]["message"]["content"]


def test_the_chat_template_gets_the_reasoning_effort(served, monkeypatch):
    template = served.llm.tokenizer.chat_template
    shown = "effort: {{ reasoning_effort or 'default' }}, tools: {{ (tools or []) | length }}\n"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", shown + template)
    for given, heading in (
        ({}, "effort: default, tools: 0"),
        ({"reasoning_effort": "low"}, "effort: low, tools: 0"),
        ({"reasoning_effort": "high", "tools": [TOOL]}, "effort: high, tools: 1"),
    ):
        answer = chat(served, max_tokens=2, **given)
        prompt = f"{heading}\nuser: hello\nassistant:"
        assert answer["usage"]["prompt_tokens"] == len(served.llm.encode(prompt))


def test_a_prompt_over_the_servers_limit_is_told_that_limit(llm):
    with serving(llm, max_model_len=64) as served:
        message = post(served, status=400, prompt="x " * 3000)["error"]["message"]
        assert "maximum context length is 64 tokens" in message
        assert "--max-model-len" in message


def test_the_default_limit_names_its_option_too(llm):
    """Without --max-model-len, the limit is 4,096 tokens if the model allows more."""
    longer = lookahead.LLM(tiny_model(vocab_size=VOCABULARY, max_position_embeddings=8192), llm.tokenizer)
    with serving(longer) as served:
        message = post(served, status=400, prompt="x " * 8000)["error"]["message"]
        assert "maximum context length is 4096 tokens" in message
        assert "a larger --max-model-len (at most 8192 with this model)" in message
    with serving(longer, max_model_len=8192) as served:
        message = post(served, status=400, prompt="x " * 8000)["error"]["message"]
        assert "maximum context length is 8192 tokens" in message
        assert "--max-model-len" not in message


def test_a_limit_beyond_the_models_is_refused(llm):
    most = llm.context
    with pytest.raises(SettingsError, match=rf"--max-model-len must be at most {most} .*, got {most + 1};"):
        Served(lambda: llm, max_model_len=most + 1).start()


def test_an_unknown_field_names_the_one_that_was_meant(served):
    for fields, meant in (
        ({"max_new_tokens": 5}, "max_tokens"),
        ({"max_token": 5}, "max_tokens"),
        ({"stop_sequences": ["a"]}, "stop"),
        ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"num_return_sequences": 2}, "n"),
        ({"drafter": "plain"}, "lookahead"),
        ({"lookahead": {"window": 3}}, "lookahead.window_size"),
        ({"messages": []}, "prompt"),
    ):
        error = post(served, status=400, **fields)["error"]
        assert error["code"] == "unknown_field"
        assert error["message"].endswith(f"; did you mean {meant!r}?"), error["message"]
    error = chat(served, status=400, input="x")["error"]
    assert error["message"].endswith("; did you mean 'messages'?")
    error = post(served, status=400, nonsense=1)["error"]
    assert error["message"] == "unknown or unsupported field 'nonsense'"


def test_a_template_that_rejects_a_chat_names_the_field(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no pets') }}")
    with serving(llm) as served:
        error = chat(served, status=400)["error"]
    assert (error["param"], "no pets" in error["message"]) == ("messages", True)


def test_time_limits_and_the_end(llm):
    with serving(llm, request_timeout=30, max_model_len=1024) as served:
        engine = served.server.loop.engine
        step = engine.step

        def step_when_late():
            """The time is over once there are five tokens."""
            for sequence in engine.sequences:
                sequence.added -= 1000 * (len(sequence.tokens) >= 5)
            return step()

        engine.step = step_when_late
        no_end = {str(token): -100 for token in llm.eos}  # else the completion may end in time
        late = post(served, max_tokens=1000, logit_bias=no_end)
        assert late["choices"][0]["finish_reason"] == "length"
        tokens = late["usage"]["completion_tokens"]
        assert 0 < tokens < 1000
        whole = llm.generate(PROMPT, drafter="off", max_new_tokens=tokens, logits_processor=banned(llm)).text
        assert late["choices"][0]["text"] == whole
    with serving(llm, max_concurrent=1) as served, ThreadPoolExecutor(2) as pool:
        # A request that still waits when its time is over has nothing to return.
        engine, late = served.server.loop.engine, threading.Event()
        step = engine.step
        engine.step = lambda: (engine.waiting and late.wait(20), step())[1]
        running = pool.submit(post, served, max_tokens=1000, logit_bias=no_end)
        served.wait(lambda: engine.sequences and engine.sequences[0].tokens)
        waiting = pool.submit(post, served, status=504)
        served.wait(lambda: engine.waiting)
        for sequence in engine.sequences:
            sequence.added -= 1000
        late.set()
        assert waiting.result()["error"]["code"] == "timeout"
        assert running.result()["choices"][0]["finish_reason"] == "length"
    with serving(llm) as served:
        engine, stopped, found = served.server.loop.engine, threading.Event(), []
        step, steps = engine.step, itertools.count()
        # The 41st step waits for the stop, else the completion may end first; some text has been sent by then.
        engine.step = lambda: (next(steps) < 40 or stopped.wait(20), step())[1]
        with httpx.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1000, "stream": True, "logit_bias": no_end},
        ) as reply:
            for line in reply.iter_lines():
                found.append(line)
                if len(found) == 1:  # one event may cover several steps
                    served.server.loop.stop()
                    stopped.set()
        assert json.loads(found[-2][6:])["error"]["code"] == "shutting_down"
        assert httpx.get(f"{served.url}/health").status_code == 503
        assert httpx.get(f"{served.url}/livez").status_code == 200
        assert post(served, status=503)["error"]["code"] == "not_ready"


def test_a_running_request_finishes_during_a_shutdown(llm):
    with serving(llm) as served:
        engine, stopped = served.server.loop.engine, threading.Event()
        step = engine.step
        engine.step = lambda: (stopped.wait(20), step())[1]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(post, served, max_tokens=12)
            served.wait(lambda: served.server.loop.load_state != (0, 0))
            served.server.loop.stop(within=60)
            assert post(served, status=503)["error"]["code"] == "not_ready"
            stopped.set()
            answer = running.result()
        served.server.loop.join()
        assert served.server.loop.error is None
    expected = llm.generate(PROMPT, drafter="off", max_new_tokens=12)
    assert text_of(answer) == [expected.text]
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason


def test_an_error_of_the_loop_ends_the_requests_that_wait_for_it(llm, monkeypatch, caplog):
    with serving(llm) as served:
        loop = served.server.loop

        def fail(*_):
            loop._metrics.held = lambda *_: None
            raise ZeroDivisionError("a bug")

        loop._metrics.held = fail
        answer = post(served, status=500, max_tokens=12)
        assert "the server failed (ZeroDivisionError('a bug'))" in answer["error"]["message"]
        served.wait(lambda: loop.error is not None)
        assert post(served, status=503)["error"]["code"] == "not_ready"
        loop.error = None  # or the shutdown would raise it


def test_metrics_bear_the_fields_names(served):
    post(served, prompt="x = 1\n" * 12, lookahead={"drafter": "prompt-lookup"}, max_tokens=40)
    page = httpx.get(f"{served.url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_sum",
        "prompt_tokens_total",
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "rows_per_step_bucket",
        "spec_decode_num_accepted_tokens_total",
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
        "kv_cache_tokens",
    ):
        assert f"lookahead_{name}" in page, name


def test_the_example_of_the_page_runs(served, capsys):
    from pathlib import Path

    page = (Path(__file__).parent.parent / "docs" / "guides" / "server.md").read_text()
    example = (
        page.partition("```python no-run\n")[2]
        .partition("```")[0]
        .replace("http://127.0.0.1:8000", served.url)
    )
    example = example.replace("stream=True,", "stream=True, max_tokens=8,")
    names = {}
    exec(example, names)
    question = f"Rewrite in short sentences: {names['text']}"
    expected = plain(served, [{"role": "user", "content": question}], max_new_tokens=8).text
    text, _, count = capsys.readouterr().out.rpartition("\n")[0].rpartition("\n")
    assert text == expected
    assert count.endswith(" of 8 tokens came from the prediction")

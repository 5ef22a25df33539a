"""What one client does to the server harms no other: connections, long inputs, wrong bodies, logs.

Every attack goes to a server of this process on 127.0.0.1 and ends by itself.
"""

import asyncio
import io
import itertools
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import get_args

import httpx
import pytest
import torch
from pydantic import BaseModel, ValidationError
from transformers import DynamicCache

import families
import lookahead
from lookahead import llm as module
from lookahead.core.target import UNLIMITED_TOKENS
from lookahead.drafters.prompt_lookup import PromptLookupDraftState
from lookahead.hf.facts import cache_name
from lookahead.hf.model import HFModel
from lookahead.server import connections, grammar, memory
from lookahead.server.app import REQUESTS, create_app
from lookahead.server.grammar import GrammarProcess
from lookahead.server.logs import log_to_stderr
from lookahead.server.memory import most_tokens
from lookahead.server.prepare import Preparer
from lookahead.server.protocol import ChatRequest, CompletionRequest
from lookahead.server.response_api import ResponsesRequest
from lookahead.server.responses import Answer
from lookahead.server.settings import Settings
from lookahead.text.decoder import TextDecoder
from serving import serving
from test_server import chat, no_end, post
from toy import save

PROMPT = "def add(a, b):\n    return a + b\ndef add(a"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    return lookahead.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_concurrent=8, max_queue=64, served_model_name="toy") as running:
        yield running


# ------------------------------------------------------------------------------------------ connections


@contextmanager
def half_sent(served, count, sent=b"POST /v1/completions HTTP/1.1\r\nHost: local"):
    """Connections with part of a request."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", served.port))))
            opened[-1].sendall(sent)
        yield opened


def closed(connection):
    """Whether the server has closed a connection."""
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_sent_requests_do_not_keep_others_out(llm, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    with serving(llm) as served, half_sent(served, 40) as opened:
        for _ in range(3):
            assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200
        assert all(closed(connection) for connection in opened[:30])


def test_the_bound_on_connections_is_below_the_limit_of_files(monkeypatch):
    for files, most in ((256, 64), (1024, 832), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096), (40, 10)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert connections.most_connections() == most


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: local",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
    ids=["nothing", "half a header", "half a body", "half a second request"],
)
def test_a_request_must_arrive_in_time(llm, monkeypatch, sent):
    monkeypatch.setattr(connections, "SENDING", 0.3)
    with serving(llm) as served, half_sent(served, 1, sent) as (connection,):
        connection.settimeout(10)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nGET")


def test_a_client_that_reads_nothing_is_disconnected(llm, monkeypatch):
    monkeypatch.setattr(connections, "READING", 0.3)
    with serving(llm) as served:
        page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with half_sent(served, 1, page * 2000) as (connection,):
            served.wait(lambda: not served.http.server_state.connections, 20)
            connection.close()


# ------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "x"} | {f"k{i}": 1 for i in range(330_000)}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(300_000)), "x")}),
        (CompletionRequest, {"prompt": "x", "metadata": dict.fromkeys(map(str, range(300_000)), 1)}),
        (CompletionRequest, {"prompt": [""] * 900_000}),
        (CompletionRequest, {"prompt": [[]] * 900_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 150_000}]}),
        (ChatRequest, {"messages": [{}] * 1_000_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "modalities": [0] * 1_000_000}),
        (ResponsesRequest, {"input": "x", "metadata": dict.fromkeys(map(str, range(300_000)), 1)}),
    ],
    ids=[
        "keys",
        "biases",
        "metadata",
        "prompts",
        "empty prompts",
        "parts",
        "messages",
        "modalities",
        "metadata of a response",
    ],
)
def test_a_large_invalid_body_is_refused_at_its_first_error(kind, body):
    """Counted in processor time, because other tests run at the same time."""
    begin = time.thread_time()
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    assert error.value.error_count() < 3
    assert time.thread_time() - begin < 0.3


def models_in(kind):
    """The models of a type, at any depth."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {kind}.union(*(models_in(field.annotation) for field in kind.model_fields.values()))
    return set().union(*map(models_in, get_args(kind)))


def count_of_errors(kind, name, value):
    try:
        kind.model_validate({name: value})
    except ValidationError as error:
        return sum(each["loc"][0] == name for each in error.errors())
    return 0


@pytest.mark.parametrize(
    "kind",
    sorted(set().union(*map(models_in, REQUESTS.values())), key=lambda kind: kind.__name__),
    ids=lambda kind: kind.__name__,
)
def test_no_list_or_object_is_checked_beyond_its_first_error(kind):
    """One body may have two million wrong items. Each branch of a union may report an error."""
    items = (0, "x", None, {}, [])
    many = [[item] * 5000 for item in items] + [dict.fromkeys(map(str, range(5000)), item) for item in items]
    names = [field.alias or name for name, field in kind.model_fields.items()]
    assert not [name for name in names for value in many if count_of_errors(kind, name, value) > 3]


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("levels", [65, 400, 984, 5000])
def test_values_that_are_nested_too_deeply_are_refused_or_kept_as_text(served, levels):
    arguments = '{"a":' * levels + "1" + "}" * levels
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    assert chat(served, messages=turns, status=200 if levels < 100 else 400)
    if levels > 400:  # json.dumps cannot write more
        return
    schema = deep(levels)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for field in ({"tools": [tool]}, {"response_format": form}, {"chat_template_kwargs": schema}):
        assert "nested at most 64" in chat(served, status=400, **field)["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "is not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "is not supported"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "is not supported"),
        ({"const": "ab" * 250_000}, "may have at most 16384 characters"),
        ({"enum": [f"v{i}" for i in range(60_000)]}, "may have at most 16384 characters"),
    ],
    ids=["itself", "circle", "impossible", "long constant", "many values"],
)
def test_schemas_that_no_output_follows_or_that_are_too_large(served, schema, said):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert said in chat(served, status=400, response_format=form)["error"]["message"]


def test_a_schema_that_never_ends_fails_as_the_clients_error(served):
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 40},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammar_too_complex"
    assert "<state>" not in answer.text


def test_masks_are_computed_by_half_of_the_cores(llm, monkeypatch):
    """The others are left to the forward passes."""
    advance = GrammarProcess._advance
    computing = []

    def slow(*given):
        computing.append(threading.get_ident())
        time.sleep(0.01)
        return advance(*given)

    monkeypatch.setattr(GrammarProcess, "_advance", slow)
    with serving(llm) as served:
        chat(served, structured_outputs={"regex": "[a-z ]{200}"}, max_tokens=10, n=4)
    assert len(computing) >= 30
    assert len(set(computing)) <= max(1, os.cpu_count() // 2)


def test_a_grammar_has_a_limit_of_processor_time(served, monkeypatch):
    clock = itertools.count(step=0.2)
    monkeypatch.setattr(grammar, "thread_time", lambda: next(clock))
    error = chat(served, status=400, response_format={"type": "json_object"}, max_tokens=40)["error"]
    assert (error["code"], "too much processor time" in error["message"]) == ("grammar_too_complex", True)


# ------------------------------------------------------------------------------------------ preparation


def test_stop_strings_are_prepared_once_for_all_completions(served, monkeypatch):
    calls = []
    split = module.split_stops
    monkeypatch.setattr(module, "split_stops", lambda *given: (calls.append(given), split(*given))[1])
    stops = [f"{letter}x" for letter in "abcdefghijklmnop"]
    answer = post(served, n=8, stop=stops, max_tokens=2)
    assert (len(answer["choices"]), len(calls)) == (8, 1)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("completions", {"prompt": "x" * 200_000}),
        ("completions", {"suffix": "x" * 200_000}),
        ("completions", {"prediction": {"type": "content", "content": "x" * 200_000}}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}),
    ],
    ids=["prompt", "suffix", "prediction", "messages"],
)
def test_long_texts_are_refused_before_they_are_tokenized(served, monkeypatch, path, field):
    """So no preparation, which cannot be ended, takes long."""
    kind = type(served.llm.tokenizer)
    encode = kind.__call__
    lengths = []
    monkeypatch.setattr(kind, "fewest_tokens", lambda self, text: len(text) // 100, raising=False)
    monkeypatch.setattr(
        kind,
        "__call__",
        lambda self, text, **more: (lengths.append(len(text)), encode(self, text, **more))[1],
    )
    base = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {"prompt": "x"}
    reply = httpx.post(f"{served.url}/v1/{path}", json=base | field)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert max(lengths, default=0) < 200_000


def test_preparation_counts_for_the_time_limit_and_ends_with_the_client(llm, monkeypatch, logged):
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    encode = Preparer.encode

    def slow(*given, **more):
        begun.set()
        go_on.wait(20)
        ids = encode(*given, **more)
        ended.set()
        return ids

    with serving(llm, request_timeout=0.5) as served:
        monkeypatch.setattr(Preparer, "encode", slow)
        threading.Timer(1, go_on.set).start()
        assert post(served, status=504)["error"]["code"] == "timeout"
        assert ended.is_set()  # nothing works on for a request that was answered
    with serving(llm) as served:
        begun.clear()
        go_on.clear()
        with half_sent(served, 1, request_of(stream=True)):
            begun.wait(20)
        go_on.set()
        served.wait(lambda: '"status": 499' in logged(), 10)
        assert not served.server.loop.engine.busy
        # The time limit counts from the arrival of a request.
        sequences = []
        submit = served.server.loop.submit
        monkeypatch.setattr(
            served.server.loop, "submit", lambda *given: (sequences.extend(submit(*given)), sequences)[1]
        )
        begin = time.monotonic()
        post(served, max_tokens=1)
        assert begin <= sequences[0].added <= sequences[0].first_token


def request_of(**fields):
    """A whole request, as bytes."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5} | fields)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", 2 * 2 * 2 * 16 * 4),  # layers, keys and values, heads, head size, bytes
        ("lfm2", 1 * 2 * 2 * 16 * 4),  # one of its two layers attends
        ("mamba", 0),
        ("deepseek-v2", None),
    ],
)
def test_the_bytes_of_a_token_are_those_of_the_models_own_cache(family, expected):
    module = families.tiny_model(family)
    model = HFModel(module)
    sizes = []
    for length in (3, 11):
        cache = DynamicCache(config=module.config)
        with torch.no_grad():
            module(torch.zeros(1, length, dtype=torch.long), **{cache_name(module): cache})
        grows = [
            one
            for layer in cache.layers
            for one in (getattr(layer, "keys", None), getattr(layer, "values", None))
        ]
        sizes.append(sum(one.nbytes for one in grows if one is not None))
    assert model.token_bytes == (sizes[1] - sizes[0]) // 8
    assert expected in (None, model.token_bytes)
    if not model.token_bytes:
        with pytest.raises(lookahead.SettingsError, match="--kv-memory needs a model with keys and values"):
            most_tokens(model, "1m")


def test_keys_and_values_have_a_bound(llm, monkeypatch, tmp_path):
    token = llm.model.token_bytes
    cache = llm.target().cache
    cache.make_room(0, 1)
    assert token == cache.storage[0].nbytes // cache.capacity(1)
    with (
        serving(llm, kv_memory=f"{2 * 256 * token}", max_concurrent=8) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        assert served.server.ready.context == 512
        engine = served.server.loop.engine
        running = pool.submit(post, served, n=6, max_tokens=60, logit_bias=no_end(served))
        seen = set()
        served.wait(lambda: seen.add(engine.running) or running.done())
        assert max(seen) == 2
        assert len(running.result()["choices"]) == 6
    for given, said in (("5", "--kv-memory must have room for a sequence"), ("2 GB", "kv_memory must be")):
        with pytest.raises(lookahead.SettingsError, match=said):
            Preparer(llm, Settings(kv_memory=given), "toy")
    # By default, half of what is free, in the whole system or in the container.
    folder = tmp_path / "cgroup"
    folder.mkdir()
    monkeypatch.setattr(memory, "AVAILABLE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTAINER", folder)
    assert most_tokens(llm.model, None) == UNLIMITED_TOKENS
    memory.AVAILABLE.write_text(f"MemFree: 1 kB\nMemAvailable:   {token} kB\n")
    assert most_tokens(llm.model, None) == 512
    (folder / "memory.max").write_text(f"{100 * token}\n")
    (folder / "memory.current").write_text(f"{20 * token}\n")
    assert most_tokens(llm.model, None) == 40
    assert most_tokens(llm.model, "1m") == (1 << 20) // token


# ------------------------------------------------------------------------------------------ logs


@pytest.fixture
def logged(monkeypatch):
    """The lines of the log, as they are written."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    saved = {
        name: logging.getLogger(name) for name in ("lookahead.server", "uvicorn", "asyncio", "py.warnings")
    }
    state = {name: (logger.handlers, logger.propagate, logger.level) for name, logger in saved.items()}
    log_to_stderr()
    yield stream.getvalue
    logging.captureWarnings(False)
    for name, (handlers, propagate, level) in state.items():
        saved[name].handlers, saved[name].propagate = handlers, propagate
        saved[name].setLevel(level)


MARKER = "zqxmarker"


class Quoting(Exception):
    """An error whose message quotes what was being processed."""

    def __init__(self, *_):
        super().__init__(f"failed at {MARKER}")


def failing(*_, **__):
    raise Quoting


@pytest.mark.parametrize(
    "breaks",
    [
        lambda served, patch: patch.setattr(served.server.loop.engine.target, "forward", failing),
        lambda served, patch: patch.setattr(served.server.loop.engine.target, "prefill", failing),
        lambda served, patch: patch.setattr(served.llm.tokenizer, "apply_chat_template", failing),
        lambda served, patch: patch.setattr(served.llm, "prepare", failing),
        lambda served, patch: patch.setattr(TextDecoder, "push", failing),
        lambda served, patch: patch.setattr(GrammarProcess, "__call__", failing),
        lambda served, patch: patch.setattr(PromptLookupDraftState, "draft", failing),
        lambda served, patch: patch.setattr(Answer, "take", failing),
    ],
    ids=["pass", "prefill", "template", "preparing", "text", "grammar", "drafter", "answer"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_failure_puts_text_into_the_log_or_the_metrics(llm, monkeypatch, logged, breaks, stream):
    body = {
        "messages": [{"role": "user", "content": f"{MARKER} x = 1; x = 1; x = 1"}],
        "response_format": {"type": "json_object"},
        "lookahead": {"drafter": "prompt-lookup"},
        "stream": stream,
        "max_tokens": 20,
    }
    with serving(llm) as served:
        breaks(served, monkeypatch)
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body)
        assert reply.status_code >= 400 or '"error"' in reply.text
        served.wait(lambda: '"event": "request"' in logged(), 10)
        pages = logged() + httpx.get(f"{served.url}/metrics").text
    assert MARKER not in pages
    assert all(json.loads(line) for line in logged().splitlines())


def test_lines_of_libraries_are_json_too(logged):
    """asyncio wrote 95 MB of traces when there were no files left for connections."""
    for name in ("asyncio", "uvicorn.error", "py.warnings"):
        logging.getLogger(name).warning("too many %s", "files")
    assert [json.loads(line)["event"] for line in logged().splitlines()] == ["too many files"] * 3


def test_a_request_line_has_the_client_and_the_time_to_the_first_token(served, logged):
    chat(served, max_tokens=3)
    served.wait(lambda: '"event": "request"' in logged(), 10)
    (line,) = [json.loads(line) for line in logged().splitlines()]
    assert line["client"] == "127.0.0.1"
    assert 0 < line["first_token_seconds"] <= line["seconds"]


# ------------------------------------------------------------------------------------------ the name of the server


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        (
            {},
            ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST.", "192.168.0.7:80"],
            ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[", ":80", "a@b"],
        ),
        ({"allowed_host": ["box.lan"]}, ["box.lan:1", "Box.LAN", "localhost"], ["evil.example"]),
        ({"host": "0.0.0.0", "allowed_host": ["box.lan"]}, ["box.lan", "10.0.0.1"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["lookahead:8000", "evil.example"], []),
        ({"allowed_host": ["*"]}, ["anything.example"], []),
    ],
    ids=["local", "named", "named, all addresses", "all addresses", "any"],
)
def test_a_page_of_another_site_cannot_reach_a_local_server(settings, allowed, refused):
    app = create_app(Settings(**settings))

    async def ask(host):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            reply = await client.get("/version", headers={"Host": host})
        return reply.status_code, reply.json().get("error", {}).get("code")

    assert {asyncio.run(ask(host)) for host in allowed} == {(200, None)}
    assert all(asyncio.run(ask(host)) == (400, "wrong_host") for host in refused)

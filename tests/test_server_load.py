"""`python -m benchmarks.serve`: its page, its refusal of unequal completions, and another server."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

import lookahead
from benchmarks import serve as load_test
from lookahead.core import LookaheadError
from serving import serving
from toy import save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    llm = lookahead.load(save(tmp_path_factory.mktemp("toy"), max_position_embeddings=1024), dtype="float32")
    with serving(llm, served_model_name="toy") as running:
        yield running


class OtherServer(BaseHTTPRequestHandler):
    """Streams like a server without stream_options: pieces of text, and no token count."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for piece in ("def add", "(a, b)"):
            event = {"model": "another", "choices": [{"text": piece}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


def test_the_page_of_a_load_test(served, tmp_path, capsys):
    other = ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    words = ["--url", served.url, "--clients", "1,3", "--requests", "1", "--repeats", "2"]
    words += [
        "--max-new-tokens",
        "8",
        "--against",
        f"http://127.0.0.1:{other.server_port}",
        "--out",
        str(tmp_path),
    ]
    try:
        assert load_test.main(words) == 0
    finally:
        other.shutdown()
        other.server_close()
    shown = capsys.readouterr().out
    assert shown.startswith("# The server under load\n")
    assert "| 3 | adaptive |" in shown
    assert shown.count("| 12 of 12 |") == 4, "ours are equal"
    assert "| 0 of 12 |" in shown, "another server's texts are compared, too"
    facts = json.loads((tmp_path / "serve.json").read_text())
    assert "toy in float32" in facts["where"]
    assert "commit" in facts["where"]
    assert facts["command"].startswith("python -m benchmarks.serve --url")
    assert len(facts["figures"]) == 6
    counted = {(one["method"], one["clients"]): one["tokens"] for one in facts["figures"]}
    tokens = len(served.llm.encode("def add(a, b)"))
    assert counted["other", 3] == 2 * 12 * tokens, "texts without usage are counted by our tokenizer"
    assert counted["plain", 3] == 2 * 12 * 8


def test_texts_that_differ_are_no_result(served, accept_a_wrong_node):
    methods = {load_test.PLAIN: served.url, "lookahead": served.url}
    with pytest.raises(LookaheadError, match="lookahead and plain decoding differ"):
        load_test.measure(methods, ["def add(a, b):\n    return a + b\ndef add(a"], [1], 60, 1, 1)


def test_every_completion_of_a_prompt_is_compared():
    answers = count()

    class Changing(OtherServer):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            event = {"model": "ours", "choices": [{"text": f"{max(3, next(answers))}"}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Changing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(
            LookaheadError, match="two completions by plain differ in the text after 'a prompt'"
        ):
            load_test.measure({"plain": f"http://127.0.0.1:{server.server_port}"}, ["a prompt"], [1], 8, 1, 1)
    finally:
        server.shutdown()
        server.server_close()


def test_the_other_server_has_the_same_rounds_and_is_started_for_each_number_of_clients(monkeypatch):
    began, order = [], []

    @contextmanager
    def start(clients):
        began.append(clients)
        yield f"slots {clients}"

    async def measured(round, url, headers, prompts, max_tokens, requests):
        if requests > 1:
            order.append((round.clients, round.method, url))
        round.seconds += 2.0 if len(round.rates) == 2 else 1.0  # the last round is slow
        round.tokens += 10
        round.texts = {"prompt": round.method if not round.ours else "text"}

    monkeypatch.setattr(load_test, "_round", measured)
    other = load_test.Other("theirs", "", start)
    rounds = load_test.measure(
        {"plain": "ours", "adaptive": "ours"}, ["prompt"], [1, 4], 8, 1, 3, other=other
    )
    assert {tuple(each.rates) for each in rounds} == {(10.0, 10.0, 5.0)}
    assert {each.throughput for each in rounds} == {10.0}, "the median, so that one slow round does not count"
    assert "| 10.0 (5–10) | 1.00 |" in load_test.table([each for each in rounds if _timed(each)])
    assert began == [1, 4]
    for clients in (1, 4):
        once = [
            (clients, "plain", "ours"),
            (clients, "adaptive", "ours"),
            (clients, "theirs", f"slots {clients}"),
        ]
        assert [each for each in order if each[0] == clients] == once + once[::-1] + once


def _timed(round):
    """Give a simulated round the times that its line shows."""
    round.first, round.each = [0.1], [0.01]
    return True


def test_a_server_that_cannot_start_says_why(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\necho "$2 is no file"\nexit 1\n')
    program.chmod(0o755)
    with (
        pytest.raises(lookahead.SettingsError, match=r"did not start: .*nowhere.gguf is no file"),
        load_test.started_llamacpp(program, "/nowhere.gguf", 1, 4),
    ):
        pass


def test_a_load_test_that_is_asked_to_end_takes_its_servers_along(monkeypatch):
    before, ended = signal.getsignal(signal.SIGTERM), []

    @contextmanager
    def started(options):
        try:
            yield "http://127.0.0.1:1"
        finally:
            ended.append(options)

    monkeypatch.setattr(load_test, "started", started)
    monkeypatch.setattr(load_test, "measure", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as stopped:
            load_test.main([])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(ended) == 1

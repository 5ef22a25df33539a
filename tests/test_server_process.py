"""The real command starts, serves, ends streams properly on SIGTERM, and restarts after kill -9."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from time import sleep

import httpx
import pytest

from lookahead.core import SettingsError
from lookahead.server import service
from lookahead.server.app import serve
from lookahead.server.settings import Settings
from processes import forks
from serving import address_in, save_tiny, started

pytestmark = pytest.mark.slow


def ask(url, tokens, **more):
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "def", "max_tokens": tokens, "temperature": 0} | more
    )


def seen(client):
    """(status of /health, whether a connection was opened for it)."""
    events = []
    reply = client.get("/health", extensions={"trace": lambda name, info: events.append(name)})
    return reply.status_code, "connection.connect_tcp.started" in events


def test_it_comes_back_after_kill_and_ends_streams_properly(tmp_path):
    folder = save_tiny(tmp_path / "toy", 4096)
    body = {
        "prompt": "def",
        "max_tokens": 4000,
        "stream": True,
        "logit_bias": {"40": 100},
    }  # one character per token
    with started(folder, "--drafter", "prompt-lookup") as (process, url, log):
        said = [json.loads(line)["event"] for line in log()]
        assert said[0].startswith("loading and compiling ")
        assert f" for {url} " in said[0]
        assert re.fullmatch(rf"listening on {url} after \d+ s: toy, float32", said[1]), "when it answers"
        text = ask(url, 8).json()["choices"][0]["text"]
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
    with started(folder, "--drafter", "plain", "--shutdown-timeout", "0.5") as (process, url, log):
        with httpx.Client(base_url=url, limits=httpx.Limits(keepalive_expiry=60)) as client:
            assert seen(client) == (200, True)
            sleep(5.5)  # clients keep a connection for 5 seconds, the server for longer
            assert seen(client) == (200, False)
        assert ask(url, 8).json()["choices"][0]["text"] == text
        found = []
        with httpx.Client(base_url=url) as other:
            assert other.get("/health").status_code == 200
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    found.append(line)
                    if len(found) == 2:
                        process.send_signal(signal.SIGTERM)
                        while other.get("/health").status_code == 200:
                            sleep(0.001)
                        seen_503 = other.get("/health").status_code
        assert seen_503 == 503
        assert json.loads(found[-2][6:])["error"]["code"] == "shutting_down"
        assert process.wait(60) in (0, -signal.SIGTERM)
        lines = [json.loads(line) for line in log() if line[:1] == "{"]
        requests = [line for line in lines if line["event"] == "request"]
        assert [line["status"] for line in requests] == [200, 200]
        assert not any("prompts" in line or "texts" in line for line in requests)


def serve_slowly(said):
    """Serve a model that takes two minutes to load."""
    service.load_with = lambda options: sleep(120)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    with suppress(KeyboardInterrupt):
        serve(Settings(port=0), said.send)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_that_still_loads(number):
    received, said = forks().Pipe()
    process = forks().Process(target=serve_slowly, args=(said,), daemon=True)
    process.start()
    try:
        url = address_in([received.recv()])
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=9)) as client:
            assert client.get("/health", timeout=60).status_code == 503
        os.kill(process.pid, number)
        process.join(30)
        assert process.exitcode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.join()


def test_an_address_of_ipv6_is_shown_as_in_a_url(monkeypatch):
    def load(options):
        raise SettingsError("not loaded")

    monkeypatch.setattr(service, "load_with", load)
    said = []
    with pytest.raises(SettingsError, match="not loaded"):
        serve(Settings(host="::1", port=0), said.append)
    assert re.search(r" for http://\[::1\]:\d+ ", said[0])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["/nowhere/at/all"], "nowhere"),
        (["--drafter", "magic"], "magic"),
        (["--host", "300.1.1.1"], "--host"),
        (["--host", "ä..b"], "host must be an address or a host name"),
        (["--host", ""], "host must be an address or a host name"),
        (["--max-queue", "many"], "--max-queue"),
        (["--config", "/nowhere.yaml"], "--config"),
    ],
)
def test_a_wrong_setting_is_one_line(options, shown, monkeypatch, capsys):
    from lookahead.cli import main

    monkeypatch.setattr(sys, "argv", ["lookahead", "serve", *options, "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ")
    assert shown in last

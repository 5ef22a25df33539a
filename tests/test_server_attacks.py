"""What one client does to the server harms no other: connections, long inputs, wrong bodies, logs.

Every attack goes to a server of this process on 127.0.0.1 and ends by itself.
"""

import asyncio
import resource
import socket
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import lookahead
from lookahead.server import connections
from lookahead.server.app import create_app
from lookahead.server.settings import Settings
from serving import serving
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

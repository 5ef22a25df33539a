"""Test servers on a real socket: on a toy model in this process, or the command in a separate process."""

import re
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic, sleep

import httpx
import uvicorn

from lookahead.hf.testing import tiny_model
from lookahead.server.app import create_app
from lookahead.server.connections import http_config
from lookahead.server.settings import Settings
from processes import Command
from toy import VOCABULARY, tokenizer


def save_tiny(folder, positions):
    """Save a checkpoint of a family that needs no compilation, so that a new process starts quickly."""
    tiny_model("gpt_neox", vocab_size=VOCABULARY, max_position_embeddings=positions).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Served:
    """A server that runs in a thread.

    Attributes:
        url: its address. app, server, http, llm: its parts.
    """

    def __init__(self, load, **settings):
        self.app = create_app(Settings(**settings), load)
        self.server = self.app.state.server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = uvicorn.Server(http_config(self.app))
        self._thread = threading.Thread(
            target=self.http.run, kwargs={"sockets": [self._listening]}, daemon=True
        )

    @property
    def llm(self):
        return self.server.ready.llm

    def start(self):
        self._thread.start()
        self.wait(lambda: self.server.loop.ready or self.server.loop.error)
        if self.server.loop.error:
            raise self.server.loop.error
        return self

    def stop(self):
        self.http.should_exit = True
        self._thread.join(20)

    @staticmethod
    def wait(condition, seconds=240):
        """Wait for the condition."""
        end = monotonic() + seconds
        while not condition():
            assert monotonic() < end, "it took too long"
            sleep(0.005)


@contextmanager
def serving(llm, **settings):
    """Run a server on a loaded model."""
    served = Served(lambda: llm, **settings).start()
    try:
        yield served
    finally:
        served.stop()


def address_in(lines):
    """The address in the server's first line of output; "" if there is none yet."""
    found = re.search(r"http://[\w.]+:\d+", lines[0]) if lines else None
    return found[0] if found else ""


@contextmanager
def started(*options):
    """(process, address, function that reads the log) of a ready ``lookahead serve``."""
    with NamedTemporaryFile("w") as log:  # no pipe, as nobody reads while the server runs
        process = Command(["serve", *options, "--port", "0"], stderr=log.name, LOOKAHEAD_MAX_QUEUE="9")

        def lines():
            return Path(log.name).read_text().splitlines()

        try:
            end, url = monotonic() + 240, ""
            while not url or httpx.get(f"{url}/health", timeout=60).status_code != 200:
                assert monotonic() < end, "it took too long"
                assert process.poll() is None, lines()
                url = address_in(lines())
                sleep(0.05)
            yield process, url, lines
        finally:
            process.kill()
            process.wait()

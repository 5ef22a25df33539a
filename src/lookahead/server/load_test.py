"""``lookahead bench serve``: many clients against a running server, with drafting and without, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle, islice
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter, sleep
from typing import Any

import httpx

from ..core import LookaheadError, SettingsError

#: Plain decoding, and a server that is not ours.
PLAIN, OTHER = "autoregressive", "other"
#: Requests of a round at least, so that a round of one client lasts some seconds.
FEWEST = 12


@dataclass(slots=True)
class Round:
    """What so many clients at once saw.

    Attributes:
        first, each: seconds to the first token, and for each further one, by request.
        tokens: of all answers; seconds: of the round. texts: of the answers, by prompt.
        served: the model's name and dtype as the server tells them; uncounted: texts without a number of tokens.
        load: the machine's, at most.
    """

    method: str
    clients: int
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    texts: dict[str, str] = field(default_factory=dict)
    served: tuple[str, str] = ("", "")
    uncounted: list[str] = field(default_factory=list)
    load: float = 0.0

    @property
    def throughput(self) -> float:
        """Tokens per second of all clients together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """One JSON record; seconds, medians and 90 % marks."""
        return {
            "method": self.method,
            "clients": self.clients,
            "requests": len(self.first),
            "tokens": self.tokens,
            "load": self.load,
            "tokens_per_second": round(self.throughput, 2),
            "first_token_p50": round(median(self.first), 4),
            "first_token_p90": round(sorted(self.first)[int(0.9 * (len(self.first) - 1))], 4),
            "per_token_p50": round(median(self.each), 5) if self.each else None,
        }


def measure(
    methods: Mapping[str, str],
    prompts: Sequence[str],
    clients: Sequence[int],
    max_tokens: int,
    requests: int,
    repeats: int,
    api_key: str | None = None,
    told: Callable[[Round], None] = lambda one: None,
) -> list[Round]:
    """Rounds of all methods at all numbers of clients, interleaved; greedy, so that texts can be compared.

    Args:
        methods: each with the address of its server; ``PLAIN`` among them.
        requests: of a round, times the clients, ``FEWEST`` at least. They wait in one queue for whichever client is
            free: with so many each, a round would end with the slowest client alone.
        told: every round as it is done.

    Raises:
        SettingsError: no server listens at an address.
        LookaheadError: an answer that is an error, or two methods that differ in a text.
    """
    rounds: dict[tuple[str, int], Round] = {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for method, url in {url: (method, url) for method, url in methods.items()}.values():
        asyncio.run(
            _round(Round(method, 1), url, headers, prompts[:1], max_tokens, 1)
        )  # each server's first is slow
    for repeat in range(repeats):
        for count in clients:
            for method, url in methods.items():
                if method == OTHER and repeat:  # what takes one request after the other needs long for many
                    continue
                one = rounds.setdefault((method, count), Round(method, count))
                total = max(FEWEST, requests * count)
                asyncio.run(_round(one, url, headers, prompts, max_tokens, total))
                if one.uncounted:  # same vocabulary, so ours can count
                    one.tokens += _count(one.uncounted, methods[PLAIN], headers)
                    one.uncounted.clear()
                told(one)
    for (method, count), one in rounds.items():
        for prompt, text in rounds[PLAIN, count].texts.items():
            if method != OTHER and one.texts[prompt] != text:
                raise LookaheadError(f"{method} and plain decoding differ in the text after {prompt[:60]!r}")
    return list(rounds.values())


def _count(texts: list[str], url: str, headers: dict[str, str]) -> int:
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        return sum(http.post("/tokenize", json={"prompt": text}).json()["count"] for text in texts if text)


async def _round(
    one: Round, url: str, headers: dict[str, str], prompts: Sequence[str], max_tokens: int, requests: int
) -> None:
    limits = httpx.Limits(max_connections=one.clients)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        waiting = islice(cycle(prompts), requests)

        async def client() -> None:
            for prompt in waiting:
                await _ask(one, http, prompt, max_tokens)

        begin = perf_counter()
        try:
            await asyncio.gather(*(client() for _ in range(one.clients)))
        except httpx.TransportError as error:
            raise SettingsError(f"a server must listen at {url}; {error or type(error).__name__}") from None
        one.seconds += perf_counter() - begin
    if hasattr(os, "getloadavg"):
        one.load = max(one.load, round(os.getloadavg()[0], 2))


async def _ask(one: Round, http: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if one.method != OTHER:
        body["lookahead"] = {"method": one.method}
    begin, first, text, tokens, chunks = perf_counter(), 0.0, "", 0, 0
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise LookaheadError(f"the server answered {reply.status_code}: {(await reply.aread())[:300]!r}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise LookaheadError(f"the server ended a stream: {event['error']['message']}")
            first = first or perf_counter()
            text += "".join(choice["text"] for choice in event["choices"])
            chunks += 1
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            one.served = (event["model"], str(event.get("system_fingerprint") or "").rpartition("-")[0])
    if not tokens:
        one.uncounted.append(text)
        tokens = chunks
    else:
        one.tokens += tokens
    one.first.append(first - begin)
    if tokens > 1:
        one.each.append((perf_counter() - first) / (tokens - 1))
    one.texts[prompt] = text


@contextmanager
def started(load: Mapping[str, Any]) -> Iterator[str]:
    """A server in a process of its own on a free port; its address. It ends with the block."""
    words = [str(load["path_or_id"])] if "path_or_id" in load else []
    words += [f"--{name}={value}" for name, value in load.items() if name != "path_or_id"]
    with _process(["lookahead", "serve", *words], "/health") as address:
        yield address


@contextmanager
def started_llamacpp(file: str, threads: int) -> Iterator[str]:
    """The same of llama.cpp's server on a GGUF file: llama-cpp-python's, which takes one request after the other."""
    if find_spec("llama_cpp") is None:
        raise SettingsError("--against llamacpp:FILE needs llama-cpp-python; install it, or give another URL")
    words = ["llama_cpp.server", f"--model={file}", "--n_ctx=4096", f"--n_threads={threads}"]
    words += [f"--n_threads_batch={threads}", "--interrupt_requests=false", "--verbose=false"]
    with _process(words, "/v1/models") as address:
        yield address


@contextmanager
def _process(words: list[str], path: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with TemporaryFile("w+") as log:
        command = [sys.executable, "-m", *words, f"--port={port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}{path}", timeout=60).status_code == 200:
                        break
                sleep(0.2)
            if process.poll() is not None:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                raise SettingsError(f"the server did not start: {last}")
            yield address
        finally:
            process.terminate()
            process.wait()


def table(rounds: Sequence[Round]) -> str:
    """The rounds as Markdown; the last column is throughput over that of plain decoding."""
    plain = {one.clients: one.throughput for one in rounds if one.method == PLAIN}
    texts = {one.clients: one.texts for one in rounds if one.method == PLAIN}
    lines = [
        "| clients | method | first token, ms | per token, ms | tokens/s | against plain | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(rounds, key=lambda one: (one.clients, one.method != PLAIN)):
        record = one.as_dict()
        ratio = f"{one.throughput / plain[one.clients]:.2f}" if plain.get(one.clients) else ""
        each = f"{1000 * record['per_token_p50']:.1f}" if record["per_token_p50"] is not None else ""
        lines.append(
            f"| {one.clients} | {one.method} | {1000 * record['first_token_p50']:.0f} | {each} | "
            f"{record['tokens_per_second']:.1f} | {ratio} | {_equal(one.texts, texts[one.clients])} |"
        )
    return "\n".join(lines)


def _equal(texts: dict[str, str], plain: dict[str, str]) -> str:
    return f"{sum(texts[prompt] == text for prompt, text in plain.items())} of {len(plain)}"

"""A server under load: time to the first token, time per token and throughput, with drafting and without.

    python -m benchmarks.serve [MODEL] --clients 1,4,16,64        starts a server for MODEL
    python -m benchmarks.serve --url http://127.0.0.1:8000        measures a running server
    python -m benchmarks.serve --against llamacpp:FILE --bin DIR  alongside llama.cpp's own server on a GGUF file

All methods have the same number of rounds, and their order alternates. Decoding is greedy, and every completion of
ours is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from lookahead.bench.methods import PLAIN
from lookahead.bench.record import Record, describe, environment, machine, was_busy
from lookahead.bench.workloads import STDLIB
from lookahead.cli.shared import numbers
from lookahead.core import LookaheadError, SettingsError
from lookahead.records import finite

from .datasets import load_workload
from .llamacpp_build import build_of
from .quiet import machine_text, processor
from .report import command_line
from .servers import exit_on_signals, running, started_llamacpp

#: Tokens of a slot of llama.cpp's server: the prompts have at most some hundred tokens.
CONTEXT = 1024
#: Minimum requests of a round, so that a round of one client lasts some seconds.
FEWEST = 12


@dataclass(slots=True)
class Round:
    """The measurements of a number of simultaneous clients.

    Attributes:
        first: seconds to the first token, by request.
        each: seconds for each further token, by request.
        tokens: number of tokens of all answers.
        seconds: duration of all rounds.
        rates: tokens per second of all clients together, by round.
        texts: the completions, by prompt. All of ours for a prompt are equal; of another server's, the last is kept.
        served: the model's name and dtype, as the server reports them.
        uncounted: answers for which the server did not report the number of tokens.
        load: the largest load average of the machine.
        ours: whether it is a method of our server.
        extra: further fields of each request.
    """

    method: str
    clients: int
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    served: tuple[str, str] = ("", "")
    uncounted: list[str] = field(default_factory=list)
    load: float = 0.0
    ours: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Tokens per second of all clients together, the median over the rounds."""
        return median(self.rates) if self.rates else 0.0

    def as_dict(self) -> dict[str, Any]:
        """One JSON record: seconds, as medians and 90th percentiles."""
        return {
            "method": self.method,
            "clients": self.clients,
            "requests": len(self.first),
            "tokens": self.tokens,
            "load": self.load,
            "tokens_per_second": round(self.throughput, 2),
            "tokens_per_second_by_round": [round(rate, 2) for rate in self.rates],
            "first_token_p50": round(median(self.first), 4),
            "first_token_p90": round(sorted(self.first)[int(0.9 * (len(self.first) - 1))], 4),
            "per_token_p50": round(median(self.each), 5) if self.each else None,
        }


@dataclass(frozen=True)
class Other:
    """A server that is not ours.

    Attributes:
        name: its name in the table.
        about: its description on the page.
        start: starts it for a number of clients, and gives its address.
        extra: further fields of each request.
    """

    name: str
    about: str
    start: Callable[[int], AbstractContextManager[str]]
    extra: Mapping[str, Any] = field(default_factory=dict)


def measure(
    methods: Mapping[str, str],
    prompts: Sequence[str],
    clients: Sequence[int],
    max_tokens: int,
    requests: int,
    repeats: int,
    api_key: str | None = None,
    show: Callable[[Round], None] = lambda measured: None,
    other: Other | None = None,
) -> list[Round]:
    """Rounds of all methods at all numbers of clients, interleaved; greedy, so that completions can be compared.

    The order of the methods is reversed in every second round.

    Args:
        methods: the address of our server for each method; ``PLAIN`` must be among them.
        requests: requests of a round per client, at least ``FEWEST`` in all. They wait in one queue for the next
            free client, because with a fixed number for each client, only the slowest client would run at the end.
        show: called with every round when it ends.
        other: another server, started anew for each number of clients.

    Raises:
        SettingsError: no server listens at an address.
        LookaheadError: a response is an error, or two completions of our server for a prompt differ.
    """
    rounds: dict[tuple[str, int], Round] = {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    warm = partial(_round, headers=headers, prompts=prompts[:1], max_tokens=max_tokens, requests=1)
    for url in dict.fromkeys(methods.values()):  # the first request of each server is slow
        asyncio.run(warm(Round(PLAIN, 1), url))
    for count in clients:
        with other.start(count) if other is not None else nullcontext("") as address:
            urls = dict(methods)
            if other is not None:
                urls[other.name] = address
                asyncio.run(warm(Round(other.name, 1, ours=False, extra=other.extra), address))
            for repeat in range(repeats):
                for method in list(urls)[:: -1 if repeat % 2 else 1]:
                    new = Round(method, count, ours=method in methods)
                    if other is not None and method == other.name:
                        new.extra = other.extra
                    measured = rounds.setdefault((method, count), new)
                    total = max(FEWEST, requests * count)
                    tokens, seconds = measured.tokens, measured.seconds
                    asyncio.run(_round(measured, urls[method], headers, prompts, max_tokens, total))
                    if measured.uncounted:  # the vocabulary is the same, so our server can count
                        measured.tokens += _count(measured.uncounted, methods[PLAIN], headers)
                        measured.uncounted.clear()
                    measured.rates.append((measured.tokens - tokens) / (measured.seconds - seconds))
                    show(measured)
    for (method, count), measured in rounds.items():
        for prompt, text in rounds[PLAIN, count].texts.items():
            if measured.ours and measured.texts[prompt] != text:
                raise LookaheadError(f"{method} and plain decoding differ in the text after {prompt[:60]!r}")
    return list(rounds.values())


def _count(texts: list[str], url: str, headers: dict[str, str]) -> int:
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        return sum(http.post("/tokenize", json={"prompt": text}).json()["count"] for text in texts if text)


async def _round(
    measured: Round, url: str, headers: dict[str, str], prompts: Sequence[str], max_tokens: int, requests: int
) -> None:
    # A connection for each request: llama.cpp's server closes connections after some requests.
    limits = httpx.Limits(max_connections=measured.clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        waiting = islice(cycle(prompts), requests)

        async def client() -> None:
            for prompt in waiting:
                await _ask(measured, http, prompt, max_tokens)

        begin = perf_counter()
        try:
            await asyncio.gather(*(client() for _ in range(measured.clients)))
        except httpx.TransportError as error:
            raise SettingsError(f"a server must listen at {url}; {error or type(error).__name__}") from None
        measured.seconds += perf_counter() - begin
    if hasattr(os, "getloadavg"):
        measured.load = max(measured.load, round(os.getloadavg()[0], 2))


async def _ask(measured: Round, http: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if measured.ours:
        body["lookahead"] = {"drafter": measured.method}
    body |= measured.extra
    begin = perf_counter()
    first = 0.0
    text = ""
    tokens = 0
    chunks = 0
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
            measured.served = (event["model"], str(event.get("system_fingerprint") or "").rpartition("-")[0])
    if not tokens:
        measured.uncounted.append(text)
        tokens = chunks
    else:
        measured.tokens += tokens
    measured.first.append(first - begin)
    if tokens > 1:
        measured.each.append((perf_counter() - first) / (tokens - 1))
    if measured.ours and measured.texts.get(prompt, text) != text:
        raise LookaheadError(f"two completions by {measured.method} differ in the text after {prompt[:60]!r}")
    measured.texts[prompt] = text


@contextmanager
def started(load: Mapping[str, Any]) -> Iterator[str]:
    """Start a server in a separate process on a free port, and yield its address. It ends with the block."""
    words = [str(load["path_or_id"])] if "path_or_id" in load else []
    words += [f"--{name}={value}" for name, value in load.items() if name != "path_or_id"]
    with running([sys.executable, "-m", "lookahead", "serve", *words], "/health") as address:
        yield address


def table(rounds: Sequence[Round]) -> str:
    """The rounds as Markdown; the last column is throughput over that of plain decoding."""
    plain = {x.clients: x.throughput for x in rounds if x.method == PLAIN}
    texts = {x.clients: x.texts for x in rounds if x.method == PLAIN}
    lines = [
        "| clients | method | first token, ms | per token, ms | tokens/s | against plain | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in sorted(rounds, key=lambda x: (x.clients, x.method != PLAIN)):
        record = x.as_dict()
        ratio = f"{x.throughput / plain[x.clients]:.2f}" if plain.get(x.clients) else ""
        each = f"{1000 * record['per_token_p50']:.1f}" if record["per_token_p50"] is not None else ""
        lines.append(
            f"| {x.clients} | {x.method} | {1000 * record['first_token_p50']:.0f} | {each} | "
            f"{with_range(x.rates)} | {ratio} | {_equal(x.texts, texts[x.clients])} |"
        )
    return "\n".join(lines)


def with_range(rates: Sequence[float]) -> str:
    """The median, with the range if there are several."""
    rate = f"{median(rates):.1f}"
    return f"{rate} ({min(rates):.0f}–{max(rates):.0f})" if len(rates) > 1 else rate


def _equal(texts: dict[str, str], plain: dict[str, str]) -> str:
    return f"{sum(texts[prompt] == text for prompt, text in plain.items())} of {len(plain)}"


def write_report(
    rounds: Sequence[Round], asked: str, other: Other | None, threads: int, out: Path, command: str
) -> None:
    """Write the figures as ``serve.json``, and print the report.

    Args:
        rounds: the measurements.
        asked: a sentence about the prompts.
        other: the server measured alongside; None if there is none.
        threads: number of threads of the server.
        out: folder of the figures.
        command: the command line.
    """
    records: list[Record] = [measured.as_dict() for measured in rounds]
    model, version = rounds[0].served
    here = environment() | {"threads": threads, "model": model, "dtype": version.rpartition("-")[2]}
    where = describe(here)
    busy = was_busy([record | here for record in records])
    notes = [
        f"{where}.",
        f"{asked} Greedy. The run is rejected unless every completion by our methods equals plain decoding. Times "
        "are medians over requests. Tokens/s is the total of all clients: the median over the rounds, with their "
        "range. All methods have the same number of rounds, and their order alternates. Every round has the same "
        "prompts, so a server started here has no cache of prompts. Equal: of the distinct prompts, how many have "
        "the same completion as with plain decoding and as many clients.",
        f"{other.name}: {other.about}; it rounds differently, so its texts may differ." if other else "",
        machine_text(processor(), (record["load"] for record in records)),
        busy,
    ]
    text = "\n\n".join(["# The server under load", f"`{command}`", *filter(None, notes), table(rounds)])
    out.mkdir(parents=True, exist_ok=True)
    print(text)
    facts = {"command": command, "where": where, "processor": processor(), "busy": busy, "figures": records}
    (out / "serve.json").write_text(json.dumps(finite(facts), indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("model", nargs="?", help="as for lookahead.load (default: the library's default model)")
    add("--url", help="a running server (default: start one for MODEL)")
    add("--bin", type=Path, help="folder of llama.cpp's programs, for --against llamacpp:FILE")
    add(
        "--against", metavar="URL|llamacpp:FILE", help="another OpenAI-compatible server to measure alongside"
    )
    add("--api-key", default=os.environ.get("LOOKAHEAD_API_KEY"), help="API key of the server")
    add("--clients", default="1,4,16,64", help="numbers of simultaneous clients, separated by commas")
    add("--method", default="adaptive", help="methods in addition to plain, separated by commas")
    add("--requests", type=int, default=3, help=f"requests per client and round; at least {FEWEST} in all")
    add("--repeats", type=int, default=3, help="rounds of every method; their order alternates")
    add("--workload", default="stdlib", help="a data set, stdlib, or a JSON-lines file")
    add("--data", type=Path, help="folder of data sets")
    add("--max-new-tokens", type=int, default=64, help="maximum new tokens per answer")
    add("--dtype", default="auto")
    add("--threads", type=int, help="threads of the server")
    add("--out", type=Path, help="folder for serve.json")
    return made


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    exit_on_signals()
    given = parser().parse_args(words)
    try:
        rounds, asked, other, threads = _measure(given)
    except LookaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    if given.out is None:
        print(table(rounds))
    else:
        command = command_line(list(words), "python -m benchmarks.serve")
        write_report(rounds, asked, other, threads, given.out, command)
    return 0


def _asked(given: argparse.Namespace, prompts: int) -> str:
    """A sentence about the prompts."""
    about = ", functions of Python's standard library to complete" if given.workload == STDLIB else ""
    return (
        f"Prompts: {prompts} of {given.workload}{about}, without a chat template. A round has {given.requests} "
        f"requests per client, at least {FEWEST} in all, with the first prompts in turn and at most "
        f"{given.max_new_tokens} new tokens for each."
    )


def _measure(given: argparse.Namespace) -> tuple[list[Round], str, Other | None, int]:
    """(rounds, a sentence about the prompts, the other server, threads of the server)."""
    prompts = [prompt.turns[0] for prompt in load_workload(given.workload, 32, data=given.data)]
    methods = [PLAIN, *(name.strip() for name in given.method.split(","))]
    kind, _, file = (given.against or "").partition(":")
    program = (given.bin or Path()) / "llama-server"
    if kind == "llamacpp" and not program.is_file():
        raise SettingsError(
            f"--against llamacpp:FILE needs llama-server in the folder that --bin names, got --bin {given.bin}"
        )
    threads = given.threads or machine()["cores"]
    load = {"path_or_id": given.model, "dtype": given.dtype, "threads": given.threads, "prefix-cache": 0}
    with ExitStack() as servers:
        started_here = {name: value for name, value in load.items() if value is not None}
        address = given.url or servers.enter_context(started(started_here))
        other = None
        if kind == "llamacpp":
            start = partial(started_llamacpp, program, file, threads, CONTEXT)
            about = (
                f"on {Path(file).name}, without drafts, with as many slots as clients and without a cache of prompts "
                f"(version {build_of(program)})"
            )
            other = Other("llama.cpp's server", about, start, {"cache_prompt": False})
        elif given.against:
            other = Other("other", given.against, lambda clients: nullcontext(given.against))
        rounds = measure(
            {name: address for name in methods},
            prompts,
            numbers(given.clients, "--clients"),
            given.max_new_tokens,
            given.requests,
            given.repeats,
            given.api_key,
            lambda x: print(f"{x.clients} clients, {x.method}: {x.throughput:.1f} tokens/s", file=sys.stderr),
            other,
        )
    return rounds, _asked(given, len(prompts)), other, threads


if __name__ == "__main__":
    sys.exit(main())

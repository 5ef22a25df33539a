"""Time to the first token of requests that arrive while a server learns, beside a server that does not.

    python -m benchmarks.idle_learning [MODEL] [--rounds 10]

Two servers are idle; one has --learn-when-idle. As soon as its other process computes, it gets a request, which stops
that process, and then the other server gets one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep

import httpx

WORDS = "Explain what happens when number {} meets a hash table with open addressing that is nearly full."


def first_token(url: str, number: int) -> float:
    """The seconds until the first piece of an answer; the prompt is in no cache."""
    body = {"prompt": WORDS.format(number), "max_tokens": 16, "temperature": 0, "stream": True}
    begin = perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply:
        lines = filter(None, reply.iter_lines())
        next(lines)
        seconds = perf_counter() - begin
        for _ in lines:
            pass
    return seconds


def computes(server: int, children: dict[int, float]) -> bool:
    """Whether a child of the server computes, and has used processor time since the first call (Linux)."""
    found = False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid = int(stat.parent.name)
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if int(fields[1]) == server and fields[0] == "R":
            found = found or used - children.setdefault(pid, used) > 0.1
    return found


@contextmanager
def server(model: str | None, more: list[str], cache: str) -> Iterator[tuple[int, str]]:
    """(process, address) of a server with an own cache."""
    options = [*more, "--prefix-cache", "0", "--port", "0"]
    command = [sys.executable, "-m", "lookahead", "serve", *filter(None, [model]), *options]
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True, env=environment)
        try:
            while True:
                log.seek(0)
                if found := re.search(r"listening on (http://[\w.:]+)", log.read()):
                    break
                if process.poll() is not None:
                    raise SystemExit("the server has ended")
                sleep(0.2)
            yield process.pid, found[1]
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    names = {"while it learns": ["--learn-when-idle"], "without learning": []}
    times: dict[str, list[float]] = {name: [] for name in names}
    with TemporaryDirectory() as cache, ExitStack() as servers:
        started = [servers.enter_context(server(given.model, more, cache)) for more in names.values()]
        for number in range(given.rounds + 1):
            children: dict[int, float] = {}
            while number and not computes(started[0][0], children):
                sleep(0.5)
            for values, (_, url) in zip(times.values(), started, strict=True):
                values.append(first_token(url, number))
    for values in times.values():
        del values[0]  # the first request of a server includes one-off work
    for name, values in times.items():
        print(
            json.dumps(
                {
                    "request": name,
                    "median_ms": round(1000 * median(values), 1),
                    "ms": [round(1000 * value, 1) for value in sorted(values)],
                }
            )
        )


if __name__ == "__main__":
    main()

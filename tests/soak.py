"""Long-running tests: memory, long completions, a command killed repeatedly, a loaded server, damaged files.

    python tests/soak.py memory --count 1000     generations of many kinds: no growth in memory, threads or open files
    python tests/soak.py texts --count 4000      completions of this many tokens vs plain decoding
    python tests/soak.py kills --count 50        kill -9 and Ctrl-C of lookahead generate --resume
    python tests/soak.py server --count 600      64 clients for this many seconds, then SIGTERM and kill -9 under load
    python tests/soak.py fairness --count 10     how long one client waits, for this many seconds under each attack
    python tests/soak.py files --count 2000      damaged GGUF files, in a process with limited memory

``--report PAGE`` adds a section to that page. The exit status is 1 if anything is wrong. Short versions are
in test_soak.py and test_gguf_damage.py, random calls in fuzz.py, threads in test_cpu_threads.py. Linux only,
because memory and open files are read from /proc.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
import transformers

import gguf_damage
import lookahead
import toy
from crowd import Crowd
from families import tiny_model
from lookahead.bench.record import describe, environment
from lookahead.core import LookaheadError
from lookahead.core.stats import first_divergence
from serving import started

#: Fraction by which resident memory may grow after the run's first part.
GROWTH = 0.05
#: Maximum CPU time per idle second, in seconds.
IDLE = 0.05
#: Record fields that depend on measured times, which determine the rows per step.
TIMED = ("seconds", "steps", "rows")
PROMPT = "def add(a, b):\n    return a + b\ndef add(a"


@dataclass
class Findings:
    """Failed expectations and figures of the run; ``rows`` are those of a table, its head first."""

    wrong: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        """Record ``what`` as wrong unless ``holds``."""
        if not holds:
            self.wrong.append(what)


# ---------------------------------------------------------------- memory


def _abandoned(llm: Any, draw: random.Random) -> None:
    updates = llm.run([_prompt(draw), _prompt(draw)], max_new_tokens=60, batch_size=2)
    for _ in range(draw.randrange(4)):
        next(updates)


def _failing(llm: Any, draw: random.Random) -> None:
    def exclude(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + float("-inf") if ids.shape[1] > 20 else scores

    try:
        llm.generate(_prompt(draw)[:10], max_new_tokens=30, logits_processor=exclude)
    except LookaheadError:
        return
    raise AssertionError("all tokens were excluded, but there was no error")


def _called(llm: Any, draw: random.Random) -> None:
    ids = torch.tensor([_prompt(draw)] * 2)
    llm.model.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=draw.randrange(1, 60),
        do_sample=True,
        custom_generate=lookahead.generate,
        return_dict_in_generate=True,
        output_scores=True,
    )


def _prompt(draw: random.Random) -> list[int]:
    return [3 + draw.randrange(90) for _ in range(draw.randrange(4, 40))] * draw.randrange(1, 4)


def memory(count: int, leak: Callable[[int], Any] | None = None) -> Findings:
    """Run ``count`` generations of many kinds on the compiled and the transformers path.

    Args:
        count: number of generations.
        leak: called with each generation's number, to test that leaks are detected.
    """
    # Kinds of generations.
    found = Findings()
    first = max(count // 10, 30)
    llms = [lookahead.LLM(tiny_model(family, eos_token_id=None)) for family in ("llama", "gemma2")]
    small = lookahead.Adaptive(max_entries=1000)
    warm = [replace(small, state=lookahead.AdaptiveState(small)) for llm in llms]

    def ordinary(**options: Any) -> Callable[[Any, random.Random], Any]:
        return lambda llm, draw: llm.generate(_prompt(draw), max_new_tokens=draw.randrange(1, 80), **options)

    kinds: list[Callable[[Any, random.Random], Any]] = [
        ordinary(),
        ordinary(temperature=1.0),
        ordinary(drafter="lookahead"),
        ordinary(drafter="plain"),
        ordinary(drafter="prompt-lookup", temperature=0.7, top_p=0.9),
        lambda llm, draw: llm.generate(_prompt(draw), max_new_tokens=50, drafter=warm[llms.index(llm)]),
        lambda llm, draw: llm.generate([_prompt(draw) for _ in range(4)], max_new_tokens=30, batch_size=2),
        _abandoned,
        _failing,
        _called,
    ]

    # Generate, and record resource use after the first part.
    before: tuple[int, int, int] | None = None
    for number in range(count):
        draw = random.Random(number)
        kinds[number % len(kinds)](llms[number // len(kinds) % 2], draw)
        if leak is not None:
            leak(number)
        if number == first - 1:
            before = resources()
    after = resources()
    assert before is not None, f"at least {first} generations are needed, got {count}"

    # Threads should not spin when idle.
    started = time.process_time()
    time.sleep(1.0)
    busy = time.process_time() - started
    for what, old, new, room in zip(
        ("MiB of memory", "threads", "open files"), before, after, (GROWTH, 0.0, 0.0), strict=True
    ):
        found.facts.append(f"{what} after {first} and after {count} generations: {old} and {new}")
        found.expect(new <= old * (1 + room), found.facts[-1])
    found.facts.append(f"processor time in an idle second: {busy:.3f} s")
    found.expect(busy <= IDLE, found.facts[-1])
    return found


def resources() -> tuple[int, int, int]:
    """Resident memory in MiB, threads, open files."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident >> 20, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- long completions


def texts(count: int) -> Findings:
    """Decode ``count`` tokens with three models, greedy and sampled; each must equal plain decoding."""
    found = Findings()
    compared = 0
    limit = {"max_position_embeddings": count + 64, "initializer_range": 0.1, "eos_token_id": None}
    models = {
        "llama": tiny_model("llama", **limit),
        "mistral with a window of 100": tiny_model("mistral-sliding", **{**limit, "sliding_window": 100}),
        "gemma2": tiny_model("gemma2", **{**limit, "sliding_window": 100}),
    }
    prompt = torch.tensor([[5, 6, 7, 5, 6, 9, 11, 5, 6]])
    for name, model in models.items():
        model.generation_config.eos_token_id = None
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            options |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count}
            torch.manual_seed(0)
            plain = model.generate(prompt, **options)[0].tolist()
            for drafter in (lookahead.Adaptive(rows=32), lookahead.Lookahead(7, 5, 7)):
                stats: list[Any] = []
                torch.manual_seed(0)
                ours = model.generate(
                    prompt,
                    custom_generate=lookahead.generate,
                    drafter=drafter,
                    stats=stats,
                    **options,
                )[0].tolist()
                place = first_divergence(ours, plain)
                kind = f"{name}, {'sampled' if options['do_sample'] else 'greedy'}, {drafter}"
                found.expect(place is None, f"{kind}: differs at token {place}")
                found.expect(stats[0].accepted > 0, f"{kind}: no draft was accepted")
                compared += count
    found.facts.append(f"{compared} tokens in texts of {count}, of {', '.join(models)}")
    return found


# ---------------------------------------------------------------- kills and interrupts


def kills(count: int) -> Findings:
    """Alternate kill -9 and SIGINT at random moments. The output must equal that of an uninterrupted run."""
    found = Findings()
    moments = random.Random(count)
    with tempfile.TemporaryDirectory() as folder:
        model, source, out, whole = (Path(folder) / name for name in ("model", "in", "out", "whole"))
        toy.save(model)
        rows = [{"id": ("same", None, i)[i % 3], "prompt": PROMPT[i % 20 :]} for i in range(4 * count + 12)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        base = [
            sys.executable,
            "-m",
            "lookahead",
            "generate",
            str(model),
            "--input",
            str(source),
            "--batch-size",
            "3",
            "--max-new-tokens",
            "40",
            "--ignore-eos",
            "--temperature",
            "0.8",
            "--seed",
            "5",
        ]
        began = time.monotonic()
        _to_the_end([*base, "--output", str(whole)])
        length = time.monotonic() - began
        command = [*base, "--output", str(out), "--resume"]
        for number in range(count):
            sort = signal.SIGKILL if number % 2 == 0 else signal.SIGINT
            _signalled(command, out, sort, moments, length, found)
        _to_the_end(command)
        compare(out, whole, found)
    found.facts.append(
        f"{count} signals (kill -9 and Ctrl-C in turn), {len(rows)} prompts: each has its one result"
    )
    return found


def _start(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(lookahead.__file__).parents[1])}
    # A shell's background jobs inherit an ignored SIGINT, unlike a user's commands.
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _to_the_end(command: list[str]) -> None:
    process = _start(command)
    _, said = process.communicate()  # also closes the pipe
    assert process.returncode == 0, said


def _signalled(
    command: list[str],
    out: Path,
    sort: signal.Signals,
    moments: random.Random,
    length: float,
    found: Findings,
) -> None:
    """Run the command, end it at a random moment (while it loads, or some records later), and check its file."""
    # Wait for the moment.
    before = out.read_bytes() if out.exists() else b""
    process = _start(command)
    loading = moments.random() < 0.25
    wanted = before.count(b"\n") + moments.randrange(1, 5)
    deadline = time.monotonic() + (moments.random() * length if loading else 120)
    while process.poll() is None and time.monotonic() < deadline:
        if not loading and out.exists() and out.read_bytes().count(b"\n") >= wanted:
            time.sleep(moments.random() * 0.02)
            break
        time.sleep(0.001)

    # Send the signal. Complete records must remain.
    process.send_signal(sort)
    _, said = process.communicate(timeout=120)
    after = out.read_bytes() if out.exists() else b""
    kept = before[: before.rfind(b"\n") + 1]
    found.expect(after.startswith(kept), f"after {sort.name}: records that were there are gone")
    if sort is signal.SIGKILL:  # add a partial line, as after a power failure during a write
        with out.open("ab") as file:
            file.write(b'{"id": "same", "outp')
    elif b"\n" in after[len(kept) :]:  # it was decoding, so the command handled the interrupt
        found.expect(process.returncode in (0, 130), f"after {sort.name}: status {process.returncode}")
        found.expect("Traceback" not in said, f"after {sort.name}: {said}")
        found.expect(after.endswith(b"\n"), f"after {sort.name}: a torn line")


def compare(out: Path, whole: Path, found: Findings) -> None:
    """Check that both files have exactly one result per input line, and that these are equal."""
    given = _known(out)
    expected = _known(whole)
    for line, records in expected.items():
        count = len(given.get(line, []))
        found.expect(count == 1, f"input line {line} has {count} results")
        found.expect(
            count == 0 or given[line][:1] == records, f"input line {line} has another result than in one run"
        )
    found.expect(set(given) <= set(expected), "there are results of lines that are not in the input")


def _known(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Input line -> its records, without times and time-dependent fields."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["line"], []).append({k: v for k, v in record.items() if k not in TIMED})
    return found


# ---------------------------------------------------------------- the server


def server(seconds: int, clients: int = 64) -> Findings:
    """Run ``lookahead serve`` with many clients, then send SIGTERM, kill -9 it, and restart."""
    # Run the server under load.
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        path = toy.save(Path(folder), max_position_embeddings=512)
        command = (
            path,
            "--dtype",
            "float32",
            "--max-concurrent",
            16,
            "--max-queue",
            24,
            "--max-body-bytes",
            100_000,
            "--shutdown-timeout",
            0.05,
        )
        crowds = []
        resident = []
        with started(*command) as (process, url, _):
            for _ in range(2):  # caches grow in the first half, and memory must not grow in the second
                crowds.append(Crowd(url, seconds / 2).run(clients))
                resident.append(_resident(process.pid))
                found.expect(not crowds[-1].lost, f"connections broke: {crowds[-1].lost[:3]}")
            ended = _ended(process, url, signal.SIGTERM, found)
        found.expect(not ended.cut, f"SIGTERM broke {ended.cut} streams without an error event")
        with started(*command) as (process, url, _):
            killed = _ended(process, url, signal.SIGKILL, found)
        with started(*command) as (_, url, _):
            again = Crowd(url, 2).run(clients)
            found.expect(not again.lost, f"connections broke: {again.lost[:3]}")
        crowds += [ended, killed, again]
        llm = lookahead.load(path, dtype="float32")
        different = [line for crowd in crowds for line in crowd.differences(llm)]

    # Check the answers.
    statuses: dict[int, int] = {}
    for crowd in crowds:
        found.wrong += crowd.wrong
        for status, number in crowd.statuses.items():
            statuses[status] = statuses.get(status, 0) + number
    found.wrong += different
    allowed = {200, 400, 413, 429, 503}  # 503 while shutting down
    found.expect(set(statuses) <= allowed, f"statuses other than {sorted(allowed)}: {statuses}")
    for status in (200, 400, 413):
        found.expect(statuses.get(status, 0) > 0, f"no answer had status {status}")

    # Check memory, and report.
    half, whole = resident
    found.expect(whole <= half * 1.1 + 64, f"memory grew from {half} to {whole} MiB in the second half")
    texts_seen = sum(len(crowd.texts) for crowd in crowds)
    found.facts += [
        f"{clients} clients for {seconds} s: {sum(statuses.values())} requests answered, by status "
        + ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items())),
        f"{sum(c.completed for c in crowds)} texts completed, {sum(c.cancelled for c in crowds)} streams left by "
        f"their clients, {statuses.get(429, 0)} requests refused by a full queue",
        f"{texts_seen} different texts compared with plain decoding, {len(different)} differ",
        f"MiB of memory of the server after half of the time and at its end: {half} and {whole}",
        f"SIGTERM under load: {ended.ended} streams ended with an error event, {ended.cut} without; "
        f"kill -9 under load: {killed.cut} streams broke; after both the next server served again",
    ]
    return found


def _resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _ended(process: Any, url: str, sort: signal.Signals, found: Findings) -> Crowd:
    """End a server with a signal under load from 16 clients. Returns what they observed."""
    crowd = Crowd(url, 120)
    thread = Thread(target=crowd.run, args=(16,))
    thread.start()
    while thread.is_alive() and crowd.completed < 16:
        time.sleep(0.01)
    process.send_signal(sort)
    status = process.wait(60)
    crowd.end = 0.0
    thread.join()
    expected = (0, -signal.SIGTERM) if sort is signal.SIGTERM else (-signal.SIGKILL,)
    found.expect(status in expected, f"after {sort.name} the server's status was {status}")
    found.expect(crowd.completed > 0, f"no text was completed before {sort.name}")
    return crowd


# ---------------------------------------------------------------- one client against another

#: Seconds that another client's stream may pause.
PAUSE = 1.0
LONG = "The river runs past the old mill, and the children of the village count the boats. " * 160


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode()


def _schema(schema: dict[str, Any], n: int = 16) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(response_format=form, n=n, max_tokens=200)


def attacks() -> dict[str, tuple[str, list[bytes]]]:
    """What one client sends again and again, by name: a path, and bodies in turn."""
    many = dict.fromkeys(map(str, range(250_000)), "x")
    prompts = [f"{number} {LONG}"[:9000] for number in range(16)]
    arguments = '{"a":' * 984 + "1" + "}" * 984
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called]}]
    complete, chat = "/v1/completions", "/v1/chat/completions"
    return {
        "nothing": (complete, []),
        "16 different long prompts, 64 tokens each": (
            complete,
            [json.dumps({"prompt": prompts, "max_tokens": 64}).encode()],
        ),
        "one long prompt, n = 16": (
            complete,
            [json.dumps({"prompt": LONG[:9000], "n": 16, "max_tokens": 64}).encode()],
        ),
        "400 half-sent requests": ("", []),
        "a prompt of 2,000,000 digits": (complete, [json.dumps({"prompt": "17" * 1_000_000}).encode()]),
        "16 stop strings of 256 characters, n = 16": (
            chat,
            [_chat(stop=[f"{letter}b" * 128 for letter in "abcdefghijklmnop"], n=16, max_tokens=64)],
        ),
        "a schema with a constant of 16,000 characters, n = 16": (chat, [_schema({"const": "ab" * 8000})]),
        "a schema of 16,000 characters of choices, n = 16": (
            chat,
            [_schema({"enum": [f"value {number}" for number in range(1000)]})],
        ),
        "a schema with a constant of 500,000 characters": (chat, [_schema({"const": "ab" * 250_000})]),
        "invalid bodies of 4 MB": (
            complete,
            [
                json.dumps({"prompt": "x"} | fields).encode()
                for fields in (
                    {f"k{number}": 1 for number in range(250_000)},
                    {"logit_bias": many},
                    {"metadata": many},
                    {"prompt": [""] * 900_000},
                )
            ],
        ),
        "arguments nested 984 deep": (chat, [_chat(messages=turns)]),
    }


class Attacker(Thread):
    """A client that sends the same bodies until it is stopped.

    Attributes:
        statuses: the count of each.
    """

    def __init__(self, url: str, path: str, bodies: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._path = path
        self._bodies = bodies
        self.statuses: Counter[int] = Counter()
        self._over = Event()
        self._http = httpx.Client(base_url=url, timeout=300)

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        with ExitStack() as held:
            while not self._over.is_set():
                if not self._path:
                    self._send_halves(held)
                for body in self._bodies if not self._over.is_set() else ():
                    with suppress(httpx.HTTPError, RuntimeError):  # also after ``close``
                        self.statuses[
                            self._http.post(self._path, content=body, headers=headers).status_code
                        ] += 1
                self._over.wait(0.01)

    def close(self) -> None:
        """Disconnect, which ends what the server does for this client."""
        self._over.set()
        self._http.close()

    def _send_halves(self, held: ExitStack) -> None:
        address = urlsplit(self._url)
        for _ in range(400 if not self.statuses[0] else 0):
            with suppress(OSError):
                connection = socket.create_connection((address.hostname, address.port), 5)
                held.enter_context(connection).sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
                self.statuses[0] += 1


def _until_idle(url: str) -> None:
    while "lookahead_num_requests_running 0.0" not in httpx.get(f"{url}/metrics", timeout=60).text:
        time.sleep(0.1)


def waits(url: str, seconds: float) -> tuple[int, float, float]:
    """(texts, longest wait for a first token, longest pause after it) of a client with short requests, one by one."""
    end = time.monotonic() + seconds
    texts, first, pause = 0, 0.0, 0.0
    body = {"prompt": "Once upon a time", "max_tokens": 32, "stream": True}
    with httpx.Client(base_url=url, timeout=300) as http:
        while time.monotonic() < end:
            last = time.monotonic()
            begun = False
            with http.stream("POST", "/v1/completions", json=body | {"seed": texts}) as reply:
                assert reply.status_code == 200, reply.status_code
                for line in reply.iter_lines():
                    now = time.monotonic()
                    if not line:
                        continue
                    if begun:
                        pause = max(pause, now - last)
                    else:
                        first = max(first, now - last)
                    begun = True
                    last = now
            texts += 1
    return texts, first, pause


def fairness(seconds: int, *options: object) -> Findings:
    """Measure how long a client waits while another one attacks the server, or uses as much as it may.

    Args:
        seconds: for each attack.
        *options: of ``lookahead serve``.
    """
    found = Findings()
    found.rows.append(("the other client sends", "statuses", "texts", "longest first token", "longest pause"))
    with started(*options, "--max-queue", 256) as (process, url, _):
        waits(url, 1)
        for name, (path, bodies) in attacks().items():
            attackers = [Attacker(url, path, bodies) for _ in range(1 if "prompt" in name else 2)]
            for attacker in attackers if bodies or not path else []:
                attacker.start()
            time.sleep(0.5)
            texts, first, pause = waits(url, seconds)
            for attacker in attackers:
                attacker.close()
            _until_idle(url)
            statuses = sum((attacker.statuses for attacker in attackers), Counter())
            said = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()) if status)
            found.rows.append((name, said or "-", texts, f"{first:.2f} s", f"{pause:.2f} s"))
            found.expect(pause < PAUSE, f"{name}: a stream paused for {pause:.2f} s")
            found.expect(process.poll() is None, f"{name}: the server ended")
            found.expect(not any(status >= 500 for status in statuses), f"{name}: statuses {said}")
            print(f"{name}: {said or '-'}; {texts} texts, {first:.2f} s, {pause:.2f} s", flush=True)
    found.facts.append(
        f"a client with short requests for {seconds} s, beside each; a pause may take {PAUSE} s"
    )
    return found


# ---------------------------------------------------------------- damaged files


def files(count: int) -> Findings:
    """Load ``count`` damaged GGUF files (``gguf_damage``). Each decodes or is rejected in one line."""
    report = gguf_damage.fuzz(count)
    names = ", ".join(architecture for architecture, _ in gguf_damage.FILES)
    outcomes = report.outcomes
    counts = report.counts
    facts = [
        f"{count} files of {names}; limit of memory: {gguf_damage.ALLOWANCE >> 20} MiB more than whole files take",
        f"{outcomes['refused']} refused in one line, {outcomes['decoded']} decoded",
        f"only counts were wrong in {counts.total()} of them: {counts['refused']} refused, "
        f"{counts['decoded']} decoded (which must give the tokens of the whole file)",
    ]
    return Findings(report.found, facts)


# ---------------------------------------------------------------- the command


FORMS = {
    "memory": (memory, 1000),
    "texts": (texts, 4000),
    "kills": (kills, 50),
    "server": (server, 600),
    "fairness": (fairness, 10),
    "files": (files, 2000),
}


def table(rows: list[tuple[Any, ...]]) -> list[str]:
    """The lines of a table; none without rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [*lines[:1], "|---" * len(rows[0]) + "|", *lines[1:], ""] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--count", type=int, help="generations, tokens of a text, signals, seconds or files")
    parser.add_argument("--report", type=Path, help="add a section to this page")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    form, usual = FORMS[given.form]
    count = given.count if given.count is not None else usual
    found = form(count)
    real = form is fairness
    dtype = "packed weights" if real else "packed weights and float32" if form is files else "float32"
    model = "SmolLM2-135M-Instruct" if real else "tiny random models"
    lines = [
        f"## {given.form.capitalize()}",
        "",
        f"`python tests/soak.py {given.form} --count {count}`: **{len(found.wrong)} findings**",
        "",
        f"{describe(environment() | {'model': model, 'dtype': dtype})}.",
        "",
        *table(found.rows),
        *(f"- {line}" for line in found.facts),
        *(f"- **wrong**: {line}" for line in found.wrong),
    ]
    section = "\n".join(lines) + "\n"
    if given.report is not None:
        with given.report.open("a") as page:
            page.write("\n" + section)
    print(section)
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()

"""The first chat of a new user, answer by answer: the default drafter and plain decoding.

    python -m benchmarks.first_chat --model FILE.gguf [--rounds 3] [--temperature 0] [--pause 0]

A chat begins with empty caches: packed weights, cost curve and base table are made while it runs, as for a user who
has run no other command. Whole chats alternate, default first. Seconds are wall-clock time from the message to the
statistics after the answer, so measuring the cost curve counts too, and so does what counting the table takes from
decoding. Each message comes after a pause, in which a person would type it; without pauses, the count runs beside all
answers.
All chats have the same seed or are greedy, so the answers of both drafters must be equal.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, NamedTuple

from .report import markdown_table

MESSAGES = (
    "What is a hash table, and when should I use one?",
    "Show one in Python with open addressing.",
    "Explain what happens when it becomes too full.",
    "Write tests for it with pytest.",
    "How does that differ from a balanced tree?",
    "Summarize our conversation in five sentences.",
)
#: The statistics of an answer (``lookahead.cli.console.summary``).
STATISTICS = re.compile(r"(\d+) tokens(?:, \d+ of them in (\d+) steps)?.* tokens/s")


class Reply(NamedTuple):
    """One answer: its tokens, forward passes after the prefill, and seconds."""

    tokens: int
    passes: int
    seconds: float


def talk(command: list[str], environment: dict[str, str], pause: float) -> tuple[list[Reply], str]:
    """The answers of one chat to ``MESSAGES``, each sent after so many seconds, and all their text."""
    chat = subprocess.Popen(
        command,
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
        encoding="utf-8",
        env=environment,
        start_new_session=True,
    )
    to, shown, noted = chat.stdin, chat.stdout, chat.stderr
    assert to is not None
    assert shown is not None
    assert noted is not None
    texts: list[str] = []
    reading = threading.Thread(target=lambda: texts.append(shown.read()))
    reading.start()
    next(line for line in noted if "/help" in line)
    replies = []
    for message in MESSAGES:
        sleep(pause)
        begin = perf_counter()
        to.write(f"{message}\n/stats\n")
        to.flush()
        found = next(filter(None, map(STATISTICS.search, noted)))
        replies.append(Reply(int(found[1]), int(found[2] or 0), perf_counter() - begin))
    to.write("/exit\n")
    to.close()
    reading.join()
    chat.wait()
    with suppress(ProcessLookupError):  # a table that is still being counted would disturb the next chat
        os.killpg(chat.pid, signal.SIGKILL)
    return replies, "".join(texts)


def run(model: str, drafter: str, options: list[str], pause: float) -> tuple[list[Reply], str]:
    """One chat with empty caches."""
    command = [sys.executable, "-m", "lookahead", "chat", model, "--drafter", drafter, *options]
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        return talk(command, os.environ | {"XDG_CACHE_HOME": cache}, pause)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds before each message")
    parser.add_argument("--temperature", help="default: as the model suggests, with seed 1")
    given, rest = parser.parse_known_args()
    sampling = ["--seed", "1"] if given.temperature is None else ["--temperature", given.temperature]
    options = ["--max-new-tokens", str(given.tokens), *sampling, *rest]
    rounds: list[dict[str, list[Reply]]] = []
    for _ in range(given.rounds):
        chats = {
            drafter: run(given.model, drafter, options, given.pause) for drafter in ("adaptive", "plain")
        }
        rounds.append({drafter: replies for drafter, (replies, _) in chats.items()})
        for number, (ours, plain) in enumerate(zip(*rounds[-1].values(), strict=True), 1):
            print(f"round {len(rounds)}, answer {number}: {ours}, plain {plain}", flush=True)
        if len({text for _, text in chats.values()}) > 1:
            raise SystemExit("the answers differ")
    rows: list[list[Any]] = []
    for number in range(len(MESSAGES)):
        speeds = {
            drafter: [chats[drafter][number].tokens / chats[drafter][number].seconds for chats in rounds]
            for drafter in rounds[0]
        }
        ratios = [ours / plain for ours, plain in zip(*speeds.values(), strict=True)]
        counts = [str(rounds[0][drafter][number].passes) for drafter in speeds]
        rows.append(
            [
                str(number + 1),
                str(rounds[0]["plain"][number].tokens),
                *counts,
                *(f"{median(each):.1f}" for each in speeds.values()),
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        )
    heads = ["answer", "tokens", "passes", "plain's", "tokens/s", "plain's", "times plain"]
    print("\n" + markdown_table(heads, rows))
    print(
        f"\n{Path(given.model).name}, {given.rounds} rounds, {given.pause:g} s before each message; all answers equal"
    )


if __name__ == "__main__":
    main()

"""Let a model answer the requests of ``requests.toml``, and append its answers to a file of JSON lines.

    python -m benchmarks.corpus.write WRITER OUT.jsonl [--model FILE.gguf] [--only greedy] [--skip FILE ...]
    python -m benchmarks.corpus.write WRITER OUT.jsonl --again CORPUS.jsonl.xz

WRITER chooses the shares of the kinds of requests (``smollm2``, ``qwen``, ``qwen-1.5b``, ``qwen-code`` or
``qwen-1.5b-code``). Even numbers are answered
greedily, odd ones are sampled with their number as the seed, so a text does not depend on the others. Numbers that
are in the file are skipped, so that an interrupted run can be continued. It ends at Ctrl-C or SIGTERM, or with
``--again`` when all requests that a packed corpus answers are answered. Two processes, one with ``--only greedy`` and
one with ``--only sampled``, use two cores better than two threads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import lookahead
from lookahead.drafters import Plain
from lookahead.learning.self_text import loops
from lookahead.options import Options

from .requests import WRITERS, Ask, asks

LONGEST = 320
TEMPERATURE = 0.7
#: How the requests with even and with odd numbers are decoded.
DECODED = ("greedy", "sampled")


def read(file: Path) -> list[dict[str, Any]]:
    """The texts of a file, which may be compressed by ``pack``, without a last line that was cut off."""
    if not file.exists():
        return []
    content = file.read_bytes()
    lines = (lzma.decompress(content) if file.suffix == ".xz" else content).split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def answered_in(files: Iterable[Path], writer: str) -> set[int]:
    """The numbers of the requests that a writer has answered in these files."""
    return {text["number"] for file in files for text in read(file) if text["writer"] == writer}


def again(writer: str, numbers: set[int]) -> Iterator[Ask]:
    """The requests of these numbers."""
    until = takewhile(lambda ask: ask.number <= max(numbers, default=-1), asks(writer))
    return (ask for ask in until if ask.number in numbers)


def write(llm: Any, writer: str, requests: Iterable[Ask], out: Path, batch: int) -> None:
    """Answer the requests that ``out`` does not answer yet, until there are no more."""
    answered = {text["number"] for text in read(out)}
    waiting = (ask for ask in requests if ask.number not in answered)
    engine = llm.engine(max_sequences=batch, prefix_cache=1)
    with out.open("ab") as file:
        file.truncate(out.read_bytes().rfind(b"\n") + 1)
        while True:
            for ask in islice(waiting, batch - engine.running - engine.waiting):
                engine.add(_request(llm, ask))
            if not engine.busy:
                return
            for update in engine.step():
                if update.result is None:
                    continue
                ask = update.sequence.request.tag
                result = update.result.checked()
                line = {
                    "writer": writer,
                    "number": ask.number,
                    "kind": ask.kind,
                    "ask": ask.text,
                    "answer": llm.tokenizer.decode(result.tokens, skip_special_tokens=True),
                    "tokens": len(result.tokens),
                    "end": result.finish_reason,
                }
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                file.flush()


def _request(llm: Any, ask: Ask) -> Any:
    sampled = ask.number % 2
    options = Options(max_new_tokens=LONGEST, temperature=TEMPERATURE if sampled else 0.0, drafter=Plain())
    chat = [{"role": "user", "content": ask.text}]
    request = llm.prepare(chat, options, ask.number if sampled else None)
    return replace(request, finished=_ends_loop(), detokenizer=None, tag=ask, seed=None)


def _ends_loop() -> Callable[[int], str | None]:
    tokens = list[int]()

    def finished(token: int) -> str | None:
        tokens.append(token)
        return "loop" if len(tokens) % 16 == 0 and loops(tokens) else None

    return finished


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("writer", choices=WRITERS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="as for lookahead.load (default: the library's default model)")
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="files of answered requests")
    parser.add_argument("--again", type=Path, help="answer the requests that this packed corpus answers")
    parser.add_argument("--only", choices=DECODED, help="answer only the requests that are decoded so")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with suppress(KeyboardInterrupt):
        skipped = answered_in(given.skip, given.writer)
        every = asks(given.writer)
        if given.again is not None:
            every = again(given.writer, answered_in([given.again], given.writer))
        requests = (
            ask
            for ask in every
            if ask.number not in skipped and given.only in (None, DECODED[ask.number % 2])
        )
        llm = lookahead.load(given.model, threads=given.threads)
        write(llm, given.writer, requests, given.out, given.batch)


if __name__ == "__main__":
    main()

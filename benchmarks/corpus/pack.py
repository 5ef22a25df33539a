"""Filter, sort and compress answers of ``benchmarks.corpus.write``.

    python -m benchmarks.corpus.pack OUT.jsonl.xz FILE.jsonl [FILE.jsonl.xz ...]

Repeated endings are cut to one occurrence, and answers that repeat themselves or others are dropped. The output is
sorted by writer, kind and number, which compresses better than any other order tried, and is the same for the same
texts. An earlier output may be among the files, to be extended; packing it alone, or its answers written again
(``write --again``), gives the same file.
"""

from __future__ import annotations

import argparse
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .write import read

#: Bytes of a shingle, and the share of an answer's shingles that earlier answers may contain.
SHINGLE, SHARED = 40, 0.5
#: An answer that zlib makes this many times smaller repeats itself. Long lists and tests of code reach 4.
REPETITIVE = 5.0
#: The least number of characters of an answer, and of what a loop repeats.
SHORTEST, SHORTEST_LOOP = 40, 10
KEPT = ("writer", "number", "kind", "tokens", "answer")

Text = dict[str, Any]


def without_loop(text: str) -> str:
    """The text with one occurrence of an ending that occurs three times or more in a row; the last may be cut off."""
    for period in range(SHORTEST_LOOP, len(text) // 3 + 1):
        if text[-2 * period :] == text[-3 * period : -period]:
            begin = len(text) - period
            while begin and text[begin - 1] == text[begin - 1 + period]:
                begin -= 1
            return text[: begin + period]
    return text


def clean(text: str) -> str:
    """The text without loops and without space around it: cutting a loop may leave a shorter one."""
    while (shorter := without_loop(text).strip()) != text:
        text = shorter
    return text


def repetitive(text: str) -> bool:
    """Whether a text repeats itself throughout."""
    data = text.encode()
    return len(data) > REPETITIVE * len(zlib.compress(data, 9))


def _shingles(text: str) -> set[int]:
    """Hashes of every eighth run of ``SHINGLE`` bytes, chosen by the hash, so that equal runs are chosen alike."""
    data = text.encode()
    hashes = (zlib.crc32(data[i : i + SHINGLE]) for i in range(max(1, len(data) - SHINGLE + 1)))
    return {found for found in hashes if found % 8 == 0}


def kept(texts: Iterable[Text]) -> Iterator[Text]:
    """The texts that are worth keeping, without loops, in order of writer and number."""
    seen = set[int]()
    for text in sorted(texts, key=lambda text: (text["writer"], text["number"])):
        answer = clean(text["answer"])
        if len(answer) < SHORTEST or "\ufffd" in answer or repetitive(answer):
            continue
        shingles = _shingles(answer)
        if len(shingles & seen) > SHARED * len(shingles):
            continue
        seen |= shingles
        yield {**{name: text[name] for name in KEPT}, "answer": answer}


def pack(texts: Iterable[Text]) -> bytes:
    """The compressed file."""
    order = sorted(texts, key=lambda text: (text["writer"], text["kind"], text["number"]))
    lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in order)
    return lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    texts = {(text["writer"], text["number"]): text for file in given.files for text in read(file)}
    chosen = list(kept(texts.values()))
    given.out.write_bytes(pack(chosen))
    tokens, answers = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for text in chosen:
        tokens[text["writer"], text["kind"]] += text["tokens"]
        answers[text["writer"], text["kind"]] += 1
    print("| writer | kind | answers | tokens |\n| --- | --- | ---: | ---: |")
    for (writer, kind), count in sorted(answers.items()):
        print(f"| {writer} | {kind} | {count} | {tokens[writer, kind]} |")
    print(
        f"\n{len(chosen)} of {len(texts)} answers, {sum(tokens.values())} tokens, {given.out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()

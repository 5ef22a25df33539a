"""Damaged GGUF files: each decodes or is rejected in one line, and a wrong count never changes the output.

    python tests/soak.py files --count 2000                     the long form (make soak)
    python tests/gguf_damage.py --count 100 --first 5000        the same, with every outcome
    python tests/gguf_damage.py --case 17                       one file again, by its number

A case depends on its number alone: a small file from ``gguf_files``, the damage to it, and the dtype to load
it in (None keeps the weights packed; with float32, transformers reads the file). A separate process loads the
files one by one and may use ``ALLOWANCE`` bytes more than it does after loading the undamaged files.

A count is a number that other parts of the file confirm: a model size, or a tensor's dimension or position. A
file with a wrong count is rejected or produces the output of the undamaged file. Other numbers and bits may
change the output.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import select
import socket
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from processes import forks

#: Bytes that the process may use beyond those in use after loading undamaged files.
ALLOWANCE = 1 << 30
#: Seconds after which loading and decoding a small file counts as hanging.
PATIENCE = 60
#: The files to damage: architecture, block types.
FILES = (
    ("llama", ("Q8_0", "Q4_K", "Q6_K", "F16")),
    ("gemma3", ("Q8_0", "Q5_0")),
    ("qwen2", ("Q4_1", "Q8_0")),
    ("qwen3", ("F32",)),
    ("gpt2", ("Q5_1", "BF16")),
    ("phi3", ("Q4_0", "F32")),
    ("granite", ("Q5_K", "Q2_K")),
)
#: Accepted by only one reader: the process removes the first from ours, and transformers lacks the second.
ONLY_TRANSFORMERS, ONLY_OURS = "qwen2", "granite"
#: Keys of counts, without the architecture prefix.
SIZES = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
)
#: Sizes that no tensor confirms: GPT-2's hidden size can be split into any number of heads, and any part of a
#: Phi-3 head may rotate.
UNCONFIRMED = ("gpt2.attention.head_count", "phi3.rope.dimension_count")
PROMPT = "the cat and the dog"


# ---------------------------------------------------------------- what is damaged


class Number(NamedTuple):
    """A number in a header."""

    name: str
    """Its key, or the tensor and what the number says of it."""
    at: int
    """The position of its first byte."""
    kind: np.dtype[Any]
    is_count: bool


def numbers(path: Path) -> list[Number]:
    """Every number in a header, in file order; for an array, only the first ones."""
    reader = gguf.GGUFReader(path)
    architecture = reader.get_field("general.architecture").contents()
    counts = {f"{architecture}.{key}" for key in SIZES} - set(UNCONFIRMED)
    found = []
    for key, entry in reader.fields.items():
        names = ["length of the key", None, "type"]
        if key.startswith("GGUF."):
            names = [""]
        elif entry.types[0] == gguf.GGUFValueType.STRING:
            names += ["length"]
        elif entry.types[0] == gguf.GGUFValueType.ARRAY:
            names += ["type of the items", "number of items", "first item", "second item"]
        else:
            names += [""]
        is_count = key in counts or key in ("GGUF.tensor_count", "GGUF.kv_count")
        found += _parts(key, entry, names, {""} if is_count else set())
    for tensor in reader.tensors:
        # Swapping types of the same size is undetectable: F16 and BF16, Q4_0 and IQ4_NL.
        names = ["length of the name", None, "dimensions", "shape", "block type", "offset"]
        found += _parts(tensor.name, tensor.field, names, {"dimensions", "shape", "offset"})
    return found


def _parts(name: str, entry: Any, names: list[Any], counts: set[str]) -> Iterator[Number]:
    at = int(entry.offset)
    for part, what in zip(entry.parts, names, strict=False):
        for index in range(len(part) if what is not None else 0):
            place = f"{name}: {what}" if what else name
            if part.dtype.itemsize > 1 or len(part) == 1:
                yield Number(place, at + index * part.dtype.itemsize, part.dtype, what in counts)
        at += part.nbytes


@dataclass
class Base:
    """A file before it is damaged."""

    path: Path
    data: bytes
    numbers: list[Number]
    table: int
    """Where the table of tensors begins."""
    start: int
    """Where the tensors begin."""


@cache
def base(number: int) -> Base:
    """The file at this index of ``FILES``."""
    from gguf_files import write_gguf
    from toy import CHAT

    architecture, types = FILES[number]
    path = Path(_folder().name) / f"{architecture}.gguf"
    write_gguf(path, architecture, types, chat_template=CHAT)
    tensors = gguf.GGUFReader(path).tensors
    table = min(int(tensor.field.offset) for tensor in tensors)
    start = min(int(tensor.data_offset) for tensor in tensors)
    return Base(path, path.read_bytes(), numbers(path), table, start)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@dataclass
class Case:
    """A damaged file."""

    number: int
    source: Base
    dtype: str | None
    data: bytearray
    damage: list[str] = field(default_factory=list)
    counts_only: bool = True
    """Whether only counts were damaged."""

    @classmethod
    def of(cls, number: int) -> Case:
        draw = random.Random(number)
        source = base(draw.randrange(len(FILES)))
        dtype = draw.choice([None, None, None, "float32"]) if source.path.stem != ONLY_OURS else None
        case = cls(number, source, dtype, bytearray(source.data))
        for _ in range(draw.choice([1, 1, 1, 2])):
            draw.choices(
                [case._count, case._number, case._header_bit, case._tensor_bit, case._length, case._stretch],
                [35, 20, 20, 15, 5, 5],
            )[0](draw)
        return case

    def _count(self, draw: random.Random) -> None:
        self._set(draw, [each for each in self.source.numbers if each.is_count])

    def _number(self, draw: random.Random) -> None:
        self._set(draw, self.source.numbers)

    def _set(self, draw: random.Random, numbers: list[Number]) -> None:
        # Choose metadata as often as the tensor table, which has more numbers.
        in_table = draw.random() < 0.5
        number = draw.choice([each for each in numbers if (each.at >= self.source.table) == in_table])
        end = number.at + number.kind.itemsize
        old = np.frombuffer(
            bytes(self.data[number.at : end]).ljust(number.kind.itemsize, b"\0"), number.kind
        )[0]
        if number.kind.kind == "f":
            new: Any = draw.choice([0.0, -1.0, 1e30, float("inf"), float("nan"), float(old) * 2])
            written = np.array([new], number.kind)
        else:
            whole = int(old)
            new = draw.choice(
                [0, 1, 7, whole - 1, whole + 1, whole * 2, whole // 2, 1 << 31, (1 << 32) - 1, 1 << 63, -1]
            )
            written = np.array([new % (1 << 8 * number.kind.itemsize)], f"<u{number.kind.itemsize}")
        self.data[number.at : end] = written.tobytes()
        self.counts_only &= number.is_count
        self.damage.append(f"{number.name}: {old} -> {new}")

    def _header_bit(self, draw: random.Random) -> None:
        self._flip(draw.randrange(self.source.start), draw.randrange(8))

    def _tensor_bit(self, draw: random.Random) -> None:
        self._flip(draw.randrange(self.source.start, len(self.source.data)), draw.randrange(8))

    def _flip(self, at: int, bit: int) -> None:
        if at < len(self.data):
            self.data[at] ^= 1 << bit
        self.counts_only &= any(
            number.is_count and number.at <= at < number.at + number.kind.itemsize
            for number in self.source.numbers
        )
        self.damage.append(f"bit {bit} of byte {at}")

    def _length(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            del self.data[draw.randrange(len(self.data)) :]
        else:
            self.data += draw.choice([bytes, draw.randbytes])(draw.choice([1, 32, 33, 4096]))
        self.damage.append(f"{len(self.data)} bytes of {len(self.source.data)}")

    def _stretch(self, draw: random.Random) -> None:
        size = draw.choice([1, 8, 64, 1000])
        at = draw.choice([draw.randrange(self.source.start), draw.randrange(len(self.source.data))])
        self.data[at : at + size] = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])
        self.counts_only = False
        self.damage.append(f"{size} bytes from byte {at}")

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.source.path.stem}, {self.dtype or 'packed'}, {'; '.join(self.damage)}"
        )


# ---------------------------------------------------------------- loading, in a separate process


class Outcome(NamedTuple):
    """The result of loading a file."""

    kind: str
    """"refused", "decoded", or how it failed: "traceback", "memory", "hangs", "killed", "warning", "lines"."""
    message: str = ""
    tokens: tuple[int, ...] = ()


def attempt(path: str, dtype: str | None) -> Outcome:
    """Load a file and decode a few tokens."""
    import lookahead
    from lookahead.core import LookaheadError, NumericalError, OutOfMemory, SettingsError
    from lookahead.core.errors import summary

    tokens: tuple[int, ...] = ()
    kind = "refused"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            llm = lookahead.load(path, **({"dtype": dtype} if dtype else {}))
            drafter = lookahead.Lookahead(3, 2, 3)
            result = llm.generate(PROMPT, max_new_tokens=6, ignore_eos=True, drafter=drafter)
            if llm.tokenizer.chat_template:
                llm.encode([{"role": "user", "content": PROMPT}])
            kind, message, tokens = "decoded", "", tuple(result.tokens)
        except (OutOfMemory, MemoryError) as error:
            kind, message = "memory", summary(error)
        except (SettingsError, NumericalError) as error:
            message = str(error)
            if "memory" in message:
                kind = "memory"
            elif "\n" in message:
                kind = "lines"
        except LookaheadError as error:
            kind, message = "traceback", summary(error)
        except BaseException as error:  # tokenizers' Rust code raises a non-Exception
            kind, message = "traceback", _where(error)
    said = [
        warning
        for warning in caught
        if "lookahead" in str(warning.message) or warning.category is UserWarning
    ]
    unexpected = [warning for warning in caught if warning not in said]
    if kind in ("refused", "decoded") and unexpected:
        kind, message = "warning", f"{unexpected[0].category.__name__}: {unexpected[0].message}"
    return Outcome(kind, message, tokens)


def _where(error: BaseException) -> str:
    """An error and the last two traceback locations in this library."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "lookahead" in frame.filename
    ]
    return f"{type(error).__name__}: {error} at {', '.join(ours[-2:])}"


def serve() -> None:
    """Answer each stdin line, a path and dtype, with an outcome; the first lines name undamaged files."""
    from lookahead.gguf.families import GGUF_NAMES

    del GGUF_NAMES[ONLY_TRANSFORMERS]
    for _ in range(int(sys.stdin.readline())):
        print(json.dumps(attempt(*json.loads(sys.stdin.readline()))), flush=True)
    gc.collect()
    gc.freeze()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ALLOWANCE,) * 2)
    for line in sys.stdin:
        print(json.dumps(attempt(*json.loads(line))), flush=True)
        gc.collect()  # models contain reference cycles


def _serve_in(lines: Any, answers: Any, errors: str, first: str) -> None:
    """``serve`` in a forked process, on these sockets."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdin, sys.stdout = lines.makefile(), answers.makefile("w")
    exec(first)
    serve()


class Loader:
    """The process that loads files, restarted after a crash or a hang.

    Args:
        whole: (path, dtype) of undamaged files, which are loaded first.
        first: Python code that the process runs first.

    Attributes:
        expected: the outcomes of ``whole``.
    """

    def __init__(self, whole: list[tuple[str, str | None]], first: str = "") -> None:
        self._whole, self._first = whole, first
        self._start()

    def _start(self) -> None:
        context = forks()  # it has imported torch and transformers
        self._errors = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        (lines, theirs), (outcomes, answers) = socket.socketpair(), socket.socketpair()
        self._process = context.Process(
            target=_serve_in, args=(theirs, answers, self._errors.name, self._first), daemon=True
        )
        self._process.start()
        theirs.close()
        answers.close()
        self._lines, self._outcomes = lines.makefile("w"), outcomes.makefile()
        lines.close()
        outcomes.close()
        self._say(str(len(self._whole)))
        self.expected = {each: self._ask(each, 600) for each in self._whole}
        failed = {each: outcome for each, outcome in self.expected.items() if outcome.kind != "decoded"}
        if failed:
            self.close()
            raise AssertionError(f"whole files must be decoded: {failed}")

    def _say(self, line: str) -> None:
        self._lines.write(line + "\n")
        self._lines.flush()

    def _ask(self, file: tuple[str, str | None], patience: float) -> Outcome:
        self._say(json.dumps(file))
        if not select.select([self._outcomes], [], [], patience)[0]:
            return Outcome("hangs", f"no answer after {patience} seconds")
        line = self._outcomes.readline()
        if line:
            kind, message, tokens = json.loads(line)
            return Outcome(kind, message, tuple(tokens))
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        self._process.join()
        return Outcome("killed", f"status {self._process.exitcode} {' '.join(last)}")

    def load(self, path: Path | str, dtype: str | None = None) -> Outcome:
        """Load a file."""
        outcome = self._ask((str(path), dtype), PATIENCE)
        if outcome.kind in ("hangs", "killed"):
            self.close()
            self._start()
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        for file in (self._lines, self._outcomes, self._errors):
            file.close()


# ---------------------------------------------------------------- many files


@dataclass
class Report:
    """Results of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Of files in which only counts are wrong."""
    found: list[str] = field(default_factory=list)


def fuzz(count: int, first: int = 0, tell: Any = None) -> Report:
    """Load ``count`` files from case ``first`` on."""
    report = Report()
    bases = [base(number) for number in range(len(FILES))]
    whole = [(str(each.path), dtype) for each in bases for dtype in (None, "float32")]
    whole.remove((str(Path(_folder().name) / f"{ONLY_OURS}.gguf"), "float32"))
    loader = Loader(whole)
    path = Path(_folder().name) / "damaged.gguf"
    try:
        for number in range(first, first + count):
            case = Case.of(number)
            path.unlink(missing_ok=True)
            path.write_bytes(case.data)
            outcome = loader.load(path, case.dtype)
            report.outcomes[outcome.kind] += 1
            wrong = judge(case, outcome, loader)
            if case.counts_only:
                report.counts[outcome.kind] += 1
            if wrong:
                report.found.append(f"{case}: {wrong}")
            if tell is not None:
                tell(case, outcome, wrong)
    finally:
        loader.close()
    return report


def judge(case: Case, outcome: Outcome, loader: Loader) -> str:
    """What is wrong with an outcome; empty if nothing."""
    if outcome.kind == "refused":
        return ""
    if outcome.kind != "decoded":
        return f"{outcome.kind}: {outcome.message}"
    expected = loader.expected[str(case.source.path), case.dtype]
    return (
        "another text than that of the whole file"
        if case.counts_only and outcome.tokens != expected.tokens
        else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="load one file and say what becomes of it")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()

    def tell(case: Case, outcome: Outcome, wrong: str) -> None:
        if wrong or given.verbose or given.case is not None:
            print(f"{case}\n    {outcome}\n    {wrong or 'as it should be'}", flush=True)

    report = fuzz(1, given.case, tell) if given.case is not None else fuzz(given.count, given.first, tell)
    print(dict(report.outcomes), dict(report.counts), len(report.found))
    sys.exit(1 if report.found else 0)


if __name__ == "__main__":
    main()

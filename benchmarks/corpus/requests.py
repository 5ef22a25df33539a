"""The requests that the corpus answers: frames with fields from ``requests.toml``, drawn by number."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LISTS, KINDS = WORDS["lists"], WORDS["kinds"]
#: Names of the shares of the kinds.
WRITERS = sorted({writer for kind in KINDS.values() for writer in kind["weights"]})


class Ask(NamedTuple):
    """A request: its number, which is also the seed of its answer, its kind and its text."""

    number: int
    kind: str
    text: str


def asks(writer: str) -> Iterator[Ask]:
    """The requests to a model, without end; none is repeated.

    Args:
        writer: which of the weights of the kinds to use.
    """
    weights = [kind["weights"].get(writer, 0) for kind in KINDS.values()]
    seen = set[str]()
    number = 0
    while True:
        draw = random.Random(f"{writer} {number}")
        (kind,) = draw.choices(list(KINDS), weights)
        text = _filled(draw.choice(KINDS[kind]["frames"]), draw)
        if text not in seen:
            seen.add(text)
            yield Ask(number, kind, text)
        number += 1


def _filled(frame: str, draw: random.Random) -> str:
    def value(field: re.Match[str]) -> str:
        name = field[1]
        if name in LISTS:
            return str(draw.choice(LISTS[name]))
        return str(draw.randint(20, 400) if name == "a" else draw.randint(2, 19))

    return re.sub(r"{(\w+)}", value, frame)

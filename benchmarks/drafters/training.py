"""What the programs that train a drafter share: their command line, the training data and the dtype."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import torch

import lookahead
from lookahead.learning.head_data import Positions
from lookahead.learning.hidden_states import collect
from lookahead.learning.text_parts import Folder, read_part
from lookahead.learning.train_head import fast_dtype


def half_precision() -> torch.autocast:
    """A context in which matrix products are computed in bfloat16, if that is faster on this processor."""
    return torch.autocast("cpu", torch.bfloat16, enabled=_dtype() is torch.bfloat16)


@cache
def _dtype() -> torch.dtype:
    return fast_dtype(torch.device("cpu"))


def first_parts(folder: Path, tokens: int | None) -> list[Path]:
    """The first parts of the self-generated text that have this many tokens together; all parts for None."""
    parts = []
    count = 0
    for part in Folder(folder, scan=False).parts():
        parts.append(part)
        if tokens is not None:
            count += sum(len(text.completion) for text in read_part(part))
            if count >= tokens:
                break
    return parts


def program(description: str | None, out: Path, train: Callable[[Positions, Any, Any, float], Any]) -> Any:
    """Train a drafter as the command line says, and save it.

    Args:
        description: the help text of the program.
        out: where the weights are saved by default.
        train: (positions, embed, output, epochs) -> the drafter's weights, which have ``save(path, about)``.
            ``embed`` and ``output`` give the model's embeddings and output rows of tokens.

    Returns:
        the trained weights.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="default: the library's default model")
    parser.add_argument("--text", type=Path, required=True, help="folder of the model's own text")
    parser.add_argument(
        "--states", type=Path, required=True, help="folder of its hidden states; missing files are computed"
    )
    parser.add_argument(
        "--tokens", type=int, help="train on the first parts of the text, of at least so many tokens"
    )
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args()
    llm = lookahead.load(args.model)
    model = llm.model.head_parts()
    parts = collect(llm.target(), model.hidden, first_parts(args.text, args.tokens), args.states)
    begin = monotonic()
    positions = Positions(parts)
    trained = train(positions, model.embed, model.output, args.epochs)
    seconds = round(monotonic() - begin)
    trained.save(
        args.out, {"tokens": len(positions), "seconds": seconds, "settings": {"epochs": args.epochs}}
    )
    print(f"{seconds} seconds", flush=True)
    return trained

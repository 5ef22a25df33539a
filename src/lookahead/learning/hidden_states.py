"""Hidden states of a model's self-generated text, on which a light head is trained.

Each part of the text (``text_parts``) has one file, such as ``part-000000.npy``: float16 (positions, hidden), with a
row for each token of the completions, in the order of the part. The row of a token is the hidden state under which it
was chosen, or zeros for the first token after a prompt of one token, since a prefill returns no hidden states. Files
are written as a whole, so an interruption loses at most the current part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from ..core import SettingsError, Target, TokenTree
from ..records import CONTINUES, not_writable, replacing
from .text_parts import read_part

#: Number of rows per pass.
CHUNK = 256
#: The largest number in float16.
LARGEST = 65504.0
#: Bytes to leave free on the disk.
RESERVE = 1 << 28

Array = np.ndarray[Any, np.dtype[Any]]


def collect(
    target: Target,
    hidden: int,
    parts: Sequence[Path],
    folder: Path,
    progress: Callable[[int, int, float], None] = lambda done, total, left: None,
) -> list[tuple[Path, Path]]:
    """Compute the missing files. Returns the parts of the text, each with its file.

    Args:
        target: provides hidden states; slot 0 must be free, and is free afterwards.
        hidden: the hidden size.
        parts: files of the self-generated text (``Folder.parts``).
        folder: the folder of the files.
        progress: called with (positions done, all positions that were missing, seconds left).

    Raises:
        SettingsError: a part is damaged, the hidden states cannot be used, or a file cannot be written; the earlier
            files are kept.
    """
    # Find the missing files.
    files = [folder / part.with_suffix(".npy").name for part in parts]
    counts = {part: _positions(part) for part in parts}
    missing = [
        (part, file)
        for part, file in zip(parts, files, strict=True)
        if not _is_complete(file, counts[part], hidden)
    ]

    # Compute and save them.
    done = 0
    begin = monotonic()
    try:
        total = sum(counts[part] for part, _ in missing)
        folder.mkdir(parents=True, exist_ok=True)
        for part, file in missing:
            states = np.empty((counts[part], hidden), np.float16)
            at = 0
            for text in read_part(part):
                end = at + len(text.completion)
                states[at:end] = states_of(target, hidden, text.prompt, text.completion)
                at = end
                progress(done + at, total, (total - done - at) * (monotonic() - begin) / (done + at))
            done += at
            _save(file, states)
    except OSError as error:
        raise not_writable(folder, error, CONTINUES) from None
    return list(zip(parts, files, strict=True))


def check_room(folder: Path, hidden: int, positions: int) -> None:
    """Raise SettingsError unless the disk has space for the states of this many more positions."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    needed = 2 * hidden * positions + RESERVE
    free = shutil.disk_usage(there).free
    if needed > free:
        raise SettingsError(
            f"the hidden states of {positions:,} tokens need {needed >> 20} MiB in {folder}, but its disk has "
            f"{free >> 20} MiB free; request fewer tokens, or set XDG_CACHE_HOME to another disk"
        )


def _positions(part: Path) -> int:
    return sum(len(text.completion) for text in read_part(part))


def _is_complete(file: Path, positions: int, hidden: int) -> bool:
    try:
        return bool(np.load(file, mmap_mode="r", allow_pickle=False).shape == (positions, hidden))
    except (OSError, ValueError, EOFError):  # missing or damaged, to be computed again
        return False


def _save(file: Path, states: Array) -> None:
    try:
        with replacing(file) as temporary, temporary.open("wb") as opened:
            np.save(opened, states)
    except OSError as error:
        raise not_writable(file, error, CONTINUES, "file") from None


def states_of(target: Target, hidden: int, prompt: list[int], completion: list[int]) -> Array:
    """The hidden states under which the tokens of a completion were chosen, (tokens, hidden) float32.

    Raises:
        SettingsError: the target does not provide hidden states, or they are too large for float16 or not finite.
    """
    tokens = [*prompt, *completion][:-1]
    first = len(prompt) - 1  # the row of the first state
    # A prefill has at least one token and returns no states.
    begin = max(first, 1)

    # Evaluate the rest in chunks, whose rows provide the states.
    rows: list[Array] = []
    target.prefill([(0, tokens[:begin])])
    try:
        for start in range(begin, len(tokens), CHUNK):
            piece = tokens[start : start + CHUNK]
            chain = TokenTree(piece[0])
            chain.needs_hidden = True
            chain.add_candidate(piece[1:])
            (scores,) = target.forward([(0, chain)])
            for node in range(len(piece)):
                state = scores.hidden(node)
                if state is None:
                    raise SettingsError(
                        f"a light head needs hidden states, which the path {target.path!r} does not provide"
                    )
                rows.append(state)
            target.commit([(0, range(len(piece)))])
    finally:
        target.release(0)

    # A missing first state stays zero.
    states = np.zeros((len(completion), hidden), np.float32)
    for row, state in enumerate(rows, begin - first):
        states[row] = state
    if not np.abs(states).max() < LARGEST:  # also if one is NaN
        raise SettingsError(
            f"hidden states must be finite and below {LARGEST:.0f} to fit in float16, but one of this model's is not"
        )
    return states

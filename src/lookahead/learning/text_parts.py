"""Self-generated text on disk: a folder of parts, each complete, written by one process at a time.

A part is a numpy archive (.npz, no pickled objects) of the texts that ended since the last part:

    numbers (n,), kinds (n,), temperatures (n,)    of each text; kinds are ``ANSWER``, ...
    prompts (n,), lengths (n,)                     numbers of tokens of its prompt and its completion
    tokens (total,) int32                          prompt, completion, next prompt, ...
    ids (positions, TOP) int32                     the best tokens at each position of the completions, best first
    logprobs (positions, TOP) float16              their log-probabilities at temperature 1

Parts are added as whole files, so a killed process loses only the texts since the last part.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ..core import SettingsError
from ..core.errors import first_line
from ..records import not_writable

#: What numpy and zipfile raise for malformed .npz files. A header's shape may exceed the memory, its text is parsed
#: as Python, and a member may be encrypted (RuntimeError).
MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
#: The kinds of texts: an answer to a request from ``openings``, a request written by the model, the model's answer to
#: such a request.
ANSWER, REQUEST, OWN_ANSWER = range(3)
#: Number of best tokens saved per position.
TOP = 16
#: A file in the folder of texts, locked by the process that writes them.
LOCK_FILE = "writing.lock"
#: Errors of file systems that cannot lock files.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(slots=True)
class Text:
    """One text. ``kind`` is ``ANSWER`` or another kind; ``ids`` and ``logprobs`` have a row for each new token."""

    number: int
    kind: int
    temperature: float
    prompt: list[int]
    completion: list[int]
    ids: Any
    logprobs: Any


@dataclass
class Folder:
    """A folder of saved parts.

    Attributes:
        path: the folder, which is created when text is first written.
        scan: whether to read the existing parts.
        next_number: one more than the largest number of a saved text.
        tokens: number of tokens of all saved completions.

    Raises:
        SettingsError: the folder cannot be read, or a part is damaged.
    """

    path: Path
    scan: bool = True
    next_number: int = field(init=False, default=0)
    tokens: int = field(init=False, default=0)
    _counted: set[Path] = field(init=False, default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.scan:
            self.count_new()

    def count_new(self) -> None:
        """Count the texts of parts that have been added since, such as those of another process."""
        for file in self.parts():
            if file not in self._counted:
                self._count(file, list(read_part(file)))

    def _count(self, file: Path, texts: list[Text]) -> None:
        self._counted.add(file)
        self.next_number = max([self.next_number, *(text.number + 1 for text in texts)])
        self.tokens += sum(len(text.completion) for text in texts)

    def parts(self) -> list[Path]:
        """The files, in the order of their creation."""
        return sorted(self.path.glob("part-*.npz"))

    def read(self) -> Iterator[Text]:
        """All saved texts."""
        for file in self.parts():
            yield from read_part(file)

    def save(self, texts: list[Text]) -> None:
        """Add a part, and empty the list.

        Raises:
            SettingsError: the folder cannot be written, or the disk is full. Earlier parts are complete.
        """
        if not texts:
            return

        # Write a temporary file and rename it, so that the part is either complete or missing.
        temporary = self.path / f"part.{os.getpid()}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with uninterrupted():
                try:
                    with temporary.open("wb") as opened:
                        np.savez_compressed(opened, **_packed(texts))
                        opened.flush()
                        os.fsync(opened.fileno())
                    file = self._new_part()  # only now, because the compression takes seconds
                    os.replace(temporary, file)
                finally:
                    temporary.unlink(missing_ok=True)
                self._count(file, texts)
                texts.clear()  # an interrupt after this block must not save them again
        except OSError as error:
            saved = f"the {self.tokens} tokens saved before are kept, and the same command continues"
            raise not_writable(self.path, error, saved) from None

    def _new_part(self) -> Path:
        """The file after the last part; it does not exist."""
        names = (file.stem.removeprefix("part-") for file in self.parts())
        number = max((int(name) + 1 for name in names if name.isdecimal()), default=0)
        return self.path / f"part-{number:06d}.npz"


def locked(folder: Path) -> FileLock:
    """Lock a folder, which is created. The writers of one process share the lock; the last to release it unlocks.

    A file system that cannot lock files, such as some network file systems, excludes no process.

    Raises:
        SettingsError: another process has locked it, or it cannot be written.
    """
    file = folder.resolve() / LOCK_FILE
    lock = FileLock(file, thread_local=False, is_singleton=True, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise SettingsError(f"another process writes text to {folder}; wait for it to end") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise not_writable(folder, error, "set XDG_CACHE_HOME or give another path") from None
    return lock


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _packed(texts: list[Text]) -> dict[str, Any]:
    return {
        "numbers": np.array([text.number for text in texts], np.int64),
        "kinds": np.array([text.kind for text in texts], np.int8),
        "temperatures": np.array([text.temperature for text in texts], np.float32),
        "prompts": np.array([len(text.prompt) for text in texts], np.int32),
        "lengths": np.array([len(text.completion) for text in texts], np.int32),
        "tokens": np.array([t for text in texts for t in (*text.prompt, *text.completion)], np.int32),
        "ids": np.concatenate([text.ids for text in texts]),
        "logprobs": np.concatenate([text.logprobs for text in texts]),
    }


def read_part(file: Path) -> Iterator[Text]:
    """The texts of one part.

    Raises:
        SettingsError: the file is damaged.
    """
    # Read the arrays and check that their lengths agree.
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            part = {name: archive[name] for name in archive.files}
        positions = int(part["lengths"].sum())
        total = int(part["prompts"].sum()) + positions
        if len(part["tokens"]) != total or not len(part["ids"]) == len(part["logprobs"]) == positions:
            raise ValueError("its arrays have inconsistent lengths")
    except MALFORMED as error:
        why = first_line(error)
        raise SettingsError(f"{file} must be a part of a model's own text ({why}); delete it") from None

    # Split them into texts.
    begin = position = 0
    for index, number in enumerate(part["numbers"].tolist()):
        middle = begin + int(part["prompts"][index])
        length = int(part["lengths"][index])
        end = middle + length
        next_position = position + length
        yield Text(
            number,
            int(part["kinds"][index]),
            float(part["temperatures"][index]),
            part["tokens"][begin:middle].tolist(),
            part["tokens"][middle:end].tolist(),
            part["ids"][position:next_position],
            part["logprobs"][position:next_position],
        )
        begin, position = end, next_position

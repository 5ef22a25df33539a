"""Self-generated text of a model, written in batches, saved in parts and continued after an interruption.

The texts are answers to requests. Two in five requests are openings of this package (``openings``); the model writes
the others by itself, as the user's turn of its chat template. Half of the answers are greedy, half are sampled at
temperature 0.8. A model without a chat template continues openings, and texts that it began by itself.

Each text has a number, which determines its opening, seed and temperature. A folder contains parts, each a numpy
archive (.npz, no pickled objects) of the texts that ended since the last part:

    numbers (n,), kinds (n,), temperatures (n,)    of each text; kinds index ``KINDS``
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from ..core import Choose, OutOfMemory, Scores, SettingsError, TokenTree
from ..core.errors import first_line
from ..core.verify import as_choose
from ..drafters import Plain
from ..drafters.adaptive.state import MALFORMED
from ..engine.prompts import has_chat_template
from ..options import Options
from ..records import check_writable, not_writable
from .openings import beginning, opening

if TYPE_CHECKING:
    from ..core import Engine, Target
    from ..llm import LLM

#: An answer to a request from ``openings``, a request written by the model, the model's answer to such a request.
KINDS = ("answer", "request", "own answer")
ANSWER, REQUEST, OWN_ANSWER = range(3)
#: Number of best tokens saved per position.
TOP = 16
#: Number of sequences decoded together.
BATCH = 64
#: Largest number of tokens of an answer, and of a request.
LONGEST, LONGEST_REQUEST = 192, 48
#: The temperature of requests and of half of the answers.
TEMPERATURE = 0.8
#: A file in the folder of texts, locked by the process that writes them.
LOCK_FILE = "writing.lock"
#: Errors of file systems that cannot lock files.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
#: Seconds between parts.
PART_SECONDS = 30.0
#: A text ends once its last tokens repeat ``REPEATS`` times, with a period of at most ``PERIOD``.
PERIOD, REPEATS = 32, 4
#: Number of positions at which a model is compared with the text of earlier runs.
COMPARED = 64
#: The least share of equal best tokens there. Quantization changes a few per cent of them, another model of the same
#: sizes most.
SAME_MODEL = 0.7
#: Placeholder for the user's turn in a chat template.
_MARK = "\u2062turn\u2062"


class Recorder(Choose):
    """A ``Choose`` that records the best tokens at every position at which a token is chosen.

    Args:
        choose: chooses the tokens.

    Attributes:
        ids, logprobs: of each position, (TOP,); fewer if the vocabulary is smaller.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.ids: list[Any] = []
        self.logprobs: list[Any] = []

    def __call__(self, scores: Scores, node: int) -> int:
        ids, odds = scores.top([node], TOP)
        self.ids.append(np.asarray(ids[0], np.int32).copy())
        self.logprobs.append((np.asarray(odds[0]) - _log_mass(scores, node)).astype(np.float16))
        return self._choose(scores, node)

    def overlap(self, tree: TokenTree) -> None:
        self._choose.overlap(tree)


def _log_mass(scores: Any, node: int) -> float:
    """The logarithm of the sum of exp(logit - largest logit)."""
    host = scores.host(node) if hasattr(scores, "host") else None
    row = host[0] if host is not None else np.asarray(scores.row(node).float().cpu())
    return float(np.log(np.exp(row - row.max()).sum(dtype=np.float64)))


def loops(tokens: list[int]) -> bool:
    """Whether the end of a sequence repeats itself."""
    for period in range(1, PERIOD + 1):
        if len(tokens) < REPEATS * period:
            return False
        tail = tokens[-REPEATS * period :]
        if tail[period:] == tail[:-period]:
            return True
    return False


@dataclass(slots=True)
class Text:
    """One text. ``kind`` indexes ``KINDS``; ``ids`` and ``logprobs`` have a row for each token of the completion."""

    number: int
    kind: int
    temperature: float
    prompt: list[int]
    completion: list[int]
    ids: Any
    logprobs: Any


@dataclass(slots=True)
class _Job:
    number: int
    kind: int
    temperature: float
    recorder: Recorder | None = None


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
            with _uninterrupted():
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
            saved = f"the {self.tokens} tokens saved before are complete"
            raise not_writable(self.path, error, saved) from None

    def _new_part(self) -> Path:
        """The file after the last part; it does not exist."""
        names = (file.stem.removeprefix("part-") for file in self.parts())
        number = max((int(name) + 1 for name in names if name.isdecimal()), default=0)
        return self.path / f"part-{number:06d}.npz"


def _locked(folder: Path) -> FileLock:
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


def check_folder(folder: Path) -> None:
    """Raise SettingsError unless the folder can be written, to be called before hours of work."""
    check_writable(folder, str(folder), "set XDG_CACHE_HOME or give another path")


def check_output(file: Path) -> None:
    """Raise SettingsError unless the file can be written, to be called before hours of work."""
    if file.is_dir():
        raise SettingsError(f"--output must be a file, got the folder {file}")
    check_folder(file.absolute().parent)


def check_same_model(target: Target, folder: Folder) -> None:
    """Compare the saved best tokens of earlier runs with those of this model.

    Raises:
        SettingsError: the texts were written by another model of the same sizes.
    """
    texts = (text for text in folder.read() if len(text.completion) >= COMPARED // 2)
    text = next(texts, None)
    if text is None:
        return
    count = min(COMPARED, len(text.completion))
    equal = 0
    (scores,) = target.prefill([(0, text.prompt)])
    try:
        for position in range(count):
            equal += scores.best(0) == int(text.ids[position, 0])
            (scores,) = target.forward([(0, TokenTree(text.completion[position]))])
            target.commit([(0, [0])])
    finally:
        target.release(0)
    if equal < SAME_MODEL * count:
        raise SettingsError(
            f"the text in {folder.path} must be this model's own, but its best tokens differ at {count - equal} of "
            f"{count} positions: another model of the same sizes wrote it; move the folder away or set XDG_CACHE_HOME"
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
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


class Writer:
    """Generates and saves a model's own text. Until it is closed, no other process writes text to the folder.

    Args:
        llm: the model, with a tokenizer.
        folder: the folder of the text, to which texts from number ``folder.next_number`` on are added.
        batch: number of sequences decoded together; reduced when they do not fit in memory.

    Raises:
        SettingsError: the model has no tokenizer, its chat template has no turn of a user, another process writes
            text to the folder, or the folder cannot be written.
    """

    def __init__(self, llm: LLM, folder: Folder, batch: int = BATCH) -> None:
        if llm.tokenizer is None:
            raise SettingsError(f"a model's own text needs a tokenizer, but {llm.tokenizer_error}")
        self.llm = llm
        self.folder = folder
        self.batch = batch
        self._chats = has_chat_template(llm.tokenizer)
        self._before = self._before_turn() if self._chats else ""
        self._lock: FileLock | None = None
        self._open()

    def _open(self) -> None:
        if self._lock is None:
            self._lock = _locked(self.folder.path)
            if self.folder.scan:
                self.folder.count_new()  # another process may have added parts until now

    def close(self) -> None:
        """Let other processes write to the folder. ``write`` locks it again."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _before_turn(self) -> str:
        """The chat template's text before the user's turn."""
        chat = [{"role": "user", "content": _MARK}]
        try:
            text = str(self.llm.tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception as error:  # a template is the model's code and may raise anything
            raise SettingsError(
                f"the model's chat template rejects a chat of one user message: {first_line(error)}"
            ) from None
        return text.partition(_MARK)[0]

    def write(
        self,
        enough: Callable[[int, float], bool],
        progress: Callable[[int, float], None] = lambda tokens, seconds: None,
    ) -> int:
        """Write texts until there are enough of them. Returns the number of new tokens, all of which are saved.

        Args:
            enough: called before every step with the number of new tokens and the seconds since the first step; True
                ends the writing. Unfinished texts are saved as they are.
            progress: called with the same numbers after every step.

        Raises:
            SettingsError: a part could not be saved, or another process writes text to the folder.
            LookaheadError: decoding failed; the texts so far are saved.
        """
        self._open()
        numbers = count(self.folder.next_number)
        begin = saved = monotonic()
        compiled = False
        tokens = 0
        ended = list[Text]()
        engine = self.llm.engine(max_sequences=self.batch)
        try:
            while not enough(tokens, monotonic() - begin):
                # Keep the batch full.
                while engine.running + engine.waiting < self.batch:
                    self._add(engine, next(numbers))

                # One step; the model answers the requests that it has finished.
                for update in engine.step():
                    tokens += len(update.tokens)
                    if update.result is None:
                        continue
                    job = update.sequence.request.tag
                    if update.result.tokens:
                        ended.append(_text(job, update.result.prompt_tokens, update.result.tokens))
                    if isinstance(update.result.error, OutOfMemory) and engine.running + engine.waiting:
                        # The engine has ended the longest sequence. The others go on, but fewer at a time.
                        self.batch = max(1, min(self.batch, (engine.running + engine.waiting) // 2))
                        continue
                    update.result.checked()
                    if job.kind == REQUEST:
                        self._answer(engine, job.number, update.result.tokens)

                # Exclude the first pass, whose compilation may take longer than a short time limit.
                if not compiled:
                    begin = monotonic()
                    compiled = True
                if monotonic() - saved > PART_SECONDS:
                    self.folder.save(ended)
                    saved = monotonic()
                progress(tokens, monotonic() - begin)
        finally:
            for sequence in engine.sequences:
                if sequence.tokens:
                    ended.append(_text(sequence.request.tag, sequence.request.prompt, sequence.tokens))
            engine.close()
            self.folder.save(ended)
        return tokens

    def _add(self, engine: Engine, number: int) -> None:
        """Add the first sequence of a text number: an answer to an opening, or a request to be written."""
        temperature = TEMPERATURE if number % 2 else 0.0
        if number // 2 % 5 < 2:
            text = opening(number)
            self._submit(engine, _Job(number, ANSWER, temperature), self._prompt(text))
            return
        begun = self._before + beginning(number)
        if not begun:
            begun = opening(number).partition(" ")[0]
        ids = list(self.llm.tokenizer(begun, add_special_tokens=not self._chats).input_ids)
        self._submit(engine, _Job(number, REQUEST, TEMPERATURE), ids)

    def _answer(self, engine: Engine, number: int, written: list[int]) -> None:
        """Add the model's answer to a request that it has written."""
        words = self.llm.tokenizer.decode(written, skip_special_tokens=True)
        text = (beginning(number) + words).strip() or opening(number)
        temperature = TEMPERATURE if number % 2 else 0.0
        self._submit(engine, _Job(number, OWN_ANSWER, temperature), self._prompt(text))

    def _prompt(self, text: str) -> Any:
        return [{"role": "user", "content": text}] if self._chats else text

    def _submit(self, engine: Engine, job: _Job, prompt: Any) -> None:
        longest = LONGEST_REQUEST if job.kind == REQUEST else LONGEST
        options = Options(max_new_tokens=longest, temperature=job.temperature, drafter=Plain())
        request = self.llm.prepare(prompt, options, 3 * job.number + job.kind if job.temperature else None)
        job.recorder = Recorder(as_choose(request.choose))
        tokens: list[int] = []

        def finished(token: int) -> str | None:
            tokens.append(token)
            return "loop" if len(tokens) % 16 == 0 and loops(tokens) else None

        engine.add(
            replace(request, choose=job.recorder, finished=finished, detokenizer=None, tag=job, seed=None)
        )


def _text(job: _Job, prompt: Any, completion: list[int]) -> Text:
    assert job.recorder is not None
    ids, logprobs = np.stack(job.recorder.ids), np.stack(job.recorder.logprobs)
    length = min(len(completion), len(ids))  # an interruption may occur between a choice and its token
    return Text(
        job.number,
        job.kind,
        job.temperature,
        list(prompt),
        list(completion[:length]),
        ids[:length],
        logprobs[:length],
    )

"""Self-generated text of a model, written in batches, saved in parts (``text_parts``) and continued after an
interruption.

The texts are answers to requests. Two in five requests are openings of this package (``openings``); the model writes
the others by itself, as the user's turn of its chat template. Half of the answers are greedy, half are sampled at
temperature 0.8. A model without a chat template continues openings, and texts that it began by itself.

Each text has a number, which determines its opening, seed and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import Choose, OutOfMemory, Scores, SettingsError, TokenTree
from ..core.errors import first_line
from ..core.verify import as_choose
from ..drafters import Plain
from ..drafters.adaptive.base_files import key_of
from ..model import Model
from ..options import Options
from ..records import cache_folder, check_writable
from ..sampling.scores import host_row
from ..text.prompts import has_chat_template
from .openings import beginning, opening
from .text_parts import ANSWER, OWN_ANSWER, REQUEST, TOP, Folder, Text, locked, uninterrupted

if TYPE_CHECKING:
    from filelock import FileLock

    from ..core import Engine
    from ..llm import LLM

#: Number of sequences decoded together.
BATCH = 64
#: Largest number of tokens of an answer, and of a request.
LONGEST, LONGEST_REQUEST = 192, 48
#: The temperature of requests and of half of the answers.
TEMPERATURE = 0.8
#: Seconds between parts.
PART_SECONDS = 30.0
#: A text ends once its last tokens repeat ``REPEATS`` times, with a period of at most ``PERIOD``.
PERIOD, REPEATS = 32, 4
#: The most numbers of a tensor in the checksum by which a model's folders are named.
SAMPLES = 1 << 16
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
        self.ids.append(np.asarray(ids[0][:TOP], np.int32).copy())
        self.logprobs.append((np.asarray(odds[0][:TOP]) - _log_mass(scores, node)).astype(np.float16))
        return self._choose(scores, node)

    def overlap(self, tree: TokenTree) -> None:
        self._choose.overlap(tree)


def _log_mass(scores: Any, node: int) -> float:
    """The logarithm of the sum of exp(logit - largest logit)."""
    row, _ = host_row(scores, node)
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
class _Job:
    number: int
    kind: int
    temperature: float
    recorder: Recorder | None = None


def folder_name(model: Model) -> str:
    """The name of the folders of a model's text and hidden states: its shape, and a checksum of its weights."""
    return f"{model.shape.name}-{model.checksum(SAMPLES):016x}"


def text_folder(model: Model) -> Path:
    """The folder of a model's own text, beside those of other models with its tokenizer."""
    return cache_folder() / "self-text" / (key_of(model) or "none") / folder_name(model)


def check_folder(folder: Path) -> None:
    """Raise SettingsError unless the folder can be written, to be called before hours of work."""
    check_writable(folder, str(folder), "set XDG_CACHE_HOME or give another path")


def check_output(file: Path, kind: str, is_one: Callable[[Mapping[str, str]], bool]) -> None:
    """Check the file of --output, to be called before hours of work. An earlier file of the same kind is replaced.

    Args:
        file: the file.
        kind: what it will contain, for messages.
        is_one: whether a safetensors file with this metadata contains that.

    Raises:
        SettingsError: it is not a file, or exists and contains something else.
    """
    if file.exists() and not file.is_file():
        found = "folder" if file.is_dir() else "device or pipe"
        raise SettingsError(f"--output must be a file, got the {found} {file}; give another path")
    if file.is_file() and file.stat().st_size and not is_one(_metadata(file)):
        raise SettingsError(
            f"--output must not replace other files, but {file} is not a {kind}; give another path"
        )


def _metadata(file: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file; empty for other files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as content:
            return content.metadata() or {}
    except (SafetensorError, OSError):
        return {}


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
            self._lock = locked(self.folder.path)
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
        before, mark, _ = text.partition(_MARK)
        if not mark:
            raise SettingsError(
                f"the model's chat template must repeat the text of a user message, and it gave {text[:60]!r}; its "
                "messages may have to be lists of parts, which this command does not write"
            )
        return before

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
        # All prompts begin with the chat template, whose rows are reused.
        engine = self.llm.engine(max_sequences=self.batch, prefix_cache=1)
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
            with uninterrupted():  # a second Ctrl-C must not lose the text since the last part
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

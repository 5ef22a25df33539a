"""One thread that decodes for all: texts join and leave between steps, and one forward pass carries all trees.

Knows no HTTP. ``submit`` and ``cancel`` may be called from any thread; what happens to a text is told through its
``deliver``, which is called on the loop's thread and must return at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ..core import UNLIMITED_ROWS, Decoder, Generation, LookaheadError, Request, Step
from ..engine.prefix_cache import PrefixTarget, with_prefixes
from ..engine.text import TextStream
from .metrics import Metrics
from .settings import Settings

if TYPE_CHECKING:
    from ..engine.llm import LLM

log = logging.getLogger("lookahead.server")


class Refused(LookaheadError):
    """A text that is not taken, or was ended: an HTTP status, a machine's word for it, and when to come back."""

    def __init__(self, message: str, status: int, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True, slots=True)
class Event:
    """What one step gave one text.

    Attributes:
        piece: text that has become safe to show, perhaps "".
        tokens: token ids of the step.
        step: the core's step; None where the text ended without one.
        finish: the finish reason, on the last event.
        error: what ended it, where ``finish`` is "error".
    """

    piece: str
    tokens: list[int]
    step: Step | None
    finish: str | None = None
    error: LookaheadError | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One text on its way: what to decode, its text so far, and whom to tell.

    Attributes:
        deadline: by ``time.monotonic``. cached: tokens of the prompt that were not evaluated again.
        generation: of the core, once it has joined.
    """

    request: Request
    text: TextStream
    deadline: float
    deliver: Callable[[Event], None] = lambda event: None
    created: float = field(default_factory=monotonic)
    first_token: float | None = None
    cached: int = 0
    generation: Generation | None = None
    cancelled: bool = False


class Loop:
    """The thread, its queue, and what it decodes with.

    Args:
        load: makes the model; called on the thread.
        failed: called on the thread when the model cannot be loaded.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        settings: Settings,
        metrics: Metrics,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._load, self._settings, self._metrics, self._failed = load, settings, metrics, failed
        self._wake = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stop_at: float | None = None
        self._decoder: Decoder | None = None
        self._kept: PrefixTarget | None = None
        self.llm: LLM | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lookahead-loop", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether texts are taken."""
        return self.llm is not None and self._stop_at is None and self.error is None

    @property
    def load_state(self) -> tuple[int, int]:
        """(texts running, texts waiting)."""
        return len(self._running), len(self._waiting)

    def start(self) -> None:
        """Load the model and begin, in the background."""
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Let texts join, all of them or none.

        Raises:
            Refused: the queue is full, or the server is not ready or about to end.
        """
        with self._wake:
            if not self.ready:
                raise Refused(
                    "the server is not ready, or about to end; try again later", 503, "not_ready", 5
                )
            room = self._settings.max_concurrent - len(self._running) + self._settings.max_queue
            if len(self._waiting) + len(sequences) > room:
                running, waiting = self.load_state
                raise Refused(
                    f"the queue is full ({running} running, {waiting} waiting); try again later",
                    429,
                    "queue_full",
                    1 + waiting // self._settings.max_concurrent,
                )
            self._waiting.extend(sequences)
            self._wake.notify()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End texts that nobody waits for; their slots are free at the next step."""
        for sequence in sequences:
            sequence.cancelled = True

    def stop(self, within: float = 0.0) -> None:
        """Take no more texts; what runs has so many seconds, and is then ended with an error."""
        with self._wake:
            if self._stop_at is None:
                self._stop_at = monotonic() + within
            self._wake.notify()

    def join(self) -> None:
        """Wait for the end of the thread, after ``stop``."""
        self._thread.join()

    # ------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            llm = self._load()
            self._renew(llm)
            self.llm = llm
        except BaseException as error:
            self.error = error
            self._failed()
            return
        while self._wait_for_work():
            self._step()

    def _renew(self, llm: LLM) -> None:
        """A decoder over a fresh cache."""
        settings, target = self._settings, with_prefixes(llm.target(), self._settings.prefix_cache)
        self._kept = target if isinstance(target, PrefixTarget) else None
        # Where a step has one row, a prompt cannot be evaluated in pieces.
        rows = UNLIMITED_ROWS if llm.probe.facts is None else settings.prompt_rows
        known = self._kept.known if self._kept is not None else lambda prompt: 0
        self._decoder = Decoder(target, rows, settings.row_budget, known)

    def _wait_for_work(self) -> bool:
        """Sleep until there is some, and let texts join. False at the end."""
        with self._wake:
            while not (self._waiting or self._running):
                if self._stop_at is not None:
                    return False
                self._wake.wait()
            assert self._decoder is not None
            while self._waiting and len(self._running) < self._settings.max_concurrent:
                sequence = self._waiting.popleft()
                sequence.generation = self._decoder.add(sequence.request)
                self._running.append(sequence)
        return True

    def _step(self) -> None:
        decoder = self._decoder
        assert decoder is not None
        assert self.llm is not None
        self._end_some()
        if not self._running:  # all were cancelled: no step will say so
            self._metrics.held(0, 0, len(self._waiting))
            return
        steps: dict[int, Step] = {}
        begin = monotonic()
        try:
            steps = {id(step.generation): step for step in decoder.step()}
        except Exception as error:  # none of the texts' own code: that is guarded, see ``prepare``
            log.exception(
                "a forward pass failed; its requests end, and the server goes on with a fresh cache"
            )
            failed, self._running = self._running, []
            for sequence in failed:
                sequence.generation = None  # its slot goes with the cache
                self._end(sequence, "error", Refused(f"the forward pass failed: {error}", 500, "step_failed"))
            self._renew(self.llm)
        for sequence in self._running:
            generation = sequence.generation
            assert generation is not None
            step = steps.get(id(generation))
            if step is not None or generation.finish_reason is not None:
                self._tell(sequence, step)
        self._running = [s for s in self._running if s.generation and s.generation.finish_reason is None]
        self._metrics.stepped(steps.values(), monotonic() - begin, *self.load_state)

    def _end_some(self) -> None:
        """Texts that nobody waits for, that are late, or that the end of the server cuts short."""
        now = monotonic()
        over = self._stop_at is not None and now >= self._stop_at
        with self._wake:
            everyone = [*self._running, *self._waiting]
        for sequence in everyone:
            if sequence.cancelled:
                self._end(sequence, "cancelled", None)
            elif over:
                self._end(sequence, "error", Refused("the server is ending", 503, "shutting_down"))
            elif now >= sequence.deadline:
                late = f"the request took longer than {self._settings.request_timeout:g} seconds"
                self._end(sequence, "error", Refused(late, 504, "timeout"))
        with self._wake:
            self._waiting = deque(s for s in self._waiting if not s.cancelled)
        self._running = [s for s in self._running if not s.cancelled]

    def _end(self, sequence: Sequence, reason: str, error: LookaheadError | None) -> None:
        """End a text from outside; what it has emitted was told."""
        sequence.cancelled = True
        if sequence.generation is not None and self._decoder is not None:
            self._decoder.cancel(sequence.generation)
        self._metrics.ended(sequence, reason)
        self._deliver(sequence, Event("", [], None, reason, error))

    def _tell(self, sequence: Sequence, step: Step | None) -> None:
        generation, text = sequence.generation, sequence.text
        assert generation is not None
        finish, error = generation.finish_reason, generation.error
        if step is not None and sequence.first_token is None:
            sequence.first_token = monotonic()
            sequence.cached = self._kept.reused.get(generation.slot, 0) if self._kept is not None else 0
        if finish is not None:
            text.finish()
            self._metrics.ended(sequence, finish)
        self._deliver(sequence, Event(text.drain(), step.tokens if step else [], step, finish, error))

    @staticmethod
    def _deliver(sequence: Sequence, event: Event) -> None:
        try:
            sequence.deliver(event)
        except RuntimeError:  # the event loop that listened is closed
            sequence.cancelled = True

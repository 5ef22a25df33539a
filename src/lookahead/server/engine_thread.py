"""The thread that drives the engine. It adds requests, ends overdue sequences, and delivers the updates of each step.

This module is independent of HTTP. ``submit`` and ``cancel`` may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import abc
from collections.abc import Callable
from time import monotonic

from ..core import Engine, LookaheadError, PassFailed, Request, Sequence, Update
from ..llm import LLM
from .api_errors import Refused
from .idle_learner import IDLE_SECONDS, IdleLearner
from .logs import log_failure
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("lookahead.server")


class EngineThread:
    """The thread and its engine.

    Args:
        load: loads the model and returns it with ``Engine.max_tokens``; called on the thread.
        settings, metrics: the server's settings and metrics.
        failed: called on the thread when the model cannot be loaded or the loop fails.
        started: called on the thread when the model is ready.
    """

    def __init__(
        self,
        load: Callable[[], tuple[LLM, int]],
        settings: Settings,
        metrics: Metrics,
        failed: Callable[[], None],
        started: Callable[[], None],
    ) -> None:
        self._load = load
        self._settings = settings
        self._metrics = metrics
        self._failed = failed
        self._started = started
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._learner: IdleLearner | None = None
        self.engine: Engine | None = None
        self.error: BaseException | None = None
        #: Sequences ended by their deadline.
        self._late: set[Sequence] = set()
        self._thread = threading.Thread(target=self._run, name="lookahead-loop", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.refusal is None

    @property
    def refusal(self) -> Refused | None:
        """Why requests are not accepted; None if they are."""
        if self.error is not None:
            what = "the model could not be loaded" if self.engine is None else "the server failed"
            return Refused(f"{what}; see its log, and restart it", 503, "not_ready")
        if self.engine is None or self._stop_at is not None:
            what = "the model is not ready" if self._stop_at is None else "the server is shutting down"
            return Refused(f"{what}; try again later", 503, "not_ready", 5)
        return None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def load_state(self) -> tuple[int, int]:
        """(sequences running, sequences waiting)."""
        return (self.engine.running, self.engine.waiting) if self.engine is not None else (0, 0)

    def start(self) -> None:
        """Load the model and start serving, in the background."""
        self._thread.start()

    def submit(
        self, requests: abc.Sequence[Request], deliver: Callable[[Update], None], arrived: float
    ) -> list[Sequence]:
        """Submit requests to the engine, all or none.

        Args:
            requests: the sequences to decode.
            deliver: receives every update, on the thread; it must not block.
            arrived: when the HTTP request arrived, by ``time.monotonic()``; its time limit counts from then.

        Raises:
            Refused: see ``check_room``.
        """
        with self._wake:
            engine = self.check_room(len(requests))
            for request in requests:
                request.tag = deliver
            sequences = [engine.add(request) for request in requests]
            for sequence in sequences:
                sequence.added = arrived
            self._wake.notify()
            return sequences

    def check_room(self, count: int = 1) -> Engine:
        """The engine, if it can take this many requests now.

        Raises:
            Refused: the queue is full, or the server is not ready or is shutting down.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        if self._learner is not None:
            self._learner.pause()
        engine = self.engine
        assert engine is not None
        running, waiting = self.load_state
        most = engine.most_running
        if waiting + count > most - running + self._settings.max_queue:
            raise Refused(
                f"the queue is full ({running} running, {waiting} waiting); try again later",
                429,
                "queue_full",
                1 + waiting // most,
            )
        return engine

    def cancel(self, sequences: abc.Iterable[Sequence]) -> None:
        """End sequences whose client has disconnected. Their slots are free in the next step."""
        for sequence in sequences:
            if self.engine is not None:
                self.engine.cancel(sequence)

    def stop(self, within: float = 0.0) -> None:
        """Accept no more requests. Sequences that still run after ``within`` seconds end with an error."""
        with self._wake:
            if self._stop_at is None:
                self._stop_at = monotonic() + within
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread to end, after ``stop``."""
        self._thread.join()

    # ------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        settings = self._settings
        try:
            llm, max_tokens = self._load()
            engine = llm.engine(
                max_sequences=settings.max_concurrent,
                prompt_rows=settings.prompt_rows,
                row_budget=settings.row_budget,
                prefix_cache=settings.prefix_cache,
                max_tokens=max_tokens,
            )
            if settings.learn_when_idle:
                self._learner = IdleLearner(settings.loading(), llm.model.device)
            self.engine = engine
            self._started()
            while self._wait_for_work(engine):
                self._step(engine)
        except BaseException as error:
            self.error = error
            self._failed()
            if self.engine is not None:
                self._end_all(self.engine, error)
        finally:
            if self._learner is not None:
                self._learner.close()

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there is something to decode. Returns False when the loop must end."""
        with self._wake:
            while not engine.busy:
                if self._stop_at is not None:
                    return False
                self._wake.wait(None if self._learner is None else IDLE_SECONDS)
                if self._learner is not None and not engine.busy:
                    self._learner.resume()
        return True

    def _step(self, engine: Engine) -> None:
        self._end_late(engine)
        begin = monotonic()
        updates = engine.step()
        seconds = monotonic() - begin
        for update in updates:
            self._deliver(engine, update)
        self._log_failures(updates)
        emitted = [update for update in updates if update.tokens]
        if emitted:
            self._metrics.stepped(emitted, seconds)
        running = engine.sequences[: engine.running]
        tokens = sum(len(sequence.request.prompt) + len(sequence.tokens) for sequence in running)
        self._metrics.held(tokens, *self.load_state)

    def _end_late(self, engine: Engine) -> None:
        """End sequences past their deadline, and all sequences when the shutdown grace period is over."""
        now = monotonic()
        over = self._stop_at is not None and now >= self._stop_at
        for sequence in engine.sequences:
            if over:
                engine.cancel(sequence, Refused("the server is shutting down", 503, "shutting_down"))
            elif now - sequence.added >= self._settings.request_timeout:
                # A completion that has begun is returned, and ends as at any other limit.
                engine.cancel(sequence, None if sequence.tokens else self._too_late())
                self._late.add(sequence)

    def _too_late(self) -> Refused:
        """The error of a request that reached its time limit before its first token."""
        late = f"the request took longer than {self._settings.request_timeout:g} seconds"
        return Refused(late, 504, "timeout")

    def _end_all(self, engine: Engine, error: BaseException) -> None:
        """End all sequences after an error of the loop, because nothing will decode them."""
        ended = LookaheadError(f"the server failed ({error!r}); see its log")
        log_failure("the decoding loop failed; all requests end", error, self._settings.log_text)
        # A request that passed the check of ``ready`` before the error is in the queue once the lock is free.
        with self._wake:
            sequences = engine.sequences
        engine.target = None  # it may have been the cause, so no slot is released
        for sequence in sequences:
            engine.cancel(sequence, ended)
        for update in engine.step():
            try:
                self._deliver(engine, update)
            except Exception:
                log.error("failed to notify a request of the error")

    def _deliver(self, engine: Engine, update: Update) -> None:
        if update.result is not None:
            if update.sequence in self._late:
                self._late.remove(update.sequence)
                if update.result.finish_reason == "cancelled":
                    update.result.finish_reason = "length"
            self._metrics.ended(update.sequence, update.result)
        deliver: Callable[[Update], None] = update.sequence.request.tag
        try:
            deliver(update)
        except RuntimeError:  # the event loop that serves the client is closed
            engine.cancel(update.sequence)

    def _log_failures(self, updates: abc.Sequence[Update]) -> None:
        """Log the traceback of each error once."""
        errors = {id(u.result.error): u.result.error for u in updates if u.result is not None}
        for error in errors.values():
            if error is None or error.__cause__ is None:
                continue
            what = "its requests end" if isinstance(error, PassFailed) else "its request ends"
            log_failure(f"{type(error).__name__}; {what}", error.__cause__, self._settings.log_text)

"""The engine: decodes all sequences on one model, from the queue to the last token.

    engine = Engine(make_target)
    sequence = engine.add(Request(prompt, drafter, max_new_tokens=64))
    while engine.busy:
        for update in engine.step():        one forward pass, and an update for each sequence
            print(update.piece)

``LLM``, the server, the benchmark and ``model.generate(custom_generate=...)`` all drive this class. It
    queues sequences: at most ``max_sequences`` run, the others wait in order;
    decodes plainly if the model cannot evaluate drafts, whatever drafter a request has;
    measures step times for drafters that choose their rows by them, if no text can depend on the choice;
    ends only the sequence whose own code raises (drafter, chooser, logits processor, grammar, stop function, text);
    continues with a new target after a forward pass has failed.

The loop over the running sequences is ``lookahead.core.Decoder``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import UNLIMITED_ROWS, Decoder, Drafter, Generation, LookaheadError, Request, Step, Target
from ..core.errors import failure
from ..core.target import PROMISES, UP_TO_ROUNDING
from ..drafters import Plain
from ..integrations.llamacpp.llamacpp_target import LlamaCppTarget
from ..targets.factory import probe
from ..targets.probe import Probe
from .prefix_cache import PrefixTarget, with_prefixes
from .progress import notice_if_slow
from .results import Result, Sequence, Update
from .text import TextStream

if TYPE_CHECKING:
    from ..drafters.adaptive.step_times import StepTimes

UNLIMITED_SEQUENCES = 1 << 20


class PassFailed(LookaheadError):
    """A forward pass failed: every sequence in it has ended. ``__cause__`` is the error."""


class Engine:
    """Decodes any number of sequences together. They may join and leave between steps.

    ``add`` and ``cancel`` may be called from any thread and take effect in the next step. One thread calls ``step``.

    Args:
        make_target: makes a target. Called at once, and again after a forward pass has failed.
        model: the model that the targets evaluate; None if there is only a target, as in tests. The engine probes
            whether it can evaluate drafts, and measures its step times.
        probed: the result of ``probe`` for the model; if None, the engine probes it.
        target: the first target, which an earlier engine's ``close`` returned; None to make one.
        max_sequences: largest number of sequences that run together.
        prompt_rows: rows of prompts in one forward pass; longer prompts are evaluated in chunks that alternate with
            steps.
        row_budget: rows of all trees in one forward pass; every tree has its root even if the budget is smaller.
        prefix_cache: number of finished sequences whose keys and values are kept for prompts with the same beginning.

    Raises:
        SettingsError, OutOfMemory: as ``make_target`` does.
    """

    def __init__(
        self,
        make_target: Callable[[], Target],
        model: Any = None,
        *,
        probed: Probe | None = None,
        target: Target | None = None,
        max_sequences: int = UNLIMITED_SEQUENCES,
        prompt_rows: int = UNLIMITED_ROWS,
        row_budget: int = UNLIMITED_ROWS,
        prefix_cache: int = 0,
    ) -> None:
        self._make_target, self._model, self._prefix_cache = make_target, model, prefix_cache
        if probed is None and model is not None:
            probed = probe(model)
        self._drafts = probed is None or probed.mode != "plain"
        # A chunk of a prompt is evaluated as a tree.
        chunked = probed is None or probed.facts is not None
        self._limits = prompt_rows if chunked else UNLIMITED_ROWS, row_budget
        self.max_sequences = max_sequences
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._cancelled: deque[tuple[Sequence, LookaheadError | None]] = deque()
        self._in_step = False
        self._decoder: Decoder | None = self._new_decoder(target)

    @property
    def running(self) -> int:
        """The number of running sequences."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of waiting sequences."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a sequence runs, waits, or is to be cancelled."""
        return bool(self._running or self._waiting or self._cancelled)

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, then the waiting ones."""
        return [*self._running, *self._waiting]

    def add(
        self, request: Request, text: TextStream | None = None, *, seed: int | None = None, tag: Any = None
    ) -> Sequence:
        """Add a request. Returns its handle.

        Args:
            request: what to decode.
            text: turns its tokens into text and finds stop strings; None for token ids only.
            seed: seed of the random numbers, for the result.
            tag: the caller's own value; see ``Sequence``.
        """
        if text is not None and text.stops and request.finished is None:
            request = replace(request, finished=lambda token: "stop" if text.push(token) else None)
        sequence = Sequence(request, text, seed, tag)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence, error: LookaheadError | None = None) -> None:
        """End a sequence before the next forward pass, as "cancelled" or with an error. Its tokens are kept."""
        if sequence.result is None:
            self._cancelled.append((sequence, error))

    def step(self) -> list[Update]:
        """Run one forward pass over all running sequences. Waiting sequences join first while there is room."""
        updates = list(self._end_cancelled())
        while self._waiting and len(self._running) < self.max_sequences:
            updates += self._start(self._waiting.popleft())
        if self._running:
            self._in_step = True
            updates += self._forward()
            self._in_step = False
        return updates

    def close(self) -> Target | None:
        """End all sequences without an update.

        Returns:
            The target, for another engine; None if its state is unknown, because an exception such as
            KeyboardInterrupt interrupted a step.
        """
        if self._decoder is None:
            return None
        for sequence in self._running:
            if sequence.generation is not None:
                self._decoder.cancel(sequence.generation)
        self._running.clear()
        self._waiting.clear()
        decoder, self._decoder = self._decoder, None
        return None if self._in_step else decoder.target

    def _new_decoder(self, target: Target | None = None) -> Decoder:
        if target is None:
            target = with_prefixes(self._make_target(), self._prefix_cache)
        known = target.known if isinstance(target, PrefixTarget) else lambda prompt: 0
        return Decoder(target, *self._limits, known)

    def _end_cancelled(self) -> Iterator[Update]:
        while self._cancelled:
            sequence, error = self._cancelled.popleft()
            if sequence.result is not None:
                continue
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            yield self._end(sequence, "cancelled" if error is None else "error", error)

    def _start(self, sequence: Sequence) -> list[Update]:
        """Hand a sequence to the decoder."""
        try:
            if self._decoder is None:
                self._decoder = self._new_decoder()
            request = replace(sequence.request, drafter=self._drafter(sequence.request.drafter))
            if request.drafter.needs_step_times and request.step_times is None:
                request = replace(request, step_times=self._step_times(self._decoder.target.path))
            sequence.request = request
            sequence.generation = self._decoder.add(sequence.request)
        except Exception as error:
            return [self._end(sequence, "error", failure("starting the request", error))]
        self._running.append(sequence)
        return []

    def _drafter(self, given: Drafter) -> Drafter:
        """The drafter of a request, within what the target allows."""
        if not self._drafts:
            return Plain()
        assert self._decoder is not None
        path = self._decoder.target.path
        # On llama.cpp, rows cost so much that steps of a fixed size would take several times as long as plain steps.
        rounds = PROMISES.get(path) == UP_TO_ROUNDING and path != LlamaCppTarget.path
        dtype = getattr(self._model, "dtype", None) if rounds else None
        return given.untimed() if dtype is not None and dtype.itemsize == 2 else given

    def _step_times(self, path: str) -> StepTimes | None:
        """Step times of the model on this machine, read from disk or measured now; None without a model."""
        if self._model is None:
            return None
        from ..drafters.adaptive.measure import times_for  # loads numba

        with notice_if_slow("measuring steps of this model (once; their times are kept)"):
            return times_for(self._model, path, self._make_target)

    def _forward(self) -> list[Update]:
        decoder = self._decoder
        assert decoder is not None
        try:
            steps = {id(step.generation): step for step in decoder.step()}
        except Exception as error:
            # The target's state is unknown now, so its sequences end. Waiting sequences will use a new target.
            self._decoder = None
            failed = failure("the forward pass", error, PassFailed)
            return [self._end(sequence, "error", failed) for sequence in list(self._running)]
        updates = []
        for sequence in list(self._running):
            generation = sequence.generation
            assert generation is not None
            step = steps.get(id(generation))
            if step is not None or generation.finish_reason is not None:
                updates.append(self._update(sequence, generation, step))
        return updates

    def _update(self, sequence: Sequence, generation: Generation, step: Step | None) -> Update:
        """The update of a sequence after a step."""
        text, piece, target = sequence.text, "", self._decoder and self._decoder.target
        if step is not None and step.tree is None and isinstance(target, PrefixTarget):
            sequence.cached = target.reused.get(generation.slot, 0)
        try:
            if text is not None:
                if step is not None and sequence.request.finished is None:
                    for token in step.tokens:
                        text.push(token)
                if generation.finish_reason is None:
                    piece = text.drain()
        except Exception as error:
            return self._end(sequence, "error", failure("the text", error), step)
        if generation.finish_reason is None:
            return Update(sequence, step, piece, None)
        return self._end(sequence, generation.finish_reason, generation.error, step)

    def _end(
        self, sequence: Sequence, reason: str, error: LookaheadError | None, step: Step | None = None
    ) -> Update:
        """The last update of a sequence."""
        generation, text = sequence.generation, sequence.text
        if sequence in self._running:
            self._running.remove(sequence)
        if generation is None:
            generation = sequence.generation = Generation(sequence.request)
        elif self._decoder is not None:
            self._decoder.cancel(generation)
        piece = ""
        if text is not None:
            try:
                text.finish()
                piece = text.drain()
            except Exception as raised:
                reason, error = "error", error or failure("the text", raised)
        sequence.result = Result(
            text.text if text is not None else "",
            generation.tokens,
            reason,
            generation.stats,
            list(sequence.request.prompt),
            sequence.seed,
            text.stopped if text is not None else None,
            error,
        )
        return Update(sequence, step, piece, sequence.result)

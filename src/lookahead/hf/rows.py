"""One sequence of a batch, chosen token by token exactly as transformers' own loop would choose it.

Knows logits processors, stopping criteria and random numbers; knows nothing of trees or models.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, PrefixConstrainedLogitsProcessor

from ..core.target import Scores
from ..threads import one_thread

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

FAR = 1 << 60
#: More than a step can emit.
BEHIND = 64


class NoiseStream:
    """The random numbers of ``torch.multinomial``, drawn in time order, kept until all rows used them.

    torch.multinomial(p, 1) is argmax(p / q) with q exponential noise of p's shape from the same generator.
    Rows of a batch reach a time step in different forward passes, and a drafter may look ahead; the
    generator still ends where plain sampling would have left it.

    Args:
        batch: B. vocabulary: V. device: of the noise.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (batch, vocabulary)
        self._device = device
        self._noise: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each step's draw
        self._drawn = 0
        self._next = [0] * batch
        self._furthest = 0
        #: Used time steps that are kept all the same, for a drafter that observes what was emitted.
        self.behind = 0

    def at(self, step: int) -> torch.Tensor:
        """Exponential noise (B, V) of time step ``step``."""
        while self._drawn <= step:
            self._states[self._drawn] = self._generator_state()
            noise = torch.empty(self._shape, dtype=torch.float32, device=self._device)
            with one_thread:  # the numbers do not depend on the threads
                self._noise[self._drawn] = noise.exponential_(1)
            self._drawn += 1
        return self._noise[step]

    def used(self, row: int, step: int) -> None:
        """Row ``row`` needs no noise up to and including ``step`` any more."""
        self._next[row] = step + 1
        # Plain sampling draws as far as the row that is furthest ahead, so that state may still be wanted.
        self._furthest = max(self._furthest, step + 1 if step < FAR else 0)
        for old in [key for key in self._states if key < self._furthest]:
            del self._states[old]
        oldest = min(*self._next, self._furthest) - self.behind
        for old in [key for key in self._noise if key < oldest]:
            del self._noise[old]

    def settle(self, steps: int) -> None:
        """Leave the generator as after ``steps`` time steps of plain sampling, if more were drawn ahead."""
        if steps < self._drawn:
            self._set_generator_state(self._states[steps])

    def _generator_state(self) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set_generator_state(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


class RowNoise:
    """What a drafter may know of one row's coming random numbers. Fulfils ``lookahead.core.drafter.Noise``.

    argmax(p / q) is argmax(log p - log q), so -log q is the Gumbel noise of ``torch.multinomial``.
    """

    def __init__(self, stream: NoiseStream, row: int, temperature: float) -> None:
        self.temperature = temperature
        self._stream = stream
        self._row = row
        stream.behind = BEHIND

    def __call__(self, index: int) -> Any:
        with one_thread:
            return -self._stream.at(index)[self._row].log().cpu().numpy()


class Row:
    """One sequence of the batch: chooses its tokens as transformers' loop does, and knows when it ends.

    Args:
        index: place in the batch.
        ids: the prompt as transformers sees it, padding included, shape (L,).
        processors: applied to the logits with the true prefix; None for none.
        noise: for sampling; None for greedy.
        keep_scores, keep_logits: collect what output_scores and output_logits return.
    """

    def __init__(
        self,
        index: int,
        ids: torch.Tensor,
        length: int,
        processors: LogitsProcessorList | None,
        criteria: Criteria,
        noise: NoiseStream | None,
        keep_scores: bool,
        keep_logits: bool,
        streamer: BaseStreamer | None,
    ) -> None:
        self.index = index
        self._ids = torch.empty(1, len(ids) + length, dtype=torch.long, device=ids.device)
        self._ids[0, : len(ids)] = ids
        self._prompt = self._end = len(ids)
        self._processors = processors
        self._criteria = criteria
        self._noise = noise
        self._streamer = streamer
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        #: Once the sequence has ended: it is only carried on to the length of the longest one,
        self.ended = False
        #: with this token, or with its own text where that is None.
        self.fill: int | None = None

    @property
    def emitted(self) -> int:
        """Tokens so far."""
        return self._end - self._prompt

    def tokens(self) -> torch.Tensor:
        """The tokens emitted."""
        return self._ids[0, self._prompt : self._end]

    def choose(self, scores: Scores, node: int) -> int:
        """The token under ``node``, by the processors, the noise and the true prefix."""
        plain = self._processors is None and self._noise is None
        if plain and self.scores is None and self.logits is None:
            token = scores.best(node)
        else:
            with one_thread:
                token = self._choose(scores.row(node).float(), scores.best(node))
        if self.fill is not None:
            token = self.fill
        if self._noise is not None and not self.ended:
            self._noise.used(self.index, self.emitted)
        self._ids[0, self._end] = token
        self._end += 1
        return token

    def _choose(self, logits: torch.Tensor, best: int) -> int:
        values = logits[None].clone()
        if self.logits is not None:
            self.logits.append(values.clone())
        if self._processors is not None:
            values = self._processors(self._ids[:, : self._end], values)
        if self.scores is not None:
            self.scores.append(values)
        if self._noise is not None and self.fill is None:
            p = torch.nn.functional.softmax(values, dim=-1)
            noise = self._noise.at(self.emitted)[self.index]
            return int((p[0] / noise).argmax())
        return best if self._processors is None else int(values.argmax())

    def finished(self, token: int) -> str | None:
        """Whether the stopping criteria end the sequence after its newest token."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self.ended:
            return None
        scores = tuple(self.scores) if self.scores is not None else None
        reason = self._criteria.reason(self._ids[:, : self._end], token, scores)
        if reason is not None and self._noise is not None and self._criteria.pads:
            self._noise.used(self.index, FAR)  # padding draws nothing
        return reason


class Criteria:
    """Stopping criteria of one row; the two that every call has are answered without tensors."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.eos: frozenset[int] = frozenset()
        self.max_length = 1 << 60
        self._others = StoppingCriteriaList()
        for one in criteria:
            if type(one) is EosTokenCriteria:
                self.eos |= frozenset(int(t) for t in one.eos_token_id.flatten())
            elif type(one) is MaxLengthCriteria:
                self.max_length = min(self.max_length, one.max_length)
            else:
                self._others.append(one)
        #: transformers pads rows that have ended only where such a criterion is present.
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)

    def reason(self, ids: torch.Tensor, token: int, scores: tuple[torch.Tensor, ...] | None) -> str | None:
        """A finish reason, or None to go on. Every criterion is asked for every token, as in plain decoding."""
        stop = any([bool(torch.as_tensor(one(ids, scores)).any()) for one in self._others])
        if stop or token in self.eos:
            return "stop"
        return "length" if ids.shape[1] >= self.max_length else None


def row_processors(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList | None:
    """Processors see one row at a time, so one that asks for the row's number is told it."""
    if not processors:
        return None
    return (
        processors if batch == 1 else LogitsProcessorList(_row_processor(p, row, batch) for p in processors)
    )


def _row_processor(processor: Any, row: int, batch: int) -> Any:
    """A copy with what ``processor`` keeps for this row; ``processor`` itself where it keeps nothing."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    for name in ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams"):
        kept = getattr(processor, name, None)
        if kept is not None and not isinstance(kept, int):
            own = copy.copy(processor)
            # With num_return_sequences there are fewer entries than rows.
            place = row * len(kept) // batch
            setattr(own, name, kept[place : place + 1])
            if hasattr(own, "batch_size"):
                own.batch_size = 1
            return own
    return processor


def may_draw_ahead(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether nothing but sampling itself can use the random generator: a caller's own class might."""
    return all(type(one).__module__.startswith("transformers.") for one in [*processors, *criteria])

"""A sequence of a batch. Its tokens are chosen exactly as in transformers' own loop.

This module handles logits processors and stopping criteria, and is independent of trees and models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.logits_process import (
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..core import SettingsError
from ..core.verify import Choose, greedy
from .sampling import GeneratorNoise, RowNoise, TensorChooser

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass(eq=False)
class Row:
    """A sequence of the batch: its emitted tokens, its records, and its stopping criteria.

    Attributes:
        index: the row's index in the batch.
        prompt: token ids as given to transformers, padding included, shape (L,).
        length: maximum number of tokens to emit.
        processors: applied to the logits with the true prefix; None for none.
        criteria: the stopping criteria.
        stream: the noise of the batch, for sampling; None for greedy decoding.
        temperature: the sampling temperature.
        device: the device of the logits. As in transformers, tokens are chosen on that of the prompt.
        scores, logits: collect the results of output_scores and output_logits; None if these are not set.
        streamer: receives every token; None for none.
        ended: whether a criterion has ended the sequence. It may continue to the length of the longest row.
        fill: the padding token with which it continues, for the scores; None to continue with its own tokens.
    """

    index: int
    prompt: torch.Tensor
    length: int
    processors: LogitsProcessorList | None
    criteria: Criteria
    stream: GeneratorNoise | None
    temperature: float
    device: torch.device
    scores: list[torch.Tensor] | None
    logits: list[torch.Tensor] | None
    streamer: BaseStreamer | None
    ended: bool = False
    fill: int | None = None

    def __post_init__(self) -> None:
        self._end = len(self.prompt)
        self._ids = self.prompt.new_empty(1, self._end + self.length)
        self._ids[0, : self._end] = self.prompt

    @property
    def emitted(self) -> int:
        """The number of tokens emitted so far."""
        return self._end - len(self.prompt)

    @property
    def records(self) -> bool:
        """Whether scores or logits are collected."""
        return self.scores is not None or self.logits is not None

    @property
    def draws(self) -> bool:
        """Whether the sequence may still need noise; padding draws nothing."""
        return not (self.ended and self.criteria.pads)

    def tokens(self) -> torch.Tensor:
        """The tokens emitted so far."""
        return self._ids[0, len(self.prompt) : self._end]

    def noise(self) -> RowNoise | None:
        """The noise of the tokens from here on; None if the sequence is greedy or being padded."""
        if self.stream is None or self.fill is not None:
            return None
        return RowNoise(self.stream, self.index, self.emitted, self.temperature)

    def choose(self) -> Choose:
        """The chooser of the tokens from here on."""
        elsewhere = self.device != self.prompt.device
        process = self._process if self.records or self.processors is not None or elsewhere else None
        noise = self.noise()
        if process is None and noise is None:
            return greedy
        chooser = TensorChooser(self._ids[0, : self._end].tolist(), process, noise)
        chooser.replaces_nan = any(
            isinstance(each, InfNanRemoveLogitsProcessor) for each in self.processors or ()
        )
        return chooser

    def _process(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Scores (1, V) from logits (1, V). Records both if requested."""
        ids, values = ids.to(self.prompt.device), values.to(self.prompt.device)
        if self.logits is not None:
            self.logits.append(values.clone())
        if self.processors is not None:
            with _one_row(self.criteria.batch, "logits processor"):
                values = self.processors(ids, values)
        if self.scores is not None:
            self.scores.append(values)
        if self.fill is not None:
            values = torch.full_like(values, float("-inf"))
            values[0, self.fill] = 0
        elif self.stream is None:  # if all tokens are excluded, transformers chooses the first
            values = values.clamp(min=torch.finfo(values.dtype).min)
        return values

    def finished(self, token: int) -> str | None:
        """Append an emitted token. Returns the finish reason if a criterion ends the sequence after it."""
        self._ids[0, self._end] = token
        self._end += 1
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if self.ended:
            return None
        scores = tuple(self.scores) if self.scores is not None else None
        reason = self.criteria.reason(self._ids[:, : self._end], token, scores)
        self.ended = reason is not None
        return reason


@contextmanager
def _one_row(batch: int, what: str) -> Iterator[None]:
    """Raise SettingsError for an index beyond the row that user code sees, where transformers passes all rows."""
    try:
        yield
    except IndexError as error:
        if batch == 1:
            raise
        raise SettingsError(
            f"a {what} must not index rows of the batch, because here each call sees one row (1, L) of the {batch}, "
            f"but it raised {error!r:.120}; pass one sequence, or use model.generate without custom_generate"
        ) from None


class Criteria:
    """Stopping criteria of one row. The two criteria in every call are evaluated without tensors.

    Args:
        criteria: the criteria.
        batch: B, the rows of the batch.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int = 1) -> None:
        self.batch = batch
        self.eos: frozenset[int] = frozenset()
        self.max_length: int | None = None
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= frozenset(int(t) for t in criterion.eos_token_id.flatten())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length or criterion.max_length, criterion.max_length)
            else:
                self._others.append(criterion)
        #: transformers pads finished rows only if there is such a criterion.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    def reason(self, ids: torch.Tensor, token: int, scores: tuple[torch.Tensor, ...] | None) -> str | None:
        """A finish reason, or None to continue. Every criterion is called for every token, as in plain decoding.

        Raises:
            SettingsError: a criterion returns one value for all of several rows, which ends all of them in
                transformers; here, rows reach a time step in different passes.
        """
        with _one_row(self.batch, "stopping criterion"):
            answers = [(criterion, torch.as_tensor(criterion(ids, scores))) for criterion in self._others]
        for criterion, answer in answers:
            if self.batch > 1 and answer.dim() == 0:
                raise SettingsError(
                    f"a stopping criterion must return a tensor of shape (batch,) for several sequences, but "
                    f"{type(criterion).__name__} returned a single value"
                )
        stop = any([bool(answer.any()) for _, answer in answers])
        if stop or token in self.eos:
            return "stop"
        return "length" if self.max_length is not None and ids.shape[1] >= self.max_length else None


List = TypeVar("List", LogitsProcessorList, StoppingCriteriaList)


def for_row(used: List, batch: int) -> List:
    """Processors or criteria for one row: copies of those from outside transformers, which may keep the row's state.

    Raises:
        SettingsError: one cannot be copied.
    """
    return used if batch == 1 else type(used)(_own_copy(each) for each in used)


def _own_copy(used: Any) -> Any:
    if _is_of_transformers(used):
        return used
    # Models and tokenizers are shared: they are large, and are not part of a sequence's state.
    parts = getattr(used, "__dict__", {}).values()
    shared = {id(x): x for x in parts if isinstance(x, (torch.nn.Module, PreTrainedTokenizerBase))}
    try:
        return copy.deepcopy(used, shared)
    except Exception as error:  # a class may raise anything
        raise SettingsError(
            f"for several sequences, {type(used).__name__} must allow copy.deepcopy, because each sequence needs its "
            f"own, but it raised {error!r:.80}; pass one sequence"
        ) from error


def _is_of_transformers(used: Any) -> bool:
    return type(used).__module__.startswith("transformers.")


def row_processors(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList | None:
    """Processors for one row. They see only that row, and get its index if they need it."""
    if batch == 1 or not processors:
        return processors or None
    own = for_row(processors, batch)
    return LogitsProcessorList(_row_processor(processor, row, batch) for processor in own)


def _row_processor(processor: Any, row: int, batch: int) -> Any:
    """A copy with the processor's data for this row; the processor itself if it has no per-row data."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    for name in ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams"):
        kept = getattr(processor, name, None)
        if kept is not None and not isinstance(kept, int):
            own = copy.copy(processor)
            index = row * len(kept) // batch  # with num_return_sequences there are fewer entries than rows
            setattr(own, name, kept[index : index + 1])
            if hasattr(own, "batch_size"):
                own.batch_size = 1
            return own
    return processor


def may_draw_ahead(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether only sampling uses the random generator. A class from outside transformers might use it too."""
    return all(_is_of_transformers(used) for used in [*processors, *criteria])

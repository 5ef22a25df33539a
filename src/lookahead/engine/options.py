"""What one generation may be told: length, sampling, penalties, stops. Checked here, once, by name.

Options that are not given are neutral: the text is then the model's greedy one. Nothing is taken from the
model's saved generation config but its end tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from ..core import SettingsError
from ..drafters import METHODS
from ..sampling import Process


class OptionFields(TypedDict, total=False):
    """The keywords of ``LLM.generate``, ``LLM.stream`` and ``LLM.run``; see ``Options``."""

    max_new_tokens: int
    method: str | None
    config: Any
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    min_new_tokens: int | None
    bad_words: Sequence[str | Sequence[int]] | None
    logits_processor: Process | Sequence[Process] | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    pool: Any


def _must(holds: bool, rule: str, given: Any, cure: str = "") -> None:
    if not holds:
        raise SettingsError(f"{rule}, got {given!r}" + (f"; {cure}" if cure else ""))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one generation.

    Attributes:
        max_new_tokens: at least 1; the model's context may end the text earlier.
        method: a name in ``lookahead.drafters.METHODS``; None for the one given to ``load``, or for the one that
            ``config`` is for.
        config: anything ``LookaheadConfig.of`` takes, or settings of adaptive; None for the one given to ``load``.
        temperature: 0 is greedy, above 0 samples.
        top_k, top_p, min_p, typical_p: which tokens a draw may take; need a temperature above 0.
        repetition_penalty: above 0, 1 is neutral. no_repeat_ngram_size: at least 1.
        min_new_tokens: no end token before that many.
        bad_words: texts, or lists of token ids, that never appear.
        logits_processor: callables (ids (1, L), scores (1, V)) -> scores, applied before temperature.
        seed: of the draws. None takes one from torch's global generator. Prompt number i of a list has
            seed + i.
        stop: strings that end the text and are not part of it.
        ignore_eos: go on past the model's end tokens.
        pool: what the method keeps across calls: an ``NGramPool`` for "lookahead", one prompt at a time, or an
            ``lookahead.drafters.adaptive.AdaptiveState`` for "adaptive", which the prompts of a list share.
    """

    max_new_tokens: int = 128
    method: str | None = None
    config: Any = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    logits_processor: Process | Sequence[Process] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    pool: Any = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keywords. Raises SettingsError on a name that is not an option."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SettingsError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        n = self.max_new_tokens
        _must(_whole(n) and n >= 1, "max_new_tokens must be a whole number of at least 1", n)
        _must(
            self.method is None or self.method in METHODS,
            f"method must be one of {', '.join(METHODS)}",
            self.method,
        )
        t = self.temperature
        _must(
            _number(t) and 0 <= t < float("inf"),
            "temperature must be a number of at least 0",
            t,
            "0 is greedy",
        )
        self._check_sampling()
        self._check_penalties()
        _must(self.seed is None or _whole(self.seed), "seed must be a whole number or None", self.seed)
        for text in self.stops:
            _must(
                isinstance(text, str) and text != "",
                "a stop string must be a text of at least 1 character",
                text,
            )
        _must(isinstance(self.ignore_eos, bool), "ignore_eos must be true or false", self.ignore_eos)
        for process in self.processors:
            _must(callable(process), "logits_processor must be a callable or a list of callables", process)

    def _check_sampling(self) -> None:
        for name, low, high in (("top_p", 0, 1), ("min_p", 0, 1), ("typical_p", 0, 1)):
            value = getattr(self, name)
            _must(
                value is None or (_number(value) and low < value <= high),
                f"{name} must be above {low} and at most {high}",
                value,
            )
        k = self.top_k
        _must(k is None or (_whole(k) and k >= 1), "top_k must be a whole number of at least 1", k)
        given = [n for n in ("top_k", "top_p", "min_p", "typical_p") if getattr(self, n) is not None]
        if given and not self.sampled:
            raise SettingsError(
                f"{given[0]} needs a temperature above 0, got temperature {self.temperature:g} (greedy); "
                f"set temperature or leave {given[0]} out"
            )

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _must(
            penalty is None or (_number(penalty) and 0 < penalty < float("inf")),
            "repetition_penalty must be above 0",
            penalty,
            "1 is neutral",
        )
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            value = getattr(self, name)
            _must(
                value is None or (_whole(value) and value >= 1),
                f"{name} must be a whole number of at least 1",
                value,
            )
        low = self.min_new_tokens
        _must(
            low is None or low <= self.max_new_tokens,
            f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens})",
            low,
        )
        for word in self.bad_words or ():
            _must(len(word) > 0, "a bad word must be a text or a list of token ids, not empty", word)

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def processors(self) -> list[Process]:
        """The caller's own logits processors."""
        given = self.logits_processor
        if given is None:
            return []
        return list(given) if isinstance(given, Sequence) else [given]

    def process(self, prompt_length: int, eos: frozenset[int], tokenizer: Any, device: Any) -> Process | None:
        """The processors and warpers of one sequence in the order of transformers; None where there are none.

        Args:
            prompt_length: tokens of the prompt.
            eos: end tokens.
            tokenizer: for bad words given as text.
            device: where the scores are.
        """
        steps = self._penalties(prompt_length, eos, tokenizer, device) + self.processors
        if self.sampled:
            steps += self._warpers(device)
        if not steps:
            return None
        return lambda ids, scores: _apply(steps, ids, scores)

    def _penalties(
        self, prompt_length: int, eos: frozenset[int], tokenizer: Any, device: Any
    ) -> list[Callable[..., Any]]:
        from transformers import (
            MinNewTokensLengthLogitsProcessor,
            NoBadWordsLogitsProcessor,
            NoRepeatNGramLogitsProcessor,
            RepetitionPenaltyLogitsProcessor,
        )

        steps: list[Callable[..., Any]] = []
        if self.repetition_penalty not in (None, 1):
            steps.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.no_repeat_ngram_size:
            steps.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words:
            steps.append(NoBadWordsLogitsProcessor(_bad_words(self.bad_words, tokenizer), sorted(eos)))
        if self.min_new_tokens and eos:
            steps.append(
                MinNewTokensLengthLogitsProcessor(
                    prompt_length, self.min_new_tokens, sorted(eos), device=str(device)
                )
            )
        return steps

    def _warpers(self, device: Any) -> list[Callable[..., Any]]:
        from transformers import (
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
            TypicalLogitsWarper,
        )

        steps: list[Callable[..., Any]] = []
        if self.temperature != 1:
            steps.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            steps.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            steps.append(MinPLogitsWarper(float(self.min_p)))
        if self.typical_p is not None and self.typical_p < 1:
            steps.append(TypicalLogitsWarper(float(self.typical_p)))
        return steps


def _apply(steps: Sequence[Callable[..., Any]], ids: Any, scores: Any) -> Any:
    for step in steps:
        scores = step(ids, scores)
    return scores


def _bad_words(words: Sequence[str | Sequence[int]], tokenizer: Any) -> list[list[int]]:
    result = []
    for word in words:
        if not isinstance(word, str):
            result.append(list(word))
            continue
        if tokenizer is None:
            raise SettingsError(f"a bad word as text needs a tokenizer, got {word!r}; give token ids")
        # In the middle of a text a word mostly bears a leading space.
        for text in (word, " " + word):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if ids and ids not in result:
                result.append(ids)
    return result

"""The logits processors of one sequence on arrays, with transformers' definitions and order.

A processor is a function (ids (1, L) int64, scores (1, V) float32) -> scores (1, V), which may write in place. For
``top_p`` and ``typical_p``, transformers sorts all scores. Here, the best ``FEW`` are sorted first, and all only if
these do not decide. Arithmetic rounds as in transformers: probabilities are float32; their sums are float64, rounded
to float32 before a comparison. The last bits of an exponential and of the softmax's denominator still depend on the
library and the processor, so a token may differ if its sum equals the limit in float32. Of tokens with equal scores,
``top_p`` keeps those with the highest ids, as with a stable sort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..core import SettingsError
from ..options import Options, Process

#: The number of scores that are sorted first.
FEW = 256
EXCLUDED = np.float32(-np.inf)


@dataclass(frozen=True)
class Temperature:
    """The processor that divides scores, of arrays or tensors, by a temperature."""

    value: float

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores / self.value


def repetition_penalty(penalty: float) -> Process:
    """Divide positive scores of tokens in the prefix by the penalty, and multiply negative ones."""

    def process(ids: Any, scores: Any) -> Any:
        seen = scores[0, ids[0]]
        scores[0, ids[0]] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    return process


def no_repeat_ngram_size(size: int) -> Process:
    """Exclude tokens that would repeat an n-gram of the prefix."""

    def process(ids: Any, scores: Any) -> Any:
        length = ids.shape[1]
        if length >= size:
            ngrams = sliding_window_view(ids[0], size)
            repeats = (ngrams[:, :-1] == ids[0, length + 1 - size :]).all(axis=1)
            scores[0, ngrams[repeats, -1]] = EXCLUDED
        return scores

    return process


def bad_words(words: Sequence[Sequence[int]]) -> Process:
    """Exclude the last token of each word after its other tokens."""

    def process(ids: Any, scores: Any) -> Any:
        for *others, last in words:
            if not others or ids[0, -len(others) :].tolist() == others:
                scores[0, last] = EXCLUDED
        return scores

    return process


def min_new_tokens(prompt_length: int, smallest: int, ends: Sequence[int]) -> Process:
    """Exclude the end tokens while there are fewer new tokens than ``smallest``."""

    def process(ids: Any, scores: Any) -> Any:
        if ids.shape[1] < prompt_length + smallest:
            scores[0, ends] = EXCLUDED
        return scores

    return process


def top_k(k: int) -> Process:
    """Keep the k largest scores, and those that equal the last of them."""

    def process(ids: Any, scores: Any) -> Any:
        rest = scores.shape[1] - k
        if rest > 0:
            scores[scores < np.partition(scores[0], rest)[rest]] = EXCLUDED
        return scores

    return process


def top_p(share: float) -> Process:
    """Keep the likeliest tokens that together have a probability of ``share``.

    Tokens are excluded, from the least likely one on, while their probabilities add up to at most 1 - ``share``.
    """

    def process(ids: Any, scores: Any) -> Any:
        row = scores[0]
        some = row[row > EXCLUDED]  # few after top_k
        probabilities = softmax(some)
        if probabilities is None:
            return scores
        total = probabilities.sum(dtype=np.float64)
        for count in _counts(some):
            best = np.sort(np.partition(some, -count)[-count:])[::-1]
            of_best = np.sort(np.partition(probabilities, -count)[-count:])[::-1]
            likelier = np.cumsum(of_best, dtype=np.float64) - of_best
            kept = int(((total - likelier).astype(np.float32) > np.float32(1 - share)).sum())
            if kept < count:
                break
        last = best[max(kept, 1) - 1]
        equals = np.flatnonzero(row == last)
        missing = max(kept, 1) - int((row > last).sum())
        row[row < last] = EXCLUDED
        row[equals[: len(equals) - missing]] = EXCLUDED
        return scores

    return process


def min_p(share: float) -> Process:
    """Keep tokens with at least ``share`` times the probability of the likeliest one."""

    def process(ids: Any, scores: Any) -> Any:
        probabilities = softmax(scores[0])
        if probabilities is not None:
            scores[0, probabilities < probabilities.max() * share] = EXCLUDED
        return scores

    return process


def typical_p(mass: float) -> Process:
    """Keep the tokens whose log-probability is closest to its mean, up to a probability of ``mass`` (Meister et al.,
    2023)."""

    def process(ids: Any, scores: Any) -> Any:
        tokens = np.flatnonzero(scores[0] > EXCLUDED)
        some = scores[0, tokens]
        probabilities = softmax(some)
        if probabilities is None:
            return scores
        shifted = some - some.max()
        logs = shifted - np.log(np.float32(np.exp(shifted).sum(dtype=np.float64)))
        entropy = -np.float32(np.nansum(logs * np.exp(logs), dtype=np.float64))  # 0 times infinity is NaN
        distance = np.abs(-logs - entropy)
        for count in _counts(some):
            nearest = np.argpartition(distance, count - 1)[:count]
            nearest = nearest[np.argsort(distance[nearest])]
            reached = np.cumsum(probabilities[nearest], dtype=np.float64).astype(np.float32) >= np.float32(
                mass
            )
            if reached.any():
                scores[0, tokens[distance > distance[nearest[reached.argmax()]]]] = EXCLUDED
                break
        return scores

    return process


def softmax(row: Any) -> Any:
    """Probabilities (V,) float32; None if the largest score is not a finite number, because transformers' are then
    NaN and exclude no token."""
    largest = row.max(initial=EXCLUDED)
    if not np.isfinite(largest):
        return None
    odds = np.exp(row - largest)
    return odds / np.float32(odds.sum(dtype=np.float64))


def _counts(row: Any) -> list[int]:
    """How many of the best to sort, until they decide."""
    return [FEW, len(row)] if len(row) > FEW else [len(row)]


def users(process: Process) -> Process:
    """The caller's own processor, with an explanation if it was written for tensors."""

    def checked(ids: Any, scores: Any) -> Any:
        shape = scores.shape
        try:
            result = np.asarray(process(ids, scores), np.float32)
        except (AttributeError, TypeError) as error:
            raise SettingsError(
                f"a logits processor failed on numpy arrays, which it gets from this model: {error}; if it was "
                "written for tensors, pass lookahead.as_torch(processor)"
            ) from error
        return of_shape(shape, result)

    return checked


def of_shape(shape: Sequence[int], result: Any) -> Any:
    """The result of a processor. Raises SettingsError if it does not have the shape of the scores, (1, V)."""
    if tuple(result.shape) != tuple(shape):
        raise SettingsError(
            f"a logits processor must return scores of shape {tuple(shape)}, got {tuple(result.shape)}"
        )
    return result


#: Makes the processor of each option that has one.
ARRAYS: Mapping[str, Callable[..., Process]] = {
    "repetition_penalty": repetition_penalty,
    "no_repeat_ngram_size": no_repeat_ngram_size,
    "bad_words": bad_words,
    "min_new_tokens": min_new_tokens,
    "logits_processor": users,
    "temperature": Temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "typical_p": typical_p,
}


def make_process(
    makers: Mapping[str, Callable[..., Process]],
    options: Options,
    prompt_length: int,
    eos: frozenset[int],
    tokenizer: Any,
    vocabulary: int,
) -> Process | None:
    """The function applied to the scores before a token is chosen; None if there is nothing to apply.

    Args:
        makers: makes the processor of each option: ``ARRAYS``, or the same for tensors.
        options: the options of the generation.
        prompt_length: number of tokens in the prompt.
        eos: end tokens.
        tokenizer: for bad words given as strings.
        vocabulary: V of the model; a tokenizer may have more tokens.

    Raises:
        SettingsError: a bad word is a string but there is no tokenizer, or it has a token outside the vocabulary.
    """
    steps = list[Process]()

    def add(name: str, *arguments: Any) -> None:
        steps.append(makers[name](*arguments))

    # Processors, which apply to greedy decoding as well.
    if options.repetition_penalty not in (None, 1):
        add("repetition_penalty", float(options.repetition_penalty))
    if options.no_repeat_ngram_size is not None:
        add("no_repeat_ngram_size", options.no_repeat_ngram_size)
    words = _bad_words(options.bad_words or (), tokenizer)
    outside = [token for word in words for token in word if not 0 <= token < vocabulary]
    if outside:
        raise SettingsError(f"bad_words: token ids must be 0 to {vocabulary - 1}, got {outside[0]}")
    # As in transformers, an end token is never a bad word.
    words = [word for word in words if len(word) > 1 or word[0] not in eos]
    if words:
        add("bad_words", words)
    ends = sorted(token for token in eos if token < vocabulary)
    if options.min_new_tokens is not None and ends:
        add("min_new_tokens", prompt_length, options.min_new_tokens, ends)
    for process in options.processors:
        add("logits_processor", process)
    # Warpers, which only sampling uses. One at its neutral value would have no effect.
    if options.sampled:
        for name, neutral in options.warpers():
            if (value := getattr(options, name)) not in (None, neutral):
                add(name, type(neutral)(value))
        if len(steps) == 1 and isinstance(steps[0], Temperature):
            return steps[0]  # a draw scales only the logits that it needs

    def apply(ids: Any, scores: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):  # scores may be infinite
            for step in steps:
                scores = step(ids, scores)
        return scores

    return apply if steps else None


def _bad_words(words: Sequence[str | Sequence[int]], tokenizer: Any) -> list[list[int]]:
    result: list[list[int]] = []
    for word in words:
        if not isinstance(word, str):
            result.append(list(word))
            continue
        if tokenizer is None:
            raise SettingsError(
                f"a bad word given as a string needs a tokenizer, got {word!r}; give token ids"
            )
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise SettingsError("a bad word must be valid Unicode, got half a surrogate pair")
        # Inside a sequence, a word usually has a leading space.
        for text in (word, " " + word):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if ids and ids not in result:
                result.append(ids)
    return result

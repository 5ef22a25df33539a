"""The logits processors and warpers of one sequence, in the order of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..core import SettingsError
from ..sampling import Process
from .options import Options

#: Of a sampled text, in this order: option, the value that changes nothing (and its type), what applies it.
WARPERS: tuple[tuple[str, float, Callable[..., Any]], ...] = (
    ("temperature", 1.0, TemperatureLogitsWarper),
    ("top_k", 0, TopKLogitsWarper),
    ("top_p", 1.0, TopPLogitsWarper),
    ("min_p", 0.0, MinPLogitsWarper),
    ("typical_p", 1.0, TypicalLogitsWarper),
)


def make_process(
    options: Options, prompt_length: int, eos: frozenset[int], tokenizer: Any, device: Any
) -> Process | None:
    """What is applied to the scores before a token is chosen; None where that is nothing.

    Args:
        prompt_length: tokens of the prompt.
        eos: end tokens.
        tokenizer: for bad words given as text.
        device: where the scores are.

    Raises:
        SettingsError: a bad word is a text, and there is no tokenizer.
    """
    ends, steps = sorted(eos), list[Any]()
    if options.repetition_penalty not in (None, 1):
        steps.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size is not None:
        steps.append(NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.bad_words:
        steps.append(NoBadWordsLogitsProcessor(_bad_words(options.bad_words, tokenizer), ends))
    if options.min_new_tokens is not None and ends:
        low = options.min_new_tokens
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_length, low, ends, device=str(device)))
    steps += options.processors
    if options.sampled:
        for name, neutral, make in WARPERS:
            if (value := getattr(options, name)) not in (None, neutral):
                steps.append(make(type(neutral)(value)))

    def process(ids: Any, scores: Any) -> Any:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process if steps else None


def _bad_words(words: Sequence[str | Sequence[int]], tokenizer: Any) -> list[list[int]]:
    result: list[list[int]] = []
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

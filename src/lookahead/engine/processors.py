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

#: Option, its type there, the value that changes nothing, and what applies it.
Row = tuple[str, type, float, Callable[..., Any]]
PENALTIES: tuple[Row, ...] = (
    ("repetition_penalty", float, 1, RepetitionPenaltyLogitsProcessor),
    ("no_repeat_ngram_size", int, 0, NoRepeatNGramLogitsProcessor),
)
WARPERS: tuple[Row, ...] = (
    ("temperature", float, 1, TemperatureLogitsWarper),
    ("top_k", int, 0, TopKLogitsWarper),
    ("top_p", float, 1, TopPLogitsWarper),
    ("min_p", float, 0, MinPLogitsWarper),
    ("typical_p", float, 1, TypicalLogitsWarper),
)


def make_process(
    options: Options, prompt_length: int, eos: frozenset[int], tokenizer: Any, device: Any
) -> Process | None:
    """What is applied to the scores before a token is chosen; None where that is nothing.

    Args:
        options: of the generation.
        prompt_length: tokens of the prompt.
        eos: end tokens.
        tokenizer: for bad words given as text.
        device: where the scores are.

    Raises:
        SettingsError: a bad word is a text, and there is no tokenizer.
    """
    ends, low = sorted(eos), options.min_new_tokens
    steps = _made(PENALTIES, options)
    if options.bad_words:
        steps.append(NoBadWordsLogitsProcessor(_bad_words(options.bad_words, tokenizer), ends))
    if low is not None and ends:
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_length, low, ends, device=str(device)))
    steps += options.processors
    if options.sampled:
        steps += _made(WARPERS, options)

    def process(ids: Any, scores: Any) -> Any:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process if steps else None


def _made(rows: Sequence[Row], options: Options) -> list[Callable[..., Any]]:
    given = [(getattr(options, name), *rest) for name, *rest in rows]
    return [make(kind(value)) for value, kind, neutral, make in given if value not in (None, neutral)]


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

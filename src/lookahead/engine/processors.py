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
    steps: list[Callable[..., Any]] = []
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size:
        steps.append(NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.bad_words:
        steps.append(NoBadWordsLogitsProcessor(_bad_words(options.bad_words, tokenizer), sorted(eos)))
    if options.min_new_tokens and eos:
        ends = sorted(eos)
        steps.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, ends, device=str(device))
        )
    steps += options.processors
    if options.sampled:
        steps += _warpers(options)
    if not steps:
        return None

    def process(ids: Any, scores: Any) -> Any:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process


def _warpers(options: Options) -> list[Callable[..., Any]]:
    """What cuts the probabilities of a draw; neutral values need none."""
    steps: list[Callable[..., Any]] = []
    if options.temperature != 1:
        steps.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k is not None:
        steps.append(TopKLogitsWarper(options.top_k))
    for p, neutral, warper in (
        (options.top_p, 1, TopPLogitsWarper),
        (options.min_p, None, MinPLogitsWarper),
        (options.typical_p, 1, TypicalLogitsWarper),
    ):
        if p is not None and p != neutral:
            steps.append(warper(float(p)))
    return steps


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

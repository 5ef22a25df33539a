"""The logits processors and warpers of one sequence, in the order of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core import SettingsError
from ..options import Options

if TYPE_CHECKING:
    from .choose import Process


def make_process(
    options: Options,
    prompt_length: int,
    eos: frozenset[int],
    tokenizer: Any,
    device: Any,
    vocabulary: int,
) -> Process | None:
    """The function applied to the scores before a token is chosen; None if there is nothing to apply.

    Args:
        options: the options of the generation.
        prompt_length: number of tokens in the prompt.
        eos: end tokens.
        tokenizer: for bad words given as strings.
        device: the device of the scores.
        vocabulary: V of the model; a tokenizer may have more tokens.

    Raises:
        SettingsError: a bad word is a string but there is no tokenizer, or it has a token outside the vocabulary.
    """
    ends = sorted(eos)
    steps = list[Any]()

    def add(name: str, *arguments: Any, **options: Any) -> None:
        # Imported here, because it takes half a second and plain greedy decoding does not need it.
        from transformers.generation import logits_process

        steps.append(getattr(logits_process, name)(*arguments, **options))

    # Processors, which apply to greedy decoding as well.
    if options.repetition_penalty not in (None, 1):
        add("RepetitionPenaltyLogitsProcessor", float(options.repetition_penalty))
    if options.no_repeat_ngram_size is not None:
        add("NoRepeatNGramLogitsProcessor", options.no_repeat_ngram_size)
    words = _bad_words(options.bad_words or (), tokenizer)
    # Checked before any pass; transformers checks only when it first applies them.
    outside = [token for word in words for token in word if not 0 <= token < vocabulary]
    if outside:
        raise SettingsError(f"bad_words: token ids must be 0 to {vocabulary - 1}, got {outside[0]}")
    # As in transformers, an end token is never a bad word.
    words = [word for word in words if len(word) > 1 or word[0] not in eos]
    if words:
        add("NoBadWordsLogitsProcessor", words, ends)
    if options.min_new_tokens is not None and ends:
        low = options.min_new_tokens
        add("MinNewTokensLengthLogitsProcessor", prompt_length, low, ends, device=str(device))
    steps += options.processors
    # Warpers, which only sampling uses. One at its neutral value would have no effect.
    if options.sampled:
        from .choose import Temperature

        for name, warper, neutral in options.warpers():
            if (value := getattr(options, name)) in (None, neutral):
                continue
            if name == "temperature":
                steps.append(Temperature(float(value)))
            else:
                add(warper, type(neutral)(value))
        if len(steps) == 1 and isinstance(steps[0], Temperature):
            return steps[0]  # a draw scales only the logits that it needs

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

"""Turns prompts of any form into validated token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ..core import SettingsError
from ..core.errors import first_line

#: A string, chat messages or token ids.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
#: The same, or an array of token ids.
Prompt = Any


class PromptTooLong(SettingsError):
    """A prompt leaves no room for an answer.

    Args:
        context: the most tokens of prompt and answer together.
        tokens: the number of tokens of the prompt, or "at least" a number.
    """

    def __init__(self, context: int, tokens: str) -> None:
        self.tokens = tokens
        super().__init__(
            f"the prompt must be shorter than the model's context of {context} tokens, got {tokens}; "
            "shorten it or use a model with a longer context"
        )


def as_list(prompt: Prompt) -> tuple[list[Prompt], bool]:
    """(prompts, whether a list of prompts was given). Tensors and arrays become lists."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, (str, bytes, bytearray, Mapping)) or not isinstance(prompt, Sequence):
        return [prompt], False
    items = [item.tolist() if hasattr(item, "tolist") else item for item in prompt]
    if _all_are(items, int) or _all_are(items, Mapping):
        return [items], False
    return items, True


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer, or None, has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> Prompt:
    """A conversation as a prompt: its messages, or one string to continue if there is no chat template."""
    if has_chat_template(tokenizer):
        return list(messages)
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n") for message in messages)


def _all_are(value: Any, kind: type) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, kind) for item in value)


def encode(
    prompt: Prompt,
    tokenizer: Any,
    missing: str,
    vocabulary: int,
    context: int | None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of one prompt.

    Args:
        prompt: a string, a list of chat messages {"role", "content"}, or a list of token ids.
        tokenizer: None if there is none.
        missing: why there is no tokenizer, for error messages.
        vocabulary: V.
        context: the model's maximum sequence length in tokens; None for no limit.
        variables: further variables of the chat template, such as ``tools``.

    Raises:
        PromptTooLong: the prompt fills the context; decided from its bytes, before tokenizing, where they suffice.
        SettingsError: the prompt is empty or of another type, needs a tokenizer or chat template that is missing, or
            has token ids outside the vocabulary.
    """
    # Token ids, by the type of the prompt.
    if isinstance(prompt, (bytes, bytearray)):
        raise SettingsError("a prompt must be text, chat messages or token ids, got bytes; decode them first")
    if isinstance(prompt, str):
        if not prompt:
            raise SettingsError("the prompt must not be empty, got an empty string")
        _check_unicode(prompt)
        if tokenizer is None:
            raise SettingsError(f"a text prompt needs a tokenizer, and {missing}; give token ids instead")
        ids = encode_text(prompt, tokenizer, context)
    elif _all_are(prompt, Mapping) and len(prompt):
        ids = _from_messages(prompt, tokenizer, missing, context, variables or {})
    elif _all_are(prompt, Integral) and bool not in map(type, prompt):
        ids = [int(token) for token in prompt]
    else:
        raise SettingsError(
            "a prompt must be a string, a list of chat messages or a list of token ids, "
            f"got {type(prompt).__name__}: {str(prompt)[:60]!r}"
        )
    # They must be in the vocabulary of the model and leave room in its context.
    if not ids:
        raise SettingsError("the prompt must have at least one token, got none")
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise SettingsError(
            f"token ids must be between 0 and {vocabulary - 1}, got {outside}; is this the model's tokenizer?"
        )
    if context is not None and len(ids) >= context:
        raise PromptTooLong(context, str(len(ids)))
    return ids


def encode_text(text: str, tokenizer: Any, context: int | None, **options: Any) -> list[int]:
    """Token ids of a text.

    Raises:
        PromptTooLong: its bytes show that it fills the context, so that it is not tokenized.
    """
    if context is not None and hasattr(tokenizer, "fewest_tokens"):
        fewest = tokenizer.fewest_tokens(text)
        if fewest >= context:
            raise PromptTooLong(context, f"at least {fewest}")
    return list(tokenizer(text, **options).input_ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError("the prompt must be valid Unicode, got half a surrogate pair") from None


def _from_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    missing: str,
    context: int | None,
    variables: Mapping[str, Any],
) -> list[int]:
    chat = [dict(message) for message in messages]
    for message in chat:
        if not {"role", "content"} <= message.keys():
            raise SettingsError(f'a chat message must be {{"role": ..., "content": ...}}, got {message!r}')
    if tokenizer is None:
        raise SettingsError(f"chat messages need a tokenizer, and {missing}; give token ids instead")
    if not has_chat_template(tokenizer):
        raise SettingsError(
            "chat messages need a chat template, and this model's tokenizer has none; "
            "give the prompt as a string, or use an instruction-tuned model"
        )
    _check_unicode(json.dumps([chat, variables], ensure_ascii=False, default=str))
    # Text first if its length can be bounded; some of transformers' tokenizers encode chats in another way than text.
    as_text = hasattr(tokenizer, "fewest_tokens")
    given = {"add_generation_prompt": True} | dict(variables)
    try:
        made = tokenizer.apply_chat_template(chat, tokenize=not as_text, return_dict=False, **given)
    except Exception as error:  # a template is the model's code and may raise anything
        what = " and ".join(["these messages", *variables])
        raise SettingsError(f"the model's chat template rejects {what}: {first_line(error)}") from None
    return encode_text(made, tokenizer, context, add_special_tokens=False) if as_text else list(made)

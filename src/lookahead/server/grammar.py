"""Constrained output: JSON, JSON that follows a schema, or a tool call. Needs the extra ``[grammar]``.

The grammar is applied once per emitted token, after its true prefix, before temperature and the other filters. It is
an ordinary logits processor, so drafting works with it.
"""

from __future__ import annotations

import json
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core import SettingsError

if TYPE_CHECKING:
    from ..llm import LLM

#: No line breaks or runs of spaces, which a small model might repeat forever.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes grammars for the tokenizer of a model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise SettingsError(
                "response_format and tool_choice need llguidance; install it with pip install '.[grammar]' in the "
                "project's folder"
            ) from None
        if self._llm.tokenizer is None or not self._llm.eos:
            raise SettingsError("response_format and tool_choice need a tokenizer and an end token")
        try:
            backend = copy(self._llm.tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            return LLTokenizer(
                backend.to_str(), n_vocab=self._llm.vocabulary, eos_token=sorted(self._llm.eos)
            )
        except Exception as error:  # llguidance does not support every tokenizer
            raise SettingsError(
                f"response_format and tool_choice cannot be used with this tokenizer: {error}"
            ) from None

    def json(self, schema: dict[str, Any], param: str) -> JsonProcess:
        """A logits processor that restricts one completion to JSON that follows a schema.

        Raises:
            SettingsError: llguidance is not installed, or does not support the tokenizer or the schema; ``param``
                names the schema's field.
        """
        tokenizer = self._tokenizer  # first, because its error names the missing package
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            problem = str(error)
        if problem:
            raise SettingsError(f"{param}: the JSON schema is not supported: {problem[:200]}")
        return JsonProcess(matcher, self._llm.vocabulary)


class JsonProcess:
    """A logits processor that follows one completion token by token."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._seen: int | None = None

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Scores (1, V) after ids (1, L), with -inf for tokens that the grammar forbids.

        Raises:
            SettingsError: the grammar rejects a token that was emitted.
        """
        if self._seen is not None:
            for token in ids[0, self._seen :].tolist():
                if not self._matcher.consume_token(token):
                    raise SettingsError(f"the grammar cannot continue: {self._matcher.get_error()[:200]}")
        self._seen = ids.shape[1]
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(packed, count=self._vocabulary, bitorder="little").astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))

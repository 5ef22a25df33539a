"""Constrained output: JSON of a schema, a tool call, a regular expression, a grammar. Needs the extra ``[grammar]``.

The grammar is applied once per emitted token, after its true prefix, before temperature and the other filters. It is
an ordinary logits processor, so drafting works with it.
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import SettingsError

if TYPE_CHECKING:
    from ..llm import LLM

#: No line breaks or runs of spaces, which a small model might repeat forever.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


#: Largest schema or grammar in characters: the time of a mask grows with it.
LARGEST = 1 << 15
#: How voluntary calls begin and end, as in ``tools``: what the model writes first, the whole beginning, and the end.
CALLS = (("<tool_call>", "<tool_call>", "</tool_call>"), ('```json\n{"name"', "```json\n", "\n```"))


@dataclass(frozen=True)
class Constraint:
    """What a completion must match.

    Attributes:
        kind: "json" (a schema), "regex", "lark" (a grammar), or "calls" (text with tool calls; name -> schema of the
            arguments).
        value: the schema, expression, grammar or schemas.
        param: the field of the request that demands it.
    """

    kind: str
    value: Any
    param: str

    @property
    def name(self) -> str:
        """The kind in words."""
        return {"regex": "regular expression", "lark": "grammar"}.get(self.kind, "JSON schema")


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

    def process(self, constraint: Constraint) -> GrammarProcess:
        """A logits processor for one completion that matches a constraint; ``copy`` it for others.

        Raises:
            SettingsError: llguidance is not installed, or does not support the tokenizer or the constraint.
        """
        tokenizer = self._tokenizer  # first, because its error names the missing package
        from llguidance import LLMatcher

        text = constraint.value if isinstance(constraint.value, str) else json.dumps(constraint.value)
        if len(text) > LARGEST:
            raise SettingsError(
                f"{constraint.param}: a schema or grammar may have at most {LARGEST} characters, got {len(text)}"
            )
        try:
            matcher = LLMatcher(tokenizer, self._grammar(constraint.kind, text), log_level=0)
            matcher.compute_bitmask()  # some errors appear with the first mask
            problem = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            problem = str(error)
        if problem:
            raise SettingsError(
                f"{constraint.param}: the {constraint.name} is not supported: {problem.partition('<state>')[0][:200]}"
            )
        return GrammarProcess(matcher, self._llm.vocabulary)

    @staticmethod
    def _grammar(kind: str, text: str) -> str:
        """A constraint in llguidance's format."""
        from llguidance import LLMatcher, StructTag

        if kind == "json":
            return str(LLMatcher.grammar_from_json_schema(text, defaults=COMPACT))
        if kind == "calls":
            tags = [
                StructTag(
                    trigger=trigger,
                    begin=f'{opening}{{"name": {json.dumps(name)}, "arguments": ',
                    grammar=json.dumps({"type": "object"} | schema | {"x-guidance": COMPACT}),
                    end=f"}}{closing}",
                )
                for name, schema in json.loads(text).items()
                for trigger, opening, closing in CALLS
            ]
            return str(StructTag.to_grammar(tags, assume_special=False))
        return str(
            LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
        )


class GrammarProcess:
    """A logits processor that follows one completion token by token."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._seen: int | None = None

    def copy(self) -> GrammarProcess:
        """The same processor at its start, for another completion."""
        return GrammarProcess(self._matcher.deep_copy(), self._vocabulary)

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
        scores[0, ~allowed] = float("-inf")  # both an array and a tensor can be indexed by an array
        return scores

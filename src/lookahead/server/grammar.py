"""Constrained output: JSON of a schema, a tool call, a regular expression, a grammar. Needs the extra ``[grammar]``.

The grammar is applied once per emitted token, after its true prefix, before temperature and the other filters. It is
an ordinary logits processor, so drafting works with it.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import SettingsError
from ..text.tokenizer import byte_alphabet
from .api_errors import Refused

if TYPE_CHECKING:
    from ..llm import LLM

#: No line breaks or runs of spaces, which a small model might repeat forever.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


#: Largest schema or grammar in characters: the time of a mask grows with it.
LARGEST = 1 << 14
#: Largest number of items that llguidance's parser may hold for a token.
MOST_ITEMS = 5000
#: Processor seconds for the masks of a completion, and what each token adds.
ALLOWANCE = 0.25
ALLOWANCE_PER_TOKEN = 0.005
#: Annotations of a schema, which do not restrict the output.
ANNOTATIONS = ("description", "title", "$comment")
#: Text with voluntary calls, in the forms that ``tools.CallReader`` reads. A tag must be followed by a call. An
#: object elsewhere is one if its first key is the name of a function, so that other JSON stays free.
CALLS = r"""
start: (tagged | {untagged})* TEXT
TEXT: /(.|\n)*/
tag[lazy]: /(.|\n)*<tool_call>/
tagged: tag /\s*\{{\{{?\s*"name"\s*:\s*/ ({named}) /\s*\}}+\s*<\/tool_call>/
"""
CALL = r"""
begin_{number}[lazy]: /((.|\n)*(```(json)?|<\/think>))?\s*\{{\{{?\s*"name"\s*:\s*"{name}"/
untagged_{number}: begin_{number} arguments_{number} /\s*\}}+/
named_{number}: /"{name}"/ arguments_{number}
arguments_{number}: /\s*,\s*"(arguments|parameters)"\s*:\s*/ %json {schema}
"""


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
        # With more threads, masks of many sequences would take the processor from the forward passes.
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "lookahead-grammar")

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
            text = _with_plain_tags(backend.to_str())
            return LLTokenizer(text, n_vocab=self._llm.vocabulary, eos_token=sorted(self._llm.eos))
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
        from llguidance import LLMatcher, LLParserLimits

        text = constraint.value if isinstance(constraint.value, str) else json.dumps(_bare(constraint.value))
        if len(text) > LARGEST:
            raise SettingsError(
                f"{constraint.param}: a schema or grammar may have at most {LARGEST} characters, without "
                f"descriptions, got {len(text)}"
            )
        # Errors of a matcher quote the tokens that it has read, which must not reach a log.
        limits = LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
        try:
            matcher = LLMatcher(tokenizer, self._grammar(constraint.kind, text), log_level=0, limits=limits)
            # Some errors appear with the first mask. A grammar may also allow nothing.
            mask = matcher.compute_bitmask()
            problem = matcher.get_error() or ("" if any(mask) else "it allows no output")
        except ValueError as error:
            problem = str(error)
        if problem:
            raise SettingsError(
                f"{constraint.param}: the {constraint.name} is not supported: {problem.strip().splitlines()[0][:200]}"
            )
        return GrammarProcess(matcher, mask, self._llm.vocabulary, constraint.param, self._pool)

    @staticmethod
    def _grammar(kind: str, text: str) -> str:
        """A constraint in llguidance's format."""
        from llguidance import LLMatcher

        if kind == "json":
            return str(LLMatcher.grammar_from_json_schema(text, defaults=COMPACT))
        if kind == "calls":
            schemas = json.loads(text)
            rules = [
                CALL.format(
                    number=number,
                    name=re.escape(name),
                    schema=json.dumps({"type": "object"} | schema | {"x-guidance": COMPACT}),
                )
                for number, (name, schema) in enumerate(schemas.items())
            ]
            untagged, named = (
                " | ".join(f"{rule}_{number}" for number in range(len(rules)))
                for rule in ("untagged", "named")
            )
            return CALLS.format(untagged=untagged, named=named) + "".join(rules)
        return str(
            LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
        )


def _with_plain_tags(text: str) -> str:
    """A tokenizer's JSON in which added tokens that are part of the text, such as <tool_call>, are ordinary ones.

    llguidance takes every added token in angle brackets for a special one, which no text may contain.
    """
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return text
    letters = byte_alphabet() if "ByteLevel" in json.dumps(tokenizer["decoder"]) else None
    special = []
    for token in tokenizer["added_tokens"]:
        if token["special"]:
            special.append(token)
            vocabulary[token["content"]] = token["id"]  # else it would get the next free id
        elif letters is None:
            vocabulary[token["content"].replace(" ", "\u2581")] = token["id"]
        else:
            vocabulary["".join(letters[byte] for byte in token["content"].encode())] = token["id"]
    return json.dumps(tokenizer | {"added_tokens": special})


def _bare(schema: Any) -> Any:
    """A schema without annotations. Constants stay as they are."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "enum") else _bare(value)
        for key, value in schema.items()
        if not (key in ANNOTATIONS and isinstance(value, str))
    }


class GrammarProcess:
    """A logits processor that follows one completion token by token.

    The mask of the next token is computed in another thread as soon as a token is emitted (``accept``), while other
    sequences are decoded. Its processor time is limited.

    Args:
        matcher: llguidance's matcher, at the start.
        mask: its first mask.
        vocabulary: V.
        param: the field of the request that demands the grammar.
        pool: computes the masks.
    """

    def __init__(self, matcher: Any, mask: bytes, vocabulary: int, param: str, pool: Executor) -> None:
        self._matcher = matcher
        self._first = mask
        self._vocabulary = vocabulary
        self._param = param
        self._pool = pool
        self._left = ALLOWANCE
        self._mask: Future[bytes] | None = None
        #: The number of tokens read, prompt included; None before the first call.
        self._seen: int | None = None

    def copy(self) -> GrammarProcess:
        """The same processor at its start, for another completion."""
        return GrammarProcess(
            self._matcher.deep_copy(), self._first, self._vocabulary, self._param, self._pool
        )

    def accept(self, token: int) -> None:
        """Read an emitted token, and begin to compute the mask of the next one. ``Request.finished`` calls this."""
        assert self._seen is not None
        self._seen += 1
        self._mask = self._pool.submit(self._advance, token, self._mask)

    def _advance(self, token: int, before: Future[bytes] | None) -> bytes:
        """The mask after a token."""
        if before is not None:
            before.result()  # raises its error; the computation has ended
        begin = thread_time()
        accepted = self._matcher.consume_token(token)
        mask: bytes = self._matcher.compute_bitmask()
        self._left -= thread_time() - begin - ALLOWANCE_PER_TOKEN
        if not accepted or self._matcher.is_error():
            reason = self._matcher.stop_reason()
            raise Refused(
                f"{self._param}: the output cannot be continued under the grammar ({reason}); simplify it",
                400,
                "grammar_too_complex",
                param=self._param,
            )
        if self._left < 0:
            raise Refused(
                f"{self._param}: the grammar takes too much processor time "
                f"(more than {ALLOWANCE} s and {ALLOWANCE_PER_TOKEN} s for each token); simplify it",
                400,
                "grammar_too_complex",
                param=self._param,
            )
        return mask

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Scores (1, V) after ids (1, L), with -inf for tokens that the grammar forbids.

        Raises:
            Refused: the grammar rejects a token that was emitted, or takes too much time.
        """
        if self._seen is None:
            self._seen = ids.shape[1]
        for token in ids[0, self._seen :].tolist():  # without ``accept``, as by an ordinary processor
            self.accept(token)
        mask = self._first if self._mask is None else self._mask.result()
        packed = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(packed, count=self._vocabulary, bitorder="little").astype(bool)
        scores[0, ~allowed] = float("-inf")  # both an array and a tensor can be indexed by an array
        return scores

"""Turns engine updates into API objects: a whole answer, or the chunks of a stream.

A stream has the role, text as tokens are accepted, the finish reason in a chunk of its own, usage if requested, and
[DONE].
"""

from __future__ import annotations

import json
import re
import uuid
from collections import abc
from dataclasses import dataclass, field
from time import time
from typing import Any, NamedTuple

from ..core import LookaheadError, Request, Sequence, Update
from ..text.decoder import TextDecoder
from ..text.tokenizer import byte_alphabet
from .api_errors import error_body, status_of
from .logprobs import LogProbs, TokenLogProb
from .metrics import speculation
from .prediction import Predicted
from .protocol import ChatRequest, CompletionRequest, Generating
from .reasoning import CLOSE, OPEN, ThoughtReader
from .tools import CallReader, offered


class Piece(NamedTuple):
    """What a step adds to a completion.

    Attributes:
        text: content.
        reasoning: reasoning.
        calls: tool calls and their pieces, as in a stream's delta.
    """

    text: str = ""
    reasoning: str = ""
    calls: abc.Sequence[dict[str, Any]] = ()


#: The bytes of the characters in a byte-level vocabulary, and the name of a byte in a SentencePiece vocabulary.
BYTES = {character: byte for byte, character in byte_alphabet().items()}
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(slots=True, eq=False)
class Part:
    """One completion of an answer, as received so far.

    Attributes:
        index: its index in the answer.
        request: the engine's request.
        thoughts: separates reasoning from the text; None if the model does not mark it.
        calls: separates tool calls from the text; None without tools.
        predicted: compares the tokens with the prediction; None without one.
        shown: the text so far.
        reasoning: the reasoning so far.
        entries: its log-probabilities, in the endpoint's format.
        finish: the finish reason, as named in the API.
        decoder: the text of the tokens that have an entry, for text offsets; None before the first.
        before: the number of characters before that text.
    """

    index: int
    request: Request
    thoughts: ThoughtReader | None
    calls: CallReader | None
    predicted: Predicted | None
    shown: str = ""
    reasoning: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    decoder: TextDecoder | None = None
    before: int = 0

    @property
    def logprobs(self) -> LogProbs | None:
        """The recorder of log-probabilities; None if they are not requested."""
        return self.request.choose if isinstance(self.request.choose, LogProbs) else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls so far."""
        return self.calls.calls if self.calls is not None else []

    def read(self, text: str, end: bool) -> Piece:
        """What a new piece of the completion's text adds to the answer."""
        reasoning = ""
        calls: list[dict[str, Any]] = []
        if self.thoughts is not None:
            reasoning, text = self.thoughts.push(text, end)
        if self.calls is not None:
            text, calls = self.calls.push(text, end)
        self.reasoning += reasoning
        self.shown += text
        return Piece(text, reasoning, calls)


class Answer:
    """Base class of the answers of both endpoints.

    Args:
        body: the validated fields.
        model: the model's name in the API.
        requests: one per completion; those of a prompt are adjacent.
        tokenizer: decodes single tokens.
        fingerprint: identifies the model and this library, for the field system_fingerprint.
        template: the chat template, for a chat.

    Attributes:
        sequences: the engine's sequences; set when the requests are submitted.
    """

    object = chunk_object = prefix = ""

    def __init__(
        self,
        body: Generating,
        model: str,
        requests: abc.Sequence[Request],
        tokenizer: Any,
        fingerprint: str,
        template: str = "",
    ) -> None:
        self.body = body
        self.template = template
        self.tokenizer = tokenizer
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.requests = requests
        #: The text of each token seen so far; an echoed prompt repeats its tokens.
        self._texts: dict[int, str] = {}
        #: Whether a token is left out of the text, for each token seen so far.
        self._hidden: dict[int, bool] = {}
        self.sequences: list[Sequence] = []
        self.parts = [
            Part(
                index,
                request,
                self.thought_reader(request),
                self.call_reader(),
                Predicted(list(request.predicted)) if body.prediction is not None else None,
            )
            for index, request in enumerate(requests)
        ]
        self.asked = body.lookahead
        self.usage_asked = bool(body.stream_options and body.stream_options.include_usage)

    def thought_reader(self, request: Request) -> ThoughtReader | None:
        """Separates reasoning from the answer; None if the model does not mark it."""
        return None

    def call_reader(self) -> CallReader | None:
        """Separates tool calls from the content; None without tools."""
        return None

    def take(self, update: Update) -> list[dict[str, Any]]:
        """Process an update. Returns the choices to send, each in a chunk: the new text, then the finish reason."""
        part = self.parts[self.sequences.index(update.sequence)]
        if part.predicted is not None:
            part.predicted.take(update.tokens)
        entries = self._new_entries(part, update)
        part.entries += entries
        piece = part.read(self.text_of(update), update.result is not None)
        chosen = []
        trace = self.asked is not None and self.asked.trace and bool(update.tokens)
        if any(piece) or entries or trace:
            chosen.append(self.delta(part, piece, entries))
            if trace:
                chosen[0]["lookahead"] = self._trace(update)
        if update.result is not None:
            part.finish = finish_reason(part, update.result.finish_reason)
            chosen.append(self.delta(part, Piece(), []))
            self._statistics(part, chosen[-1])
        return chosen

    def text_of(self, update: Update) -> str:
        """The text that an update adds."""
        return update.piece

    def _new_entries(self, part: Part, update: Update) -> list[dict[str, Any]]:
        logprobs = part.logprobs
        if logprobs is None:
            return []
        end = len(part.entries) + len(update.tokens)
        return self._entries(part, logprobs.tokens[len(part.entries) : end])

    def _entries(self, part: Part, tokens: abc.Iterable[TokenLogProb]) -> list[dict[str, Any]]:
        """The log-probabilities of emitted tokens, in the endpoint's format."""
        return [self.entry(part, entry) for entry in tokens]

    def _statistics(self, part: Part, into: dict[str, Any]) -> None:
        result = self.sequences[part.index].result
        if self.asked is not None and self.asked.stats and result is not None:
            into["lookahead"] = {"stats": speculation(result.stats)}

    def _trace(self, update: Update) -> dict[str, Any]:
        shown = {"tokens": [self.token_text(token) for token in update.tokens], "path": update.path}
        if update.tree is not None:
            tree = update.tree
            shown["tree"] = [self.token_text(token) for token in tree.tokens]
            shown["parents"] = tree.parents
            shown["needs_logits"] = tree.needs_logits
        return shown

    def token_text(self, token: int) -> str:
        """The text of a token within a completion."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:
            # Decoders of SentencePiece strip the space at the beginning of a text, but not before a second token.
            once, twice = (
                str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
                for tokens in ([token], [token, token])
            )
            self._texts[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._texts[token]

    def token_bytes(self, token: int) -> list[int] | None:
        """The bytes of a token; None if a part of a character has unknown bytes."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        name = str(self.tokenizer.backend_tokenizer.id_to_token(token))
        if (byte := BYTE_TOKEN.fullmatch(name)) is not None:
            return [int(byte[1], 16)]
        return [BYTES[letter] for letter in name] if all(letter in BYTES for letter in name) else None

    def is_hidden(self, token: int) -> bool:
        """Whether a token is special, so that it is not in the text."""
        if self.tokenizer is None:
            return False
        if token not in self._hidden:
            shown = self.tokenizer.decode([token], skip_special_tokens=True)
            self._hidden[token] = not shown and bool(self.tokenizer.decode([token]))
        return self._hidden[token]

    def whole(self) -> dict[str, Any]:
        """The whole answer, without streaming."""
        choices = []
        for part in self.parts:
            completed = self.complete(part)
            self._statistics(part, completed)
            choices.append(completed)
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts. A prompt and its cached tokens count once, regardless of its number of completions."""
        n = self.body.n or 1
        prompt = sum(len(request.prompt) for request in self.requests[::n])
        cached = sum(sequence.cached for sequence in self.sequences[::n])
        completion = sum(len(sequence.tokens) for sequence in self.sequences) if self.body.limit != 0 else 0
        predicted = [part.predicted for part in self.parts if part.predicted is not None]
        details = {
            "accepted_prediction_tokens": sum(prediction.accepted for prediction in predicted),
            "rejected_prediction_tokens": sum(prediction.rejected for prediction in predicted),
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details,
        }

    def chunk(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """One server-sent event."""
        body = {**self.head, "object": self.chunk_object, "choices": list(choices)}
        if self.usage_asked:
            body["usage"] = usage
        return sse(body)

    def opening(self) -> list[bytes]:
        """Chunks before the first token."""
        return []

    def ending(self) -> list[bytes]:
        """Chunks after the last token."""
        usage = [self.chunk(usage=self.usage())] if self.usage_asked else []
        return [*usage, sse(b"[DONE]")]

    def failure(self, error: LookaheadError) -> bytes:
        """The last chunk of a stream that failed."""
        return sse(error_body(str(error), *status_of(error)))

    def entry(self, part: Part, entry: TokenLogProb) -> dict[str, Any]:
        """The log-probabilities of a token, in the endpoint's format."""
        raise NotImplementedError

    def delta(self, part: Part, piece: Piece, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The choice of a chunk."""
        raise NotImplementedError

    def complete(self, part: Part) -> dict[str, Any]:
        """The choice of a whole answer."""
        raise NotImplementedError


def finish_reason(part: Part, reason: str) -> str:
    """The API's finish reason."""
    return "tool_calls" if part.tool_calls and reason == "stop" else reason


def sse(body: Any) -> bytes:
    """A server-sent event. Non-ASCII characters are escaped, so no Unicode line separator can break a frame."""
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    body: CompletionRequest
    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def opening(self) -> list[bytes]:
        if not self.body.echo:
            return []
        return [self.chunk(self.delta(part, Piece(self._prompt(part)), [])) for part in self.parts]

    @property
    def _prompt_only(self) -> bool:
        """Whether no token was asked for; one is decoded, because a pass over a prompt chooses one."""
        return self.body.max_tokens == 0

    def text_of(self, update: Update) -> str:
        return "" if self._prompt_only else update.piece

    def _entries(self, part: Part, tokens: abc.Iterable[TokenLogProb]) -> list[dict[str, Any]]:
        return [] if self._prompt_only else super()._entries(part, tokens)

    def _prompt(self, part: Part) -> str:
        """The prompt as text: as given, or without special tokens if it was given as token ids."""
        given = self.body.prompts[part.index // (self.body.n or 1)]
        if isinstance(given, str):
            return given
        if self.tokenizer is None:
            return ""
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(given, **plain))

    def entry(self, part: Part, entry: TokenLogProb) -> dict[str, Any]:
        if part.decoder is None:
            part.decoder = TextDecoder(self.tokenizer, part.request.prompt)
        offset = part.before + part.decoder.place(entry.token)
        top: dict[str, float] = {}
        # Of tokens with the same text, such as parts of characters, the first is the most likely.
        for token, value in entry.top:
            top.setdefault(self.token_text(token), value)
        text = self.token_text(entry.token)
        return {"token": text, "logprob": entry.logprob, "top": top, "offset": offset}

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        names = {
            "tokens": "token",
            "token_logprobs": "logprob",
            "top_logprobs": "top",
            "text_offset": "offset",
        }
        return {name: [entry[key] for entry in entries] for name, key in names.items()}

    def delta(self, part: Part, piece: Piece, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": part.index,
            "text": piece.text,
            "logprobs": self._logprobs(entries),
            "finish_reason": part.finish,
        }

    def complete(self, part: Part) -> dict[str, Any]:
        text = part.shown
        entries = part.entries
        if self.body.echo:
            prompt = self._prompt(part)
            text = prompt + text
            if part.logprobs is not None:
                entries = self._echoed(part, prompt, part.logprobs)
        return self.delta(part, Piece(text), entries)

    def _echoed(self, part: Part, prompt: str, logprobs: LogProbs) -> list[dict[str, Any]]:
        """The log-probabilities of the prompt and of the completion after it."""
        entries = []
        part.decoder = TextDecoder(self.tokenizer)
        part.before = 0
        for token in [TokenLogProb(part.request.prompt[0], 0.0, []), *logprobs.prompt]:
            entries.append(self.entry(part, token))
            name = entries[-1]["token"]
            # A special token may be part of a string that was given, and is not part of decoded text.
            if self.is_hidden(token.token) and prompt.startswith(name, entries[-1]["offset"]):
                part.before += len(name)
        entries[0] |= {"logprob": None, "top": None}
        part.decoder = None
        part.before = len(prompt)
        return entries + self._entries(part, logprobs.tokens)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    body: ChatRequest
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl"

    def thought_reader(self, request: Request) -> ThoughtReader | None:
        if self.tokenizer is None or CLOSE not in self.template:
            return None
        end = str(self.tokenizer.decode(request.prompt[-8:], skip_special_tokens=False))
        return ThoughtReader(inside=end.rstrip().endswith(OPEN))

    def call_reader(self) -> CallReader | None:
        tools = [tool["function"] for tool in offered(self.body)]
        strict = frozenset(tool["name"] for tool in tools if tool.get("strict"))
        first_only = self.body.parallel_tool_calls is False
        return CallReader({tool["name"] for tool in tools}, first_only, strict) if tools else None

    def opening(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        return [
            self.chunk({"index": i, "delta": role, "logprobs": None, "finish_reason": None})
            for i in range(len(self.parts))
        ]

    def _entries(self, part: Part, tokens: abc.Iterable[TokenLogProb]) -> list[dict[str, Any]]:
        """Without an end token, which is not part of the content."""
        return super()._entries(part, (token for token in tokens if token.token not in part.request.eos))

    def entry(self, part: Part, entry: TokenLogProb) -> dict[str, Any]:
        def described(token: int, logprob: float) -> dict[str, Any]:
            text = self.token_text(token)
            return {"token": text, "logprob": logprob, "bytes": self.token_bytes(token)}

        return described(entry.token, entry.logprob) | {
            "top_logprobs": [described(*pair) for pair in entry.top]
        }

    def _around(self, part: Part, entries: list[dict[str, Any]]) -> dict[str, Any]:
        shown = {"content": entries} if self.body.logprobs else None
        return {"index": part.index, "logprobs": shown, "finish_reason": part.finish}

    def delta(self, part: Part, piece: Piece, entries: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = list(piece.calls)
        return self._around(part, entries) | {"delta": delta}

    def complete(self, part: Part) -> dict[str, Any]:
        content = part.shown or (None if part.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if part.thoughts is not None:
            message["reasoning_content"] = part.reasoning or None
        if part.tool_calls:
            message["tool_calls"] = part.tool_calls
        return self._around(part, part.entries) | {"message": message}

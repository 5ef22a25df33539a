"""Turns updates of the engine into the API's objects: a whole answer, or the chunks of a stream.

A stream consists of the role, text as tokens are accepted, the finish reason, usage if requested, and [DONE].
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from time import time
from typing import Any

from ..core import Step
from ..engine.results import Update
from .choice import Choice
from .logprobs import TokenLogProb
from .metrics import speculation
from .protocol import ChatRequest, CompletionRequest, Generating
from .tools import CallReader, offered


class Answer:
    """Base class of the answers of the two endpoints.

    Args:
        request: the checked fields.
        model: the model's name in the API.
        choices: the texts.
        tokenizer: decodes single tokens.
        fingerprint: identifies the model and this library, for the field system_fingerprint.
    """

    object = chunk_object = prefix = ""

    def __init__(
        self, request: Generating, model: str, choices: Sequence[Choice], tokenizer: Any, fingerprint: str
    ) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.choices = choices
        for choice in choices:
            choice.calls = self.call_reader()
        self.asked = request.lookahead
        self.usage_asked = bool(request.stream_options and request.stream_options.include_usage)

    def call_reader(self) -> CallReader | None:
        """Extracts tool calls from a text; None without tools."""
        return None

    def take(self, update: Update) -> dict[str, Any] | None:
        """Process an update. Returns the choice of a chunk; None if there is nothing to send."""
        choice: Choice = update.sequence.tag
        finish = update.result.finish_reason if update.result is not None else None
        if choice.predicted is not None:
            choice.predicted.take(update.tokens)
        entries = self._new_entries(choice, update)
        piece = update.piece
        if choice.calls is not None:
            piece = choice.calls.push(piece)
            if finish is not None:
                rest, choice.tool_calls = choice.calls.finish()
                piece += rest
                finish = "tool_calls" if choice.tool_calls and finish == "stop" else finish
        choice.shown += piece
        choice.entries += entries
        choice.finish = finish
        trace = self.asked.trace if self.asked is not None else False
        if not (piece or entries or trace or finish is not None):
            return None
        chunk = self.delta(choice, piece, entries)
        if trace and update.step is not None:
            chunk["lookahead"] = self._trace(update.step)
        if finish is not None:
            self._statistics(choice, chunk)
        return chunk

    def _new_entries(self, choice: Choice, update: Update) -> list[dict[str, Any]]:
        logprobs = choice.logprobs
        if logprobs is None:
            return []
        end = len(choice.entries) + len(update.tokens)
        fresh = logprobs.tokens[len(choice.entries) : end]
        ends = choice.request.eos  # not part of the text
        return [self.entry(choice, entry) for entry in fresh if entry.token not in ends]

    def _statistics(self, choice: Choice, into: dict[str, Any]) -> None:
        result = choice.sequence.result if choice.sequence is not None else None
        if self.asked is not None and self.asked.stats and result is not None:
            into["lookahead"] = {**into.get("lookahead", {}), "stats": speculation(result.stats)}

    def _trace(self, step: Step) -> dict[str, Any]:
        shown = {"tokens": [self.token_text(token) for token in step.tokens], "path": step.path}
        if step.tree is not None:
            tree = step.tree
            shown["tree"] = [self.token_text(token) for token in tree.tokens]
            shown["parents"], shown["needs_logits"] = tree.parents, tree.needs_logits
        return shown

    def token_text(self, token: int) -> str:
        """The text of a single token."""
        return str(self.tokenizer.decode([token])) if self.tokenizer is not None else f"token_id:{token}"

    def whole(self) -> dict[str, Any]:
        """The whole answer, without streaming."""
        choices = []
        for choice in self.choices:
            completed = self.complete(choice)
            self._statistics(choice, completed)
            choices.append(completed)
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts. A prompt counts once, however many texts it has."""
        # The texts of a prompt are adjacent.
        prompt = sum(len(choice.request.prompt) for choice in self.choices[:: self.request.n or 1])
        sequences = [choice.sequence for choice in self.choices if choice.sequence is not None]
        completion = sum(len(sequence.tokens) for sequence in sequences)
        predicted = [choice.predicted for choice in self.choices if choice.predicted is not None]
        details = {
            "accepted_prediction_tokens": sum(prediction.accepted for prediction in predicted),
            "rejected_prediction_tokens": sum(prediction.rejected for prediction in predicted),
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.cached for sequence in sequences)},
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

    def entry(self, choice: Choice, entry: TokenLogProb) -> dict[str, Any]:
        """The log-probabilities of a token, in the form of the endpoint."""
        raise NotImplementedError

    def delta(self, choice: Choice, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The choice of a chunk."""
        raise NotImplementedError

    def complete(self, choice: Choice) -> dict[str, Any]:
        """The choice of a whole answer."""
        raise NotImplementedError


def sse(body: Any) -> bytes:
    """A server-sent event. Non-ASCII characters are escaped, so no Unicode line separator can break a frame."""
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    request: CompletionRequest
    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def opening(self) -> list[bytes]:
        if not self.request.echo:
            return []
        return [self.chunk(self.delta(choice, self._prompt(choice), [])) for choice in self.choices]

    def _prompt(self, choice: Choice) -> str:
        """The prompt as text."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(choice.request.prompt, skip_special_tokens=True))

    def entry(self, choice: Choice, entry: TokenLogProb) -> dict[str, Any]:
        text = self.token_text(entry.token)
        offset, choice.offset = choice.offset, choice.offset + len(text)
        top = {self.token_text(token): value for token, value in entry.top}
        return {"token": text, "logprob": entry.logprob, "top": top, "offset": offset}

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        names = {
            "tokens": "token",
            "token_logprobs": "logprob",
            "top_logprobs": "top",
            "text_offset": "offset",
        }
        return {name: [entry[key] for entry in entries] for name, key in names.items()}

    def delta(self, choice: Choice, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": piece,
            "logprobs": self._logprobs(entries),
            "finish_reason": choice.finish,
        }

    def complete(self, choice: Choice) -> dict[str, Any]:
        text, entries = choice.shown, choice.entries
        if self.request.echo:
            text = self._prompt(choice) + text
            if choice.logprobs is not None:
                choice.offset = 0
                first = self.entry(choice, TokenLogProb(choice.request.prompt[0], 0.0, []))
                before = [self.entry(choice, entry) for entry in choice.logprobs.prompt]
                entries = [first | {"logprob": None, "top": None}, *before]
                entries += [self.entry(choice, entry) for entry in choice.logprobs.tokens]
        return self.delta(choice, text, entries)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    request: ChatRequest
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def call_reader(self) -> CallReader | None:
        names = {tool["function"]["name"] for tool in offered(self.request)}
        return CallReader(names, first_only=self.request.parallel_tool_calls is False) if names else None

    def opening(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        return [
            self.chunk({"index": i, "delta": role, "logprobs": None, "finish_reason": None})
            for i in range(len(self.choices))
        ]

    def chunk(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """Send calls in a chunk before the finish reason, because client helpers end a call at the next chunk."""
        calls = b""
        for choice in choices:
            if choice["delta"].get("tool_calls"):
                first = {name: choice[name] for name in ("index", "logprobs", "delta")}
                calls += super().chunk(first | {"finish_reason": None})
                choice |= {"logprobs": None, "delta": {}}
        return calls + super().chunk(*choices, usage=usage)

    def entry(self, choice: Choice, entry: TokenLogProb) -> dict[str, Any]:
        def described(token: int, logprob: float) -> dict[str, Any]:
            text = self.token_text(token)
            whole = list(text.encode()) if "\ufffd" not in text else None  # a part of a character
            return {"token": text, "logprob": logprob, "bytes": whole}

        return described(entry.token, entry.logprob) | {
            "top_logprobs": [described(*pair) for pair in entry.top]
        }

    def _around(self, choice: Choice, entries: list[dict[str, Any]]) -> dict[str, Any]:
        shown = {"content": entries} if self.request.logprobs else None
        return {"index": choice.index, "logprobs": shown, "finish_reason": choice.finish}

    def delta(self, choice: Choice, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece} if piece else {}
        if choice.tool_calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(choice.tool_calls)]
        return self._around(choice, entries) | {"delta": delta}

    def complete(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.shown or None, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        else:
            message["content"] = choice.shown
        return self._around(choice, choice.entries) | {"message": message}

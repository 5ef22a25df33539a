"""Events of the loop made into the API's objects: one whole answer, or chunks of a stream.

A stream's order: the role, text as tokens are accepted, the finish reason, usage where it is asked for, [DONE].
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from ..core import Step
from .guards import Entry
from .loop import Event
from .metrics import speculation
from .prepare import Choice
from .protocol import Generating
from .tools import CallReader


@dataclass(slots=True)
class Text:
    """What is known of one text of an answer."""

    choice: Choice
    calls: CallReader | None
    text: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    length: int = 0  # characters of the prompt and the text so far, for offsets


class Answer:
    """What the two endpoints have in common.

    Args:
        request: as it came.
        model: its name in the API.
        choices: its texts.
        tokenizer: for the text of single tokens.
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
        self.texts = [Text(choice, self.call_reader()) for choice in choices]
        self.told = request.lookahead
        self.usage_asked = bool(request.stream_options and request.stream_options.include_usage)

    def call_reader(self) -> CallReader | None:
        """What finds calls in a text."""
        return None

    def take(self, choice: Choice, event: Event) -> dict[str, Any] | None:
        """Take in one event; the chunk's choice that it makes, or None where there is nothing to say."""
        state, finish = self.texts[choice.index], event.finish
        if choice.predicted is not None:
            choice.predicted.take(event.tokens)
        entries = self._new_entries(state, event)
        piece = event.piece
        if state.calls is not None:
            piece = state.calls.push(piece)
            if finish is not None:
                rest, state.tool_calls = state.calls.finish()
                piece += rest
                finish = "tool_calls" if state.tool_calls and finish == "stop" else finish
        state.text += piece
        state.entries += entries
        state.finish = finish
        trace = self.told.trace if self.told is not None else False
        if not (piece or entries or trace or finish is not None):
            return None
        chunk = self.delta(state, piece, entries)
        if trace and event.step is not None:
            chunk["lookahead"] = self._trace(event.step)
        if finish is not None:
            self._statistics(state, chunk)
        return chunk

    def _new_entries(self, state: Text, event: Event) -> list[dict[str, Any]]:
        logprobs = state.choice.logprobs
        if logprobs is None:
            return []
        end = len(state.entries) + len(event.tokens)
        fresh = logprobs.tokens[len(state.entries) : end]
        ends = state.choice.sequence.request.eos  # no part of the text
        return [self.entry(state, entry) for entry in fresh if entry.token not in ends]

    def _statistics(self, state: Text, into: dict[str, Any]) -> None:
        generation = state.choice.sequence.generation
        if self.told is not None and self.told.stats and generation is not None:
            into["lookahead"] = {**into.get("lookahead", {}), "stats": speculation(generation.stats)}

    def _trace(self, step: Step) -> dict[str, Any]:
        shown = {"tokens": [self.token_text(token) for token in step.tokens], "path": step.path}
        if step.tree is not None:
            tree = step.tree
            shown["tree"] = [self.token_text(token) for token in tree.tokens]
            shown["parents"], shown["needs_logits"] = tree.parents, tree.needs_logits
        return shown

    def token_text(self, token: int) -> str:
        """One token by itself."""
        return str(self.tokenizer.decode([token])) if self.tokenizer is not None else f"token_id:{token}"

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = []
        for state in self.texts:
            made = self.complete(state)
            self._statistics(state, made)
            choices.append(made)
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens in and out; a prompt counts once, however many texts follow it."""
        prompts = {id(state.choice.prompt): len(state.choice.prompt) for state in self.texts}
        generations = [state.choice.sequence.generation for state in self.texts]
        prompt = sum(prompts.values())
        completion = sum(len(g.tokens) for g in generations if g is not None)
        predicted = [state.choice.predicted for state in self.texts if state.choice.predicted is not None]
        details = {
            "accepted_prediction_tokens": sum(one.accepted for one in predicted),
            "rejected_prediction_tokens": sum(one.rejected for one in predicted),
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(s.choice.sequence.cached for s in self.texts)},
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

    def entry(self, state: Text, entry: Entry) -> dict[str, Any]:
        """One token's log-probabilities."""
        raise NotImplementedError

    def delta(self, state: Text, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The choice of a chunk."""
        raise NotImplementedError

    def complete(self, state: Text) -> dict[str, Any]:
        """The choice of a whole answer."""
        raise NotImplementedError


def sse(body: Any) -> bytes:
    """A server-sent event; non-ASCII is escaped, so no line separator of Unicode can break a frame."""
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def opening(self) -> list[bytes]:
        if not getattr(self.request, "echo", None):
            return []
        return [self.chunk(self.delta(state, *self._echo(state))) for state in self.texts]

    def _echo(self, state: Text) -> tuple[str, list[dict[str, Any]]]:
        """(the prompt as text, its log-probabilities as far as they are known now)."""
        text = self.tokenizer.decode(state.choice.prompt, skip_special_tokens=True) if self.tokenizer else ""
        return str(text), []

    def entry(self, state: Text, entry: Entry) -> dict[str, Any]:
        text = self.token_text(entry.token)
        offset, state.length = state.length, state.length + len(text)
        top = {self.token_text(token): value for token, value in entry.top}
        return {"token": text, "logprob": entry.logprob, "top": top, "offset": offset}

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        if getattr(self.request, "logprobs", None) is None:
            return None
        names = {
            "tokens": "token",
            "token_logprobs": "logprob",
            "top_logprobs": "top",
            "text_offset": "offset",
        }
        return {name: [entry[key] for entry in entries] for name, key in names.items()}

    def delta(self, state: Text, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": state.choice.index,
            "text": piece,
            "logprobs": self._logprobs(entries),
            "finish_reason": state.finish,
        }

    def complete(self, state: Text) -> dict[str, Any]:
        text, entries = state.text, state.entries
        if getattr(self.request, "echo", None):
            text = self._echo(state)[0] + text
            if state.choice.logprobs is not None:
                state.length = 0
                first = self.entry(state, Entry(state.choice.prompt[0], 0.0, []))
                before = [self.entry(state, entry) for entry in state.choice.logprobs.prompt]
                entries = [first | {"logprob": None, "top": None}, *before]
                entries += [self.entry(state, entry) for entry in state.choice.logprobs.tokens]
        return self.delta(state, text, entries)


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def call_reader(self) -> CallReader | None:
        tools = getattr(self.request, "tools", None)
        if not tools or getattr(self.request, "tool_choice", None) == "none":
            return None
        one = getattr(self.request, "parallel_tool_calls", None) is False
        return CallReader({tool.function.name for tool in tools}, one)

    def opening(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        return [
            self.chunk({"index": i, "delta": role, "logprobs": None, "finish_reason": None})
            for i in range(len(self.texts))
        ]

    def chunk(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """Calls go before the finish reason: clients' helpers end a call by the chunk after it."""
        calls = b""
        for choice in choices:
            if choice["delta"].get("tool_calls"):
                first = {name: choice[name] for name in ("index", "logprobs", "delta")}
                calls += super().chunk(first | {"finish_reason": None})
                choice |= {"logprobs": None, "delta": {}}
        return calls + super().chunk(*choices, usage=usage)

    def entry(self, state: Text, entry: Entry) -> dict[str, Any]:
        def described(token: int, logprob: float) -> dict[str, Any]:
            text = self.token_text(token)
            whole = list(text.encode()) if "\ufffd" not in text else None  # a part of a character
            return {"token": text, "logprob": logprob, "bytes": whole}

        return described(entry.token, entry.logprob) | {
            "top_logprobs": [described(*pair) for pair in entry.top]
        }

    def _around(self, state: Text, entries: list[dict[str, Any]]) -> dict[str, Any]:
        shown = {"content": entries} if getattr(self.request, "logprobs", None) else None
        return {"index": state.choice.index, "logprobs": shown, "finish_reason": state.finish}

    def delta(self, state: Text, piece: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece} if piece else {}
        if state.tool_calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(state.tool_calls)]
        return self._around(state, entries) | {"delta": delta}

    def complete(self, state: Text) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": state.text or None, "refusal": None}
        if state.tool_calls:
            message["tool_calls"] = state.tool_calls
        else:
            message["content"] = state.text
        return self._around(state, state.entries) | {"message": message}

"""Anthropic's /v1/messages: its fields, their translation to a chat, and the message as an object or as events.

MessagesRequest -> ChatRequest -> the same requests, tools and grammars as /v1/chat/completions
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from ..core import LookaheadError, Update
from .api_errors import error_body, status_of
from .protocol import ChatRequest, Content, Free, Items, Lenient, Stops, Strict, TextPart, plain
from .response_api import written
from .responses import ChatAnswer

#: What the API calls the finish reasons; a stop string has a name of its own.
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

#: What a block of reasoning also has.
SIGNED = {"thinking": {"signature": ""}}


class Block(Lenient):
    """A part of a message: text, a call, its result, or reasoning."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Free = Field({})
    tool_use_id: str = ""
    content: Content | None = None


class Turn(Lenient):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[Items[Block], Field(max_length=4096)]

    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat that stand for it: results of calls are messages of their own, before the others."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "content": plain(block.content), "tool_call_id": block.tool_use_id}
            for block in self.content
            if block.type == "tool_result"
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if block.type == "tool_use"
        ]
        text = "".join(block.text for block in self.content)
        thoughts = "".join(block.thinking for block in self.content)
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": thoughts} if thoughts else {}
        return [*results, *([{"role": self.role, "content": text} | more] if text or calls else [])]


class CustomTool(Lenient):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Free
    strict: bool | None = None


class Choice(Lenient):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Strict):
    """POST /v1/messages."""

    model: str | None = Field(None, description="The served model's name; optional.")
    messages: Annotated[Items[Turn], Field(min_length=1, max_length=4096)] = Field(
        description="The conversation so far: text, calls and their results."
    )
    max_tokens: int = Field(ge=1, description="Maximum tokens of the answer.")
    system: str | Items[TextPart] | None = Field(None, description="A system message.")
    temperature: float | None = Field(
        None, ge=0, le=1, description="0 for greedy decoding; the default is 1."
    )
    top_p: float | None = Field(None, ge=0, le=1, description="As in a chat.")
    top_k: int | None = Field(None, ge=0, description="As in a chat.")
    stop_sequences: Stops | None = Field(None, description="As stop in a chat.")
    stream: bool | None = Field(None, description="Send events as tokens are accepted.")
    tools: Items[CustomTool] | None = Field(None, max_length=128, description="Tools that may be called.")
    tool_choice: Choice | None = Field(None, description="Whether the model calls a tool, and which.")
    thinking: Free | None = Field(None, description="Its type sets enable_thinking of the chat template.")
    metadata: Free | None = Field(None, description="Accepted; has no effect.")
    service_tier: str | None = Field(None, description="Accepted; has no effect.")
    cache_control: Free | None = Field(None, description="Accepted; has no effect.")

    def chat(self) -> ChatRequest:
        """The equivalent request for a chat.

        Raises:
            ValidationError: a value that a chat rejects.
        """
        system = [{"role": "system", "content": plain(self.system)}] if self.system else []
        choice = self.tool_choice
        mode: Any = None if choice is None else {"any": "required"}.get(choice.type, choice.type)
        if mode == "tool" and choice is not None:
            mode = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {
                "function": tool.model_dump(exclude={"type", "input_schema"})
                | {"parameters": tool.input_schema}
            }
            for tool in self.tools or []
        ]
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in same}
            | {
                "messages": [*system, *(message for turn in self.messages for message in turn.messages())],
                "stop": self.stop_sequences,
                "tools": tools or None,
                "tool_choice": mode,
                "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
                "chat_template_kwargs": self.thinking
                and {"enable_thinking": self.thinking.get("type") != "disabled"},
            }
        )


class CountRequest(MessagesRequest):
    """POST /v1/messages/count_tokens."""

    max_tokens: int = 1


class MessageAnswer(ChatAnswer):
    """The answer of /v1/messages. Its content is a list of blocks, in the order in which the model writes them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.head["id"] = f"msg_{uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []

    def opening(self) -> list[bytes]:
        return [written({"type": "message_start", "message": self._message()})]

    def take(self, update: Update) -> list[dict[str, Any]]:
        """Process an update. Returns the events to send."""
        events = list[dict[str, Any]]()
        for choice in super().take(update):
            delta = choice["delta"]
            for name, kind in (("reasoning_content", "thinking"), ("content", "text")):
                if name in delta:
                    if not self._blocks or self._blocks[-1]["type"] != kind:
                        events += self._begin({"type": kind, kind: ""} | SIGNED.get(kind, {}))
                    self._blocks[-1][kind] += delta[name]
                    events.append(self._delta({"type": f"{kind}_delta", kind: delta[name]}))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    named = {"id": f"toolu_{call['id']}", "name": call["function"]["name"], "input": {}}
                    events += self._begin({"type": "tool_use"} | named)
                if arguments := call["function"]["arguments"]:
                    events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        if update.result is not None:
            events += self._end()
        return events

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end()
        self._blocks.append(block)
        shown = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, shown]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self) -> list[dict[str, Any]]:
        """End the last block."""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []

    def chunk(self, *events: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        return b"".join(map(written, events))

    def ending(self) -> list[bytes]:
        last = self._message()
        delta = {name: last[name] for name in ("stop_reason", "stop_sequence")}
        return [
            written({"type": "message_delta", "delta": delta, "usage": last["usage"]}),
            written({"type": "message_stop"}),
        ]

    def failure(self, error: LookaheadError) -> bytes:
        return written({"type": "error"} | error_body(str(error), *status_of(error)))

    def whole(self) -> dict[str, Any]:
        calls = iter(self.parts[0].tool_calls)
        for block in self._blocks:
            if block["type"] == "tool_use":
                with suppress(ValueError):  # the limit of tokens may cut arguments
                    block["input"] = json.loads(next(calls)["function"]["arguments"])
        return self._message() | {"content": self._blocks}

    def _message(self) -> dict[str, Any]:
        """The message, without its content."""
        finish = self.parts[0].finish
        result = self.sequences[0].result
        stopped = result.stopped if result is not None and finish == "stop" else None
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [],
            "stop_reason": finish and ("stop_sequence" if stopped else REASONS.get(finish, "end_turn")),
            "stop_sequence": stopped,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }

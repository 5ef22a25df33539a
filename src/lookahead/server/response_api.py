"""OpenAI's /v1/responses: its fields, their translation to a chat, and the response as an object or as events.

    ResponsesRequest -> ChatRequest -> the same requests, tools and grammars as /v1/chat/completions

``previous_response_id`` continues a conversation that the server keeps in memory, within limits.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from ..core import LookaheadError, Update
from .api_errors import Refused, status_of
from .protocol import (
    ChatRequest,
    Content,
    Free,
    Function,
    Items,
    Lenient,
    Metadata,
    StreamOptions,
    Strict,
    plain,
)
from .responses import ChatAnswer

#: Limits of the conversations that are kept: their number, and the characters of all of them.
MOST_KEPT, MOST_CHARACTERS = 256, 1 << 26


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class TextFormat(Lenient):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    schema_: Free | None = Field(None, alias="schema")


class TextOptions(Lenient):
    """Options of the text."""

    format: TextFormat | None = None


class Reasoning(Lenient):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class Item(Lenient):
    """A part of a conversation: a message, a call, its output, or reasoning, which is left out."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""

    def message(self) -> dict[str, Any] | None:
        """The message of a chat that stands for it; None for reasoning."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": plain(self.output), "tool_call_id": self.call_id}
        return {"role": self.role, "content": plain(self.content)}


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: str | None = Field(None, description="The served model's name; optional.")
    input: str | Annotated[Items[Item], Field(min_length=1, max_length=4096)] = Field(
        description="A string, or the items of a conversation: messages, function calls and their outputs."
    )
    instructions: str | None = Field(None, description="A system message before the conversation.")
    previous_response_id: str | None = Field(
        None,
        description=f"Continue the conversation of this response; the server keeps the last {MOST_KEPT} in memory.",
    )
    store: bool | None = Field(None, description="false: do not keep the conversation.")
    max_output_tokens: int | None = Field(None, ge=1, description="Maximum tokens of the response.")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 for greedy decoding; the default is 1."
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description="Draw from the most likely tokens that together have probability p."
    )
    stream: bool | None = Field(None, description="Send events as tokens are accepted.")
    tools: Items[FunctionTool] | None = Field(
        None, max_length=128, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="Whether the model calls a function, and which."
    )
    parallel_tool_calls: bool | None = Field(None, description="false allows at most one call.")
    text: TextOptions | None = Field(
        None, description="The format of the text: text, json_object, or json_schema with a schema."
    )
    reasoning: Reasoning | None = Field(None, description="Its effort is passed to the chat template.")
    truncation: Literal["disabled"] | None = Field(None, description="Only disabled, the default.")
    background: Literal[False] | None = Field(None, description="Only false, the default.")
    stream_options: StreamOptions | None = Field(None, description="Accepted; has no effect.")
    include: Items[str] | None = Field(None, description="Accepted; has no effect.")
    user: str | None = Field(None, description="Accepted; has no effect.")
    metadata: Metadata | None = Field(None, description="Returned with the response.")
    service_tier: str | None = Field(None, description="Accepted; has no effect.")
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; has no effect.")

    def messages(self) -> list[dict[str, Any]]:
        """The messages of its input. Adjacent calls are one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages = list[dict[str, Any]]()
        for message in filter(None, (item.message() for item in self.input)):
            if "tool_calls" in message and messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"] += message["tool_calls"]
            else:
                messages.append(message)
        return messages

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """The equivalent request for a chat.

        Args:
            messages: the conversation, with the input.

        Raises:
            ValidationError: a value that a chat rejects.
        """
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        given = {
            "model": self.model,
            "messages": [*instructions, *messages],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools or []
            ]
            or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        form = self.text.format if self.text is not None else None
        if form is not None and form.type != "text":
            schema = {"name": form.name, "schema": form.schema_ or {}}
            given["response_format"] = {"type": form.type} | (
                {"json_schema": schema} if form.type == "json_schema" else {}
            )
        return ChatRequest.model_validate(given)


class Conversations:
    """The conversations of the last responses, by the id of the response; the oldest are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, list[dict[str, Any]]]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, response: str | None) -> list[dict[str, Any]]:
        """The messages up to a response; [] for None.

        Raises:
            Refused: the response is not kept.
        """
        if response is None:
            return []
        with self._lock:
            if response not in self._kept:
                raise Refused(
                    f"previous_response_id: the response {response!r:.80} is not kept here (any more); send the "
                    "whole conversation as input",
                    400,
                    "previous_response_not_found",
                    param="previous_response_id",
                )
            return self._kept[response][1]

    def keep(self, response: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages up to a response."""
        size = len(json.dumps(messages))
        with self._lock:
            self._kept[response] = size, messages
            self._characters += size
            while len(self._kept) > MOST_KEPT or self._characters > MOST_CHARACTERS:
                _, (dropped, _) = self._kept.popitem(last=False)
                self._characters -= dropped


class ResponseAnswer(ChatAnswer):
    """The answer of /v1/responses.

    Its output is a list of items, in the order in which the model writes them: reasoning, messages, function calls.

    Args:
        *given: as in ``Answer``.
        asked: the request.
        messages: the conversation, with the input.
        conversations: where to keep it.
    """

    prefix = "resp"

    def __init__(
        self,
        *given: Any,
        asked: ResponsesRequest,
        messages: list[dict[str, Any]],
        conversations: Conversations,
    ) -> None:
        super().__init__(*given)
        self._id = f"{self.prefix}_{uuid4().hex}"
        self.head["id"] = self._id
        self._asked = asked
        self._messages = messages
        self._conversations = conversations
        self._output: list[dict[str, Any]] = []
        #: Whether the last item goes on.
        self._open = False
        self._number = 0

    # ------------------------------------------------------------------------------- events

    def opening(self) -> list[bytes]:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [written(self._event(kind, response=response)) for kind in kinds]

    def take(self, update: Update) -> list[dict[str, Any]]:
        """Process an update. Returns the events to send."""
        events = list[dict[str, Any]]()
        for choice in super().take(update):
            delta = choice["delta"]
            for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
                if name in delta:
                    events += self._extend(kind, delta[name])
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
        if update.result is not None:
            events += self._close()
        return events

    def chunk(self, *events: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        return b"".join(map(written, events))

    def ending(self) -> list[bytes]:
        response = self.whole()
        return [written(self._event(f"response.{response['status']}", response=response))]

    def failure(self, error: LookaheadError) -> bytes:
        status, code = status_of(error)
        error_of = {"code": code or str(status), "message": str(error)}
        response = self._response("failed") | {"error": error_of}
        return written(self._event("response.failed", response=response))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _at(self) -> dict[str, Any]:
        """The place of the last item, in the fields of an event."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._output.append(item)
        self._open = True
        shown = item | ({"content": []} if "content" in item else {})
        place = {"output_index": len(self._output) - 1}
        events.append(self._event("response.output_item.added", item=shown, **place))
        if "content" in item:
            events.append(self._part("added"))
        return events

    def _part(self, what: str) -> dict[str, Any]:
        part = dict(self._output[-1]["content"][0])
        return self._event(f"response.content_part.{what}", content_index=0, part=part, **self._at())

    def _extend(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Add text to the last item, or begin one."""
        events = list[dict[str, Any]]()
        if not self._open or self._output[-1]["type"] != kind:
            events = self._begin(_item(kind))
        part = self._output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        delta = self._event(
            f"response.{part['type']}.delta", content_index=0, delta=text, **self._at(), **more
        )
        return [*events, delta]

    def _call(self, change: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin a call, or add to the arguments of the last one."""
        events = list[dict[str, Any]]()
        if "id" in change:
            call = {"call_id": change["id"], "name": change["function"]["name"], "arguments": ""}
            events = self._begin(_item("function_call") | call)
        arguments = change["function"]["arguments"]
        self._output[-1]["arguments"] += arguments
        if arguments:
            delta = self._event("response.function_call_arguments.delta", delta=arguments, **self._at())
            events.append(delta)
        return events

    def _close(self) -> list[dict[str, Any]]:
        """End the last item."""
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = "incomplete" if self.parts[0].finish == "length" else "completed"
        events = list[dict[str, Any]]()
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **done, **self._at()))
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            done = {"content_index": 0, "text": part["text"], **more}
            events += [self._event(f"response.{part['type']}.done", **done, **self._at()), self._part("done")]
        events.append(
            self._event("response.output_item.done", item=dict(item), output_index=len(self._output) - 1)
        )
        return events

    # ------------------------------------------------------------------------------- the object

    def whole(self) -> dict[str, Any]:
        status = "incomplete" if self.parts[0].finish == "length" else "completed"
        if self._asked.store is not False:
            self._conversations.keep(self._id, [*self._messages, *self._said()])
        return self._response(status)

    def _said(self) -> list[dict[str, Any]]:
        """The output as messages of a chat."""
        part = self.parts[0]
        calls = {"tool_calls": part.tool_calls} if part.tool_calls else {}
        return [{"role": "assistant", "content": part.shown} | calls]

    def _response(self, status: str) -> dict[str, Any]:
        """The response object."""
        asked = self._asked.model_dump(
            mode="json",
            by_alias=True,
            include={"instructions", "max_output_tokens", "previous_response_id", "user", "metadata"},
        )
        form = self._asked.text.format if self._asked.text is not None else None
        cut = status == "incomplete"
        return asked | {
            "id": self._id,
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.head["model"],
            "output": list(self._output),
            "parallel_tool_calls": self._asked.parallel_tool_calls is not False,
            "reasoning": {"effort": self._asked.reasoning and self._asked.reasoning.effort, "summary": None},
            "store": self._asked.store is not False,
            "temperature": 1.0 if self._asked.temperature is None else self._asked.temperature,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
            },
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self._asked.tools or []],
            "top_p": 1.0 if self._asked.top_p is None else self._asked.top_p,
            "truncation": "disabled",
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def written(event: dict[str, Any]) -> bytes:
    """An event that is named by its type."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def _item(kind: str) -> dict[str, Any]:
    """An empty item of the output."""
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    item: dict[str, Any] = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "message":
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return item | {"role": "assistant", "content": [part]}
    return item | (
        {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]} if kind == "reasoning" else {}
    )

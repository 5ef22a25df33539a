"""Function calls: the chat template describes the tools to the model, and calls are extracted from its output.

If a template does not support tools, a system message describes them in the format that most open models were trained
on: a call is a JSON object {"name", "arguments"} between <tool_call> tags. A required call must follow its schema.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ..core import SettingsError
from ..core.errors import first_line
from .protocol import ChatRequest, Message, NamedTool, plain

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PREAMBLE = (
    "You may call functions. They are, as JSON:\n{tools}\n"
    'To call one, answer only with {open}{{"name": <its name>, "arguments": <an object>}}{close}.'
)


def messages_of(chat: list[Message]) -> list[dict[str, Any]]:
    """Messages in the format of chat templates, where the arguments of a call are a mapping, not JSON text."""
    messages = []
    for message in chat:
        role = "system" if message.role == "developer" else message.role
        given: dict[str, Any] = {"role": role, "content": plain(message.content)}
        if message.name is not None:
            given["name"] = message.name
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.function.name, "arguments": _value(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        messages.append(given)
    return messages


def _value(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def offered(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that may be called, in the format of chat templates.

    Raises:
        SettingsError: a tool's schema is nested too deeply.
    """
    if not request.tools or request.tool_choice == "none":
        return []
    try:
        return [tool.model_dump(exclude_none=True) for tool in request.tools]
    except ValueError as error:  # pydantic's limit of depth
        raise SettingsError(f"tools: must not be nested so deeply ({first_line(error)})") from None


def demanded(request: ChatRequest) -> tuple[dict[str, Any], str] | None:
    """(schema of a required call, the field that requires it); None if no call is required.

    Raises:
        SettingsError: the required tool is not among ``tools``, there are no tools, or a tool is strict although no
            call is required.
    """
    # If no call is required, no schema is enforced, so no tool may be strict.
    choice = request.tool_choice
    strict = [tool.function.name for tool in request.tools or [] if tool.function.strict]
    if choice in (None, "none", "auto"):
        if strict and choice != "none":
            raise SettingsError(
                f"tools.function.strict: the arguments of {strict[0]} follow their schema only if the call is "
                'required; omit strict, or set tool_choice to "required" or to the function'
            )
        return None
    # The functions of which one must be called.
    functions = {tool.function.name: tool.function for tool in request.tools or []}
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise SettingsError(
                f"tool_choice: must name one of tools ({', '.join(functions) or 'none'}), "
                f"got {choice.function.name!r}"
            )
        functions = {choice.function.name: functions[choice.function.name]}
    if not functions:
        raise SettingsError("tool_choice: a tool must be called, but tools is empty")
    # A schema for each call. Several are joined by anyOf, so references within the schemas must be adjusted.
    calls = []
    for number, (name, function) in enumerate(functions.items()):
        place = f"/anyOf/{number}" if len(functions) > 1 else ""
        arguments = _moved(function.parameters, f"{place}/properties/arguments")
        call = {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls.append(call)
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}), "tool_choice"


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema with its references to itself adjusted, so that they are valid where it is part of another schema.

    "#/$defs/x" begins at the root of the whole schema, except in a schema with an "$id", which is a root itself.

    Args:
        schema: the schema.
        place: the JSON pointer to this schema within the other one.
    """
    if "$id" in schema:
        return schema

    def move(part: dict[str, Any]) -> dict[str, Any]:
        to = str(part.get("$ref"))
        # Not "#name", which is an anchor and valid everywhere in the whole schema.
        return part | {"$ref": f"#{place}{to[1:]}"} if to == "#" or to.startswith("#/") else part

    moved: dict[str, Any] = json.loads(json.dumps(schema), object_hook=move)
    return moved


def with_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str
) -> list[dict[str, Any]]:
    """The messages, rewritten if the template does not support tools: a system message describes the tools, and calls
    and their results become text."""
    if "tools" in template:
        return messages
    rewritten = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            text = "".join(f"{OPEN}{json.dumps(call['function'])}{CLOSE}" for call in calls)
            message = {"role": "assistant", "content": message["content"] + text}
        elif message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
        rewritten.append(message)
    if not tools:
        return rewritten
    preamble = PREAMBLE.format(
        tools="\n".join(json.dumps(t["function"]) for t in tools), open=OPEN, close=CLOSE
    )
    if rewritten[0]["role"] == "system":
        head, *rest = rewritten
        return [{"role": "system", "content": f"{head['content']}\n\n{preamble}"}, *rest]
    return [{"role": "system", "content": preamble}, *rewritten]


class CallReader:
    """Reads a completion in pieces, passes on its content, and withholds text that may be a call.

    Args:
        names: the names of the tools.
        first_only: whether only the first call counts.
    """

    def __init__(self, names: set[str], first_only: bool) -> None:
        self._names = names
        self._first_only = first_only
        self._text = ""
        self._shown = 0

    def push(self, piece: str) -> str:
        """Read a piece. Returns the content that is safe to show."""
        self._text += piece
        start = self._text.lstrip()
        if not start or start[0] == "{" or start[: len(OPEN)] == OPEN[: len(start)]:
            return ""
        end = self._text.find(OPEN)
        if end < 0:  # a tag may have begun
            end = next(
                (len(self._text) - n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])),
                len(self._text),
            )
        piece, self._shown = self._text[self._shown : end], max(self._shown, end)
        return piece

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """End the completion. Returns (the rest of the content, the calls)."""
        parts = self._text.split(OPEN)
        bodies = [part.partition(CLOSE)[0] for part in parts[1:]] or [self._text]
        calls = [call for body in bodies if (call := self._call(body)) is not None]
        if not calls:
            return self._text[self._shown :], []
        content = parts[0][self._shown :].rstrip() if len(parts) > 1 else ""
        return content, calls[:1] if self._first_only else calls

    def _call(self, body: str) -> dict[str, Any] | None:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return None
        # Other JSON may have a list or an object here, which are unhashable.
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = given.get("arguments", given.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": text}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

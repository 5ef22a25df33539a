"""Function calls: the chat template describes the tools to the model, and calls are extracted from its output.

If a template does not support tools, a system message describes them in the format that most open models were trained
on: a call is a JSON object {"name", "arguments"} between <tool_call> tags. A required call must follow its schema.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from typing import Any

from ..core import SettingsError
from .grammar import Constraint
from .protocol import ChatRequest, Function, Message, NamedTool, is_shallow, plain
from .reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PREAMBLE = (
    "You may call functions. They are, as JSON:\n{tools}\n"
    'To call one, answer only with {open}{{"name": <its name>, "arguments": <an object>}}{close}.'
)


def messages_of(chat: list[Message]) -> list[dict[str, Any]]:
    """Messages in the format of chat templates, where the arguments of a call are a mapping, not JSON text."""
    messages = []
    for message in chat:
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        given: dict[str, Any] = {"role": role, "content": plain(message.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                given[name] = value
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id or "",
                    "function": {"name": call.function.name, "arguments": _value(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        messages.append(given)
    return messages


def _value(given: str | dict[str, Any]) -> Any:
    """The value of a JSON text; the text itself if it is not JSON, or nested too deeply for a template."""
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if is_shallow(value) else given


def _callable(request: ChatRequest) -> tuple[str, dict[str, Function]]:
    """(whether a call is made: none, auto or required; the functions that may be called, by name).

    Raises:
        SettingsError: ``tool_choice`` names another function, or a call is required and there are no tools.
    """
    functions = {tool.function.name: tool.function for tool in request.tools or []}
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        mode, named = choice, list(functions)
    elif isinstance(choice, NamedTool):
        mode, named = "required", [choice.function.name]
    else:
        mode, named = choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    unknown = next((name for name in named if name not in functions), None)
    if unknown is not None:
        raise SettingsError(
            f"tool_choice: must name one of tools ({', '.join(functions) or 'none'}), got {unknown!r:.80}"
        )
    if mode == "required" and not named:
        raise SettingsError("tool_choice: a tool must be called, but tools is empty")
    return mode, {} if mode == "none" else {name: functions[name] for name in named}


def offered(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that may be called, in the format of chat templates.

    Raises:
        SettingsError: as in ``_callable``.
    """
    _, functions = _callable(request)
    named = isinstance(request.tool_choice, NamedTool)  # the model is told all tools
    return [
        tool.model_dump(exclude_none=True)
        for tool in request.tools or []
        if tool.function.name in functions or (named and functions)
    ]


def demanded(request: ChatRequest) -> Constraint | None:
    """What the completion must match because of the tools; None if it is free.

    A required call is one object. If calls are voluntary, the arguments of strict functions follow their schemas
    wherever a call begins.

    Raises:
        SettingsError: as in ``_callable``.
    """
    mode, functions = _callable(request)
    if mode != "required":
        if not any(function.strict for function in functions.values()):
            return None
        return Constraint(
            "calls",
            {name: (each.parameters if each.strict else {}) or {} for name, each in functions.items()},
            "tools",
        )
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
    return Constraint("json", calls[0] if len(calls) == 1 else {"anyOf": calls}, "tool_choice")


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


#: What may begin a call: a tag or a fenced block of JSON; at the start of the answer, or after a call, an object too.
OPENING = re.compile(rf"{OPEN}|```(?:json)?\s*(?={{)")
BARE = re.compile(rf"\s*(?={{)|{OPENING.pattern}")
#: The beginning of an opening at the end of a text.
PART_OF_OPENING = re.compile(r"`{1,2}\Z|```(?:j|js|jso|json)?\s*\Z")
#: The beginning of a call whose arguments can be passed on while they are written.
HEADER = re.compile(
    r'\s*\{\{?\s*"name"\s*:\s*"([^"\\]*)"\s*(?:(\})|,\s*"(?:arguments|parameters)"\s*:\s*(?=\{))'
)
#: Keys after the arguments of a call, such as an id, and the comma of one that is not complete yet.
MORE_KEYS = re.compile(r'(?:\s*,\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.+-]+)(?=\s*[,}]))*')
PART_OF_KEY = re.compile(r'\s*,\s*(?:"|\Z)')
#: First keys of a call.
KEYS = ("name", "arguments", "parameters")
#: Ids as Mistral's chat templates demand them.
ID_LETTERS = string.ascii_letters + string.digits


class CallReader:
    """Reads a completion in pieces, and separates its content from the calls in it.

    A call is <tool_call>{"name": "f", "arguments": {...}}</tool_call>, the same object in a fenced block of JSON, or
    the object alone at the start of the answer; its outer braces may be doubled, as Qwen2.5's template writes them.
    Text that may be a call is held back until that is decided; the arguments of a call are passed on as they are
    written.

    Args:
        names: the names of the tools.
        first_only: whether only the first call counts.
        strict: the names whose calls the grammar has checked, which it does if the name comes first.

    Attributes:
        calls: the calls so far, in OpenAI's format.
    """

    def __init__(self, names: set[str], first_only: bool, strict: frozenset[str] = frozenset()) -> None:
        self._names = names
        self._strict = strict
        self._first_only = first_only
        self.calls: list[dict[str, Any]] = []
        #: Text that is not decided yet, and the method that decides about it; it returns whether to go on.
        self._text = ""
        self._read: Callable[[bool], bool] = self._read_content
        self._opening = self._closing = ""
        #: Whether an object without a tag can be a call here.
        self._bare = True
        #: How deep the arguments are nested at the end of the text read, and whether it is in a string.
        self._depth = 0
        self._quoted = self._escaped = False
        self._shown: list[str] = []
        self._changes: list[dict[str, Any]] = []

    def push(self, piece: str, end: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Read a piece. Returns the content that is safe to show, and what is new of calls, as in a stream's delta.

        Args:
            piece: the next piece of the completion.
            end: whether it is the last one.
        """
        self._text += piece
        while self._read(end):
            pass
        shown, self._shown = "".join(self._shown), []
        changes, self._changes = self._changes, []
        return shown, changes

    def _read_content(self, end: bool) -> bool:
        """Show text up to the next opening."""
        if self._first_only and self.calls:
            self._text = ""
            return False
        if self.calls and self._bare:
            self._text = self._text.lstrip()
        found = BARE.match(self._text) if self._bare else None
        found = found or OPENING.search(self._text)
        if found is not None:
            self._show(self._text[: found.start()].rstrip() if found[0].strip() else "")
            self._opening = found[0]
            self._closing = CLOSE if found[0] == OPEN else "```" if found[0].strip() else ""
            self._text = self._text[found.end() :]
            self._read = self._read_header
            return True
        if end:
            self._show(self._text)
            self._text = ""
            return False
        part = PART_OF_OPENING.search(self._text)
        held = len(part[0]) if part is not None else held_back(self._text, OPEN)
        ready = self._text[: len(self._text) - held]
        ready = ready[: len(ready.rstrip())]  # spaces before a call are not part of the content
        self._show(ready)
        self._text = self._text[len(ready) :]
        return False

    def _show(self, text: str) -> None:
        self._bare = self._bare and not text.strip()
        self._shown.append(text)

    def _read_header(self, end: bool) -> bool:
        """Decide whether text after an opening is a call."""
        found = HEADER.match(self._text)
        if found is not None and found[1] in self._names:
            self._begin(found[1])
            if found[2]:
                self._argue("{}")
            self._text = self._text[found.end() - (1 if found[2] else 0) :]
            self._read = self._read_end if found[2] else self._read_arguments
            return True
        body, closed, rest = self._text.partition(self._closing or "\0")
        if found is None and _may_be_call(self._text) and not closed and not end:
            return False
        # A call whose keys have another order, or whose arguments are text, is parsed as a whole.
        call = self._parsed(body) if found is None else None
        if call is not None:
            self._begin(call[0])
            self._argue(call[1])
            self._text = rest
            self._end_call()
        else:
            self._show(self._opening or self._text[:1])
            self._text = self._text if self._opening else self._text[1:]
            self._bare = False
            self._read = self._read_content
        return True

    def _begin(self, name: str) -> None:
        call = {"id": "".join(secrets.choice(ID_LETTERS) for _ in range(9)), "type": "function"}
        self._changes.append({"index": len(self.calls), **call, "function": {"name": name, "arguments": ""}})
        self.calls.append({**call, "function": {"name": name, "arguments": ""}})
        self._depth = 0

    def _argue(self, piece: str) -> None:
        """Add a piece of the last call's arguments."""
        self.calls[-1]["function"]["arguments"] += piece
        last = self._changes[-1] if self._changes else None
        if last is not None and last["index"] == len(self.calls) - 1:
            last["function"]["arguments"] += piece
        else:
            self._changes.append({"index": len(self.calls) - 1, "function": {"arguments": piece}})

    def _read_arguments(self, end: bool) -> bool:
        """Pass on the arguments up to the end of their object."""
        for place, character in enumerate(self._text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._text[: place + 1])
                    self._text = self._text[place + 1 :]
                    self._read = self._read_end
                    return True
        if self._text:
            self._argue(self._text)
            self._text = ""
        return False

    def _read_end(self, end: bool) -> bool:
        """Drop further keys, the closing braces and the tag of a call."""
        rest = self._text[MORE_KEYS.match(self._text).end() :]  # type: ignore[union-attr]
        if not end and PART_OF_KEY.match(rest):
            return False
        rest = rest.lstrip("} \n\r\t")
        if not end and len(rest) < len(self._closing) and self._closing.startswith(rest):
            return False
        if not rest and not end:
            return False
        self._text = rest.removeprefix(self._closing)
        self._end_call()
        return True

    def _end_call(self) -> None:
        self._bare = True
        self._read = self._read_content

    def _parsed(self, body: str) -> tuple[str, str] | None:
        """(name, arguments) of a call as JSON; None if it is none."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return None
        # Other JSON may have a list or an object here, which are unhashable.
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or name not in self._names or name in self._strict:
            return None
        arguments = given.get("arguments", given.get("parameters", {}))
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments)


def _may_be_call(text: str) -> bool:
    """Whether a text may be the beginning of a call: an object whose first key is one of a call's."""
    text = text.lstrip()
    inside = text.removeprefix("{")
    inside = inside.removeprefix("{").lstrip()
    if text[:1] not in ("", "{") or inside[:1] not in ("", '"'):
        return False
    key, closed, _ = inside[1:].partition('"')
    return key in KEYS if closed else any(known.startswith(key) for known in KEYS)

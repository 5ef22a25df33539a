"""Chat templates: a conversation -> the prompt that a model was trained on.

A template is a Jinja program inside a model's file, so it is rendered in Jinja's immutable sandbox, which gives it no
Python internals, and with two limits of its own: ``SECONDS`` for a rendering, and ``LARGEST`` characters and items
that it builds in total, finished text included. Both are checked at every iteration, call and concatenation. An
operation that multiplies the size of what it is given ("x" * n, ``join``, ``center``) is refused before it begins.
Not checked is the time of a single operation on values that already exist, such as a comparison.

The functions and variables are those that transformers offers: ``raise_exception``, ``strftime_now``, ``tojson``
without HTML escapes, ``{% generation %}``, ``{% break %}`` and ``{% continue %}``; ``messages``, ``tools``,
``documents``, ``add_generation_prompt``, the special tokens, and what the caller adds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from ..core import SettingsError

#: Limits of one rendering, and of a template's source in characters.
SECONDS = 10
LARGEST = 1 << 26
LONGEST_TEMPLATE = 1_000_000
#: The largest number that ``*`` and ``**`` may give, in bits.
MOST_BITS = 4096
#: Names under which a message may hold the model's reasoning. Templates read different ones.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Methods of strings, and filters, that make text or lists, at most as large as the product of two operands.
MAKING = frozenset(
    (
        *(
            "batch",
            "capitalize",
            "center",
            "e",
            "escape",
            "expandtabs",
            "forceescape",
            "format",
            "format_map",
        ),
        *(
            "indent",
            "join",
            "ljust",
            "lower",
            "pprint",
            "replace",
            "rjust",
            "round",
            "safe",
            "slice",
            "string",
        ),
        *("striptags", "title", "tojson", "translate", "trim", "truncate", "upper", "urlencode", "urlize"),
        *("wordwrap", "xmlattr", "zfill"),
    )
)
#: The widths in a format: "%100s", "{:>100}".
WIDTHS = re.compile(r"%[-+ #0]*(\d+)|\{[^{}]*?(\d+)[^{}]*\}")
#: Marks the end of a message that the model continues. The space reveals whether the template strips messages.
OPEN_END = "[open end of the last message] "


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The prompt of a conversation.

    Args:
        template: the Jinja source.
        messages: the conversation.
        add_generation_prompt: whether the prompt ends with the beginning of an answer.
        continue_final_message: whether the prompt ends inside the last message, which the model continues.
        variables: further variables: ``tools``, ``documents``, special tokens, and the template's own.

    Raises:
        SettingsError: there is no message, or the last one cannot be continued.
        Exception: any other, raised by the template or by Jinja.
    """
    if not messages:
        raise SettingsError("a chat needs at least one message, got none")
    # The template sees JSON types only, in copies, because it could call methods of other objects.
    given = json.loads(json.dumps([_named(message) for message in messages], default=_placeholder))
    variables = json.loads(json.dumps(variables, default=_placeholder))
    if continue_final_message:
        if add_generation_prompt:
            raise SettingsError("continue_final_message and add_generation_prompt exclude each other")
        _leave_open(given[-1])
    spent = _spent.set(_Spent())
    try:
        text = _compiled(template).render(
            {"tools": None, "documents": None}
            | variables
            | {"messages": given, "add_generation_prompt": add_generation_prompt}
        )
    finally:
        _spent.reset(spent)
    if not continue_final_message:
        return text
    end = text.rfind(OPEN_END.strip())
    if end < 0:
        raise SettingsError("continue_final_message needs a template that repeats the whole last message")
    return text[:end] if text.startswith(OPEN_END, end) else text[:end].rstrip()


def choose_template(templates: str | Mapping[str, str] | None, name: str | None, tools: Any) -> str:
    """One of a model's templates: by its name, else "tool_use" if there are tools, else "default".

    Args:
        templates: a template, name -> template, or None.
        name: a template's name, or a template; None to choose.
        tools: the tools, or None.

    Raises:
        SettingsError: there is none.
    """
    named = templates if isinstance(templates, Mapping) else {}
    if name is not None:
        return named.get(name, name)
    if isinstance(templates, str):
        return templates
    chosen = named.get("tool_use" if tools is not None and "tool_use" in named else "default")
    if chosen is None:
        names = ", ".join(sorted(named))
        raise SettingsError(
            f"a chat needs a chat template, got {f'only {names}; name one' if names else 'none'}"
        )
    return chosen


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without missing values, and with its reasoning under the names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    for name in REASONING:
        if name in present:
            return {"thinking": present[name], **present, "reasoning_content": present[name]}
    return present


def _placeholder(value: Any) -> Any:
    """What a template sees of an object that is not JSON, such as an image."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _leave_open(message: dict[str, Any]) -> None:
    """Mark the end of a message's text, or of its last part with text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [message | {"text": content}]
    part = next((part for part in reversed(parts) if isinstance(part.get("text"), str)), None)
    if part is None:
        raise SettingsError("continue_final_message needs a last message with text")
    part["text"] += OPEN_END
    if not isinstance(content, list):
        message["content"] = part["text"]


class _Spent:
    """What a rendering has used: time since it began, and characters and items built."""

    def __init__(self) -> None:
        self.end = monotonic() + SECONDS
        self.left = LARGEST

    def add(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise jinja2.TemplateRuntimeError(
                f"it must build at most {LARGEST:,} characters and list items in total"
            )
        if monotonic() > self.end:
            raise jinja2.TemplateRuntimeError(f"it must take at most {SECONDS} seconds")


_spent: ContextVar[_Spent] = ContextVar("_spent")


def _spend(amount: int = 1) -> None:
    _spent.get().add(amount)


def _measured(value: Any) -> Any:
    """The value, once its text is known to be short enough: a list that contains another one twice may be huge."""
    if isinstance(value, str):
        _spend(len(value))
        return value
    _spend()
    if isinstance(value, Namespace):
        _measured(value._Namespace__attrs)
    elif isinstance(value, Mapping):
        _measured([*value.keys(), *value.values()])
    elif isinstance(value, Collection):
        for item in value:
            _measured(item)
    return value


def _size(operand: Any) -> int:
    if isinstance(operand, int):
        return abs(operand)
    return len(operand) if isinstance(operand, Sized) else 1


def _spend_on(making: str, operands: Sequence[Any]) -> None:
    """Account for the result of an operation in ``MAKING``, or of an operator, before it is made."""
    text, *others = [str(each) if isinstance(each, Markup) else each for each in operands]
    if making == "replace" and all(isinstance(each, str) for each in (text, *others[:2])):
        _spend(len(text) + text.count(others[0]) * len(others[1]))
        return
    for operand in operands:
        _measured(operand)
    if making in ("%", "format", "format_map"):
        _spend(sum(int(width[:12]) for pair in WIDTHS.findall(str(text)) for width in pair if width))
    *_, second, largest = sorted([1, 1, *map(_size, operands)])
    _spend(second * largest)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its result accounted for."""
    context = hasattr(function, "jinja_pass_arg")  # then the first argument is Jinja's own

    @wraps(function)
    def bounded(*operands: Any, **named: Any) -> Any:
        _spend_on(name, [*operands[context:], *named.values()])
        return function(*operands, **named)

    return bounded


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the limits above."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_measured,
        )
        self.filters["tojson"] = _to_json
        for name in MAKING & self.filters.keys():
            self.filters[name] = _bounded(name, self.filters[name])
        self.filters |= {EACH: _each, JOINED: _joined}
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _dict,
            "namespace": _Names,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *where: Any, **options: Any) -> str:
        return super()._generate(_Accounting().visit(source), *where, **options)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a block, a macro or the template."""
        return _joined(pieces)

    def call(self, context: Any, function: Any, /, *given: Any, **named: Any) -> Any:
        """Call a macro, a function or a method."""
        _spend()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps ``format``
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)) and name in MAKING:
            _spend_on(name, [owner, *given, *named.values()])
        result = super().call(context, function, *given, **named)
        if isinstance(result, list):  # split; an item takes as much memory as some fifty characters
            _spend(50 * len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be larger than its operands."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise jinja2.TemplateRuntimeError(f"its numbers must have at most {MOST_BITS:,} bits")
        elif not numbers and operator == "+":
            _spend(_size(left) + _size(right))
        elif not numbers and operator in ("*", "%"):
            _spend_on(operator, [left, *(right if isinstance(right, tuple) else [right])])
        return super().call_binop(context, operator, left, right)


#: Filters that no template can name.
EACH, JOINED = " each", " joined"


class _Accounting(NodeTransformer):
    """Passes what a loop iterates through ``_each``, and the operands of ``~`` to ``_joined``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, EACH, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(operands, JOINED, [], [], None, None, lineno=node.lineno)


def _each(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


def _joined(pieces: Iterable[Any]) -> str:
    return "".join(str(_measured(piece)) for piece in pieces)


class _Names(Namespace):
    """A namespace without names that Python reads itself."""

    def __init__(*given: Any, **named: Any) -> None:  # a template may call a variable ``self``
        self, *rest = given
        Namespace.__init__(self)
        for name, value in dict(*rest, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"names of a namespace must not begin with _, got {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks what the model writes, and adds no text."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the tag by its contents, in a scope of their own."""
        line = next(parser.stream).lineno
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def _dict(*given: Any, **named: Any) -> dict[Any, Any]:
    return dict(*given, **named)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(_measured(value), **{"ensure_ascii": False} | options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > LONGEST_TEMPLATE:
        raise SettingsError(
            f"a chat template must have at most {LONGEST_TEMPLATE:,} characters, got {len(template):,}"
        )
    return _Environment().from_string(template)

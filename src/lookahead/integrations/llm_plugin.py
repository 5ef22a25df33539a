"""A plug-in for the command-line tool ``llm``: the default model, or another one by an option or an alias::

    llm -m lookahead "..."
    llm -m lookahead -o path_or_id PATH_OR_HUB_ID "..."
    llm aliases set NAME lookahead/PATH_OR_HUB_ID; llm -m NAME "..."

llm finds it through its entry point and imports it at every start, so torch is not imported before the first prompt.
Prompts and conversations come from llm; options and their help come from ``lookahead.options``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field, create_model

from ..core import SettingsError
from ..option import offered
from ..options import DraftOptions, LoadOptions, Options
from ..text.prompts import chat_prompt, encode

if TYPE_CHECKING:
    from ..llm import LLM

#: Some of llm's functions have no type annotations.
_untyped: Any = llm
#: The default model. An alias for another model is this name, a slash, and a path or a hub id.
NAME = "lookahead"
#: Options that have another name in llm.
RENAMED = {"max_new_tokens": "max_tokens"}
#: Loading options. If one changes, the model is loaded again.
LOADING = ("path_or_id", "dtype", "weights", "device", "threads", "engine")
#: Answers in a conversation may be longer than the library's default; the same limit as in ``lookahead chat``.
LONGEST = 512


def _options() -> Any:
    """The library's options as an llm options class."""
    model_fields: dict[str, Any] = {}
    declared = offered(Options) | offered(DraftOptions, ("drafter",)) | offered(LoadOptions, LOADING)
    for name, (kind, field) in declared.items():
        if kind == list[str]:
            kind = str | kind  # llm's -o passes one string
        default = LONGEST if name == "max_new_tokens" else field.default
        model_fields[RENAMED.get(name, name)] = (
            kind if default is not None else kind | None,
            Field(default, description=field.metadata["help"]),
        )
    return create_model("Options", __base__=llm.Options, **model_fields)


class LookaheadModel(llm.Model):
    """One llm model. It is loaded by its first prompt, and keeps the keys and values of its last sequence.

    Args:
        model_id: ``NAME``, or ``NAME/PATH_OR_HUB_ID``.
    """

    can_stream = True
    supports_schema = supports_tools = True
    Options = _options()

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._loaded: tuple[dict[str, Any], LLM] | None = None

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: Any
    ) -> Iterator[str]:
        """Yield the answer, in pieces if it is to be streamed.

        Raises:
            LookaheadError: the model, an option or the prompt is not valid, or decoding failed.
        """
        given = prompt.options.model_dump(exclude_unset=True, exclude_none=True)
        model = self._load({name: given.pop(name) for name in LOADING if name in given})
        for ours, theirs in RENAMED.items():
            if theirs in given:
                given[ours] = given.pop(theirs)
        options: dict[str, Any] = {"max_new_tokens": LONGEST} | given
        if prompt.schema is not None:
            options["logits_processor"] = _grammar(model, prompt.schema)
        tools = [
            _described(tool) for tool in prompt.tools if isinstance(tool, llm.Tool)
        ]  # llm refuses others
        given_prompt, reader = _with_tools(messages_of(prompt), tools, model)
        with model.stream(given_prompt, **options) as pieces:
            shown = (reader.push(piece)[0] for piece in pieces) if reader is not None else pieces
            if stream:
                yield from filter(None, shown)
            else:
                yield "".join(shown)
        if reader is not None:
            yield reader.push("", end=True)[0]
            for call in reader.calls:
                response.add_tool_call(_call(call))
        result = pieces.result
        if result is not None:
            response.set_usage(input=len(result.prompt_tokens), output=len(result.tokens))
            steps = {"steps": result.stats.steps, "rows": result.stats.rows}
            response.response_json = {"finish_reason": result.finish_reason, "seed": result.seed, **steps}

    def _load(self, how: dict[str, Any]) -> LLM:
        if self._loaded is None or self._loaded[0] != how:
            from ..hf.load import quiet
            from ..loading import load_with

            self._loaded = None  # two models may not fit
            path = self.model_id.partition("/")[2] or None
            quiet()
            self._loaded = how, load_with(LoadOptions(**{"path_or_id": path, "prefix_cache": 1} | how))
        return self._loaded[1]


@contextmanager
def _server(needed_by: str) -> Iterator[None]:
    """A context for imports from the server, which has grammars and tool calls.

    Raises:
        SettingsError: what they need is not installed.
    """
    try:
        yield
    except ImportError:
        raise SettingsError(
            f"{needed_by} needs the extras serve and grammar; install them with pip install '.[serve,grammar]' in "
            "the project's folder"
        ) from None


def _grammar(model: LLM, schema: Any) -> Any:
    with _server("a schema"):
        from ..server.grammar import Constraint, Grammars
    return Grammars(model).process(Constraint("json", schema, "schema"))


def _described(tool: llm.Tool) -> dict[str, Any]:
    """A tool in the format of chat templates."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]], model: LLM) -> tuple[Any, Any]:
    """(a prompt, what separates tool calls from the answer; None without tools), as in the server.

    Raises:
        SettingsError: tools need the server's extras, and a chat template.
    """
    if not tools and not any(message["role"] == "tool" for message in messages):
        return chat_prompt(messages, model.tokenizer), None
    with _server("a tool"):
        from ..server.tools import CallReader, with_tools
    template = str(getattr(model.tokenizer, "chat_template", None) or "")
    chat = with_tools(messages, tools, template)
    variables = {"tools": tools} if tools and "tools" in template else {}
    ids = encode(chat, model.tokenizer, model.tokenizer_error, model.vocabulary, model.context, variables)
    return ids, CallReader({tool["function"]["name"] for tool in tools}, first_only=False)


def _call(call: dict[str, Any]) -> llm.ToolCall:
    """A call for llm, which needs an object of arguments."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # the answer ended within them
        arguments = None
    if not isinstance(arguments, dict):
        raise SettingsError(
            f"the arguments of a call of {function['name']} must be an object, got "
            f"{function['arguments']!r:.80}; ask again, or give a larger max_tokens"
        )
    return llm.ToolCall(name=function["name"], arguments=arguments, tool_call_id=call["id"])


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The conversation up to a prompt of llm, as chat messages, without the reasoning of earlier answers.

    Raises:
        SettingsError: it has parts other than text, tool calls and their results.
    """
    messages = list[dict[str, Any]]()
    for message in prompt.messages:
        text = ""
        calls = []
        for part in message.parts:
            match type(part).__name__:
                case "TextPart":
                    text += part.text
                case "ToolCallPart":
                    function = {"name": part.name, "arguments": part.arguments}
                    calls.append({"type": "function", "id": part.tool_call_id or "", "function": function})
                case "ToolResultPart":
                    result = {"content": part.output, "tool_call_id": part.tool_call_id or ""}
                    messages.append({"role": "tool", "name": part.name, **result})
                case "ReasoningPart":
                    pass
                case other:
                    raise SettingsError(
                        f"a conversation with {NAME} must be text and tool calls, got {other}; start a new one"
                    )
        if message.role != "tool":
            more = {"tool_calls": calls} if calls else {}
            messages.append({"role": message.role, "content": text} | more)
    return messages


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the default model, the models in llm's aliases, and llm's own default if it is one of ours.

    llm asks its plug-ins for a list of models and looks names up in it. No hook receives the name, so a model must be
    known beforehand.
    """
    for model_id in dict.fromkeys([NAME, *filter(is_ours, [*_aliased(), _untyped.get_default_model()])]):
        register(LookaheadModel(model_id))


def is_ours(model_id: Any) -> bool:
    """Whether a model's name is NAME/PATH_OR_HUB_ID."""
    return isinstance(model_id, str) and model_id.startswith(f"{NAME}/") and model_id != f"{NAME}/"


def _aliased() -> list[Any]:
    """The models named by ``llm aliases set``."""
    file = _untyped.user_dir() / "aliases.json"
    return list(json.loads(file.read_text(encoding="utf-8")).values()) if file.exists() else []

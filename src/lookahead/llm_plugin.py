"""A plug-in for the command line tool ``llm``: ``llm -m lookahead "..."``, ``llm -m lookahead/PATH_OR_NAME "..."``.

llm finds it by its entry point and imports it at every start, so it loads no torch before a prompt comes. What a
prompt and a conversation are is llm's; options and their help are the library's (``engine.options``).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field, create_model

from .core import SettingsError
from .engine.fields import offered_types
from .engine.options import DraftOptions, LoadOptions, Options

if TYPE_CHECKING:
    from types import FrameType

    from .engine import LLM

#: Some of llm's functions have no types.
_untyped: Any = llm
#: The default model; others are this, a slash, and a path or a hub id.
NAME = "lookahead"
#: What llm's users know by another name.
RENAMED = {"max_new_tokens": "max_tokens"}
#: Options of loading. Another value loads the model again.
LOADING = ("dtype", "weights", "device", "threads", "engine")
#: An answer in a conversation is longer than the library's default text; ``lookahead chat`` has the same limit.
LONGEST = 512


def _options() -> Any:
    """A class of options as llm wants it, from the library's."""
    model_fields: dict[str, Any] = {}
    for options, only in ((Options, ()), (DraftOptions, ("drafter",)), (LoadOptions, LOADING)):
        types = offered_types(options)
        for field in fields(options):
            if field.name not in types or (only and field.name not in only):
                continue
            kind = types[field.name]
            if kind == list[str]:
                kind = str | kind  # -o gives a single string
            default = LONGEST if field.name == "max_new_tokens" else field.default
            model_fields[RENAMED.get(field.name, field.name)] = (
                kind if default is not None else kind | None,
                Field(default, description=field.metadata["help"]),
            )
    return create_model("Options", __base__=llm.Options, **model_fields)


class LookaheadModel(llm.Model):
    """One model of llm. It is loaded by its first prompt and keeps its last text's keys and values.

    Args:
        model_id: ``NAME``, or ``NAME/PATH_OR_NAME``.
    """

    can_stream = True
    Options = _options()

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._loaded: tuple[dict[str, Any], LLM] | None = None

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: Any
    ) -> Iterator[str]:
        """Yield the answer, in pieces if it is to be streamed.

        Raises:
            LookaheadError: the model, an option or the prompt cannot be honoured, or decoding failed.
        """
        given = prompt.options.model_dump(exclude_unset=True, exclude_none=True)
        model = self._load({name: given.pop(name) for name in LOADING if name in given})
        for ours, theirs in RENAMED.items():
            if theirs in given:
                given[ours] = given.pop(theirs)
        told = {"max_new_tokens": LONGEST} | given
        templated = bool(getattr(model.tokenizer, "chat_template", None))
        with model.stream(prompt_of(messages_of(prompt), templated), **told) as pieces:
            if stream:
                yield from pieces
            else:
                yield "".join(pieces)
        result = pieces.result
        if result is not None:
            response.set_usage(input=len(result.prompt_tokens), output=len(result.tokens))
            steps = {"steps": result.stats.steps, "rows": result.stats.rows}
            response.response_json = {"finish_reason": result.finish_reason, "seed": result.seed, **steps}

    def _load(self, how: dict[str, Any]) -> LLM:
        if self._loaded is None or self._loaded[0] != how:
            from .cli.options import load_model

            self._loaded = None  # two models may not fit
            path = self.model_id.partition("/")[2] or None
            self._loaded = how, load_model(LoadOptions(path, prefix_cache=1, **how))
        return self._loaded[1]


def messages_of(prompt: Any) -> list[dict[str, str]]:
    """The conversation up to a prompt of llm, as chat messages. What a model has thought is not said again.

    Raises:
        SettingsError: it holds something other than text.
    """
    messages = []
    for message in prompt.messages:
        kinds = {type(part).__name__ for part in message.parts} - {"TextPart", "ReasoningPart"}
        if kinds:
            raise SettingsError(
                f"a conversation with {NAME} must hold text only, got {sorted(kinds)[0]}; begin a new one"
            )
        text = "".join(part.text for part in message.parts if type(part).__name__ == "TextPart")
        messages.append({"role": message.role, "content": text})
    return messages


def prompt_of(messages: list[dict[str, str]], templated: bool) -> Any:
    """What the library takes: the messages, or one text to continue for a model without a chat template."""
    if templated:
        return messages
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n") for message in messages)


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the default model, those that llm's aliases name, and the one that llm looks for at this moment."""
    for model_id in dict.fromkeys([NAME, *_aliased(), _looked_up()]):
        if model_id is not None:
            register(LookaheadModel(model_id))


def is_ours(model_id: Any) -> bool:
    """Whether a name is NAME/PATH_OR_NAME."""
    return isinstance(model_id, str) and model_id.startswith(f"{NAME}/") and model_id != f"{NAME}/"


def _aliased() -> list[str]:
    """Models of ours that ``llm aliases set`` has named."""
    file = _untyped.user_dir() / "aliases.json"
    aliases = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return [model_id for model_id in aliases.values() if is_ours(model_id)]


def _looked_up() -> str | None:
    """The name that ``llm.get_model`` has been called with, if it is one of ours.

    llm asks its plug-ins for a list and looks a name up in it: no hook is told the name. So it is read from the frame
    of the call, which all of llm's commands and its Python API make. Where another version of llm has no such frame,
    the models that aliases name remain.
    """
    codes = [llm.get_model.__code__, llm.get_async_model.__code__]
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_locals.get("name") or _untyped.get_default_model()
    return name if is_ours(name) else None

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
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field, create_model

from ..core import SettingsError
from ..option import offered
from ..options import DraftOptions, LoadOptions, Options
from ..text.prompts import chat_prompt

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
    supports_schema = True
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
        with model.stream(chat_prompt(messages_of(prompt), model.tokenizer), **options) as pieces:
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
            from ..hf.load import quiet
            from ..loading import load_with

            self._loaded = None  # two models may not fit
            path = self.model_id.partition("/")[2] or None
            quiet()
            self._loaded = how, load_with(LoadOptions(**{"path_or_id": path, "prefix_cache": 1} | how))
        return self._loaded[1]


def _grammar(model: LLM, schema: Any) -> Any:
    try:
        from ..server.grammar import Constraint, Grammars
    except ImportError:
        raise SettingsError(
            "a schema needs the extras serve and grammar; install them with pip install '.[serve,grammar]' in the "
            "project's folder"
        ) from None
    return Grammars(model).process(Constraint("json", schema, "schema"))


def messages_of(prompt: Any) -> list[dict[str, str]]:
    """The conversation up to a prompt of llm, as chat messages, without the reasoning of earlier answers.

    Raises:
        SettingsError: it has parts that are not text.
    """
    messages = []
    for message in prompt.messages:
        kinds = {type(part).__name__ for part in message.parts} - {"TextPart", "ReasoningPart"}
        if kinds:
            raise SettingsError(
                f"a conversation with {NAME} must be text only, got {sorted(kinds)[0]}; start a new one"
            )
        text = "".join(part.text for part in message.parts if type(part).__name__ == "TextPart")
        messages.append({"role": message.role, "content": text})
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

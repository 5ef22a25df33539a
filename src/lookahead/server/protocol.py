"""Request fields: OpenAI's that are supported or have no effect here, some of vLLM's, and this library's own.

Any other field of a request is rejected by name, unless it is null. Unknown keys within messages, tools and calls are
ignored, because clients send back what they received from other servers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..core.errors import meant
from ..option import offered
from ..options import DraftOptions

#: Largest depth of a schema, of the arguments of a call, and of other free-form values.
DEEPEST = 64
#: Limits of stop strings, which are searched for at every token.
MOST_STOPS = 16
LONGEST_STOP = 256
#: Largest number of parts of text in the messages of a request.
MOST_PARTS = 8192


def is_shallow(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether lists and objects are nested at most this deeply, so that recursive code can handle them."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(deepest + 1):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return True
    return False


def _shallow(value: Any) -> Any:
    if not is_shallow(value):
        raise PydanticCustomError("too_deep", f"must be nested at most {DEEPEST} levels deep")
    return value


def _at_most(most: int) -> BeforeValidator:
    """Checks the length of an object or a list before its items."""

    def check(value: Any) -> Any:
        if isinstance(value, (dict, list)) and len(value) > most:
            raise PydanticCustomError("too_long", f"must have at most {most} items, got {len(value)}")
        return value

    return BeforeValidator(check)


def _kind_of_prompt(value: Any) -> str:
    """The branch of ``Prompt`` for a value, so that only one is validated and reports its error."""
    if not isinstance(value, list):
        return "str"
    first = value[0] if value else 0
    return "list[str]" if isinstance(first, str) else "list[list]" if isinstance(first, list) else "list[int]"


def _text_or_list(value: Any) -> str:
    return "list[]" if isinstance(value, list) else "str"


Item = TypeVar("Item")
#: A list that is rejected at its first wrong item, because one body may have a million of them.
Items = Annotated[list[Item], Field(fail_fast=True)]
TokenIds = Annotated[Items[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[Items[str], _at_most(4096), Tag("list[str]")]
    | Annotated[Items[TokenIds], _at_most(4096), Tag("list[list]")],
    Discriminator(_kind_of_prompt),
]
#: What clients note about a request.
Metadata = Annotated[dict[str, str], _at_most(16)]
#: A JSON object of any form.
Free = Annotated[dict[str, Any], AfterValidator(_shallow)]
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Annotated[
    Annotated[Stop, Tag("str")] | Annotated[Items[Stop], Field(max_length=MOST_STOPS), Tag("list[]")],
    Discriminator(_text_or_list),
]


#: Names in other libraries and endpoints -> the equivalent fields here; the first that the endpoint has is suggested.
OTHER_NAMES = {
    "max_new_tokens": ("max_tokens",),
    "max_length": ("max_tokens",),
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "num_return_sequences": ("n",),
    "stop_token": ("stop_token_ids",),
    "min_new_tokens": ("min_tokens",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "repeat_penalty": ("repetition_penalty",),
    "do_sample": ("temperature",),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "json_schema": ("response_format",),
    "grammar": ("structured_outputs",),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "input": ("messages", "prompt"),
    "inputs": ("messages", "prompt"),
    "prompt": ("messages",),
    "messages": ("prompt",),
    "drafter": ("lookahead",),
    "method": ("lookahead",),
    "trace": ("lookahead",),
}


def suggestion(model: type[BaseModel], path: list[str]) -> str | None:
    """The field probably meant by an unknown field of a request.

    Args:
        model: the request.
        path: the names of the fields leading to the unknown one, which is the last.
    """
    *outer, name = path
    for each in outer:
        inner = getattr(model.model_fields.get(each), "annotation", None)
        kinds = (inner, *get_args(inner))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return None
        model = found[0]
    return meant(name, list(model.model_fields), OTHER_NAMES)


class Lenient(BaseModel):
    """Ignores unknown fields; rejects NaN and infinities."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())


class Strict(Lenient):
    """Rejects unknown fields, too. A field that is null is absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """The fields that are not null. Rejects the first unknown one, before any is validated."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if value is not None and name not in known:
                raise PydanticCustomError("unknown_field", "unknown field", {"name": name})
        return {name: value for name, value in given.items() if value is not None}


#: The settings of ``DraftOptions`` that a request may set.
DRAFTING = (
    *("drafter", "window_size", "ngram_size", "guess_set_size", "pool_from_prompt", "pool_from_output"),
    *("max_pool_keys", "max_jacobi_iterations"),
)
_declared: dict[str, Any] = {
    name: (kind | None, Field(None, description=field.metadata["help"]))
    for name, (kind, field) in offered(DraftOptions, DRAFTING).items()
}


class LookaheadFields(create_model("DraftFields", __base__=Strict, **_declared)):  # type: ignore[misc]
    """How to draft for this request. It does not affect the completion."""

    stats: bool = Field(False, description="Add drafting statistics to each choice.")
    trace: bool = Field(False, description="Add the token tree of each step to the chunks; needs stream.")


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the token counts in a final chunk without choices.")
    include_obfuscation: bool = Field(False, description="Accepted; has no effect.")


class TextPart(Lenient):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[TextPart], Tag("list[]")],
    Discriminator(_text_or_list),
]


def plain(content: Content | None) -> str:
    """A message's content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class Prediction(Strict):
    """Text that the completion is likely to repeat."""

    type: Literal["content"]
    content: Content


class JsonSchema(Lenient):
    """A JSON schema for the completion, which always follows it exactly, with or without ``strict``."""

    name: str = "schema"
    schema_: Free = Field({}, alias="schema")


class ResponseFormat(Strict):
    """Whether the completion is free text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    #: A schema for json_object, where llama.cpp's clients give it.
    schema_: Free | None = Field(None, alias="schema")


class StructuredOutputs(Strict):
    """What the completion has to match; exactly one field, named as in vLLM."""

    json_: str | Free | None = Field(None, alias="json", description="A JSON schema.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression.")
    choice: Annotated[Items[str], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="One of these strings."
    )
    grammar: str | None = Field(None, description="A grammar in Lark's format, as llguidance reads it.")


class Function(Lenient):
    """What a tool does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[Free, BeforeValidator(lambda given: {} if given is None else given)] = {}
    strict: bool | None = None


class Tool(Lenient):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Lenient):
    """A call made by an earlier completion."""

    name: str
    arguments: str | Free = ""


class ToolCall(Lenient):
    """A call with its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionName(Lenient):
    """The name of a function."""

    name: str


class NamedTool(Lenient):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Lenient):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedToolChoice(Lenient):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict):
        return "literal[]"
    return AllowedToolChoice.__name__ if value.get("type") == "allowed_tools" else NamedTool.__name__


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("literal[]")]
    | Annotated[NamedTool, Tag(NamedTool.__name__)]
    | Annotated[AllowedToolChoice, Tag(AllowedToolChoice.__name__)],
    Discriminator(_kind_of_choice),
]


class Message(Lenient):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


def _few_parts(messages: Any) -> Any:
    """Checks the number of parts of all messages before any is validated."""
    given = messages if isinstance(messages, list) else []
    contents = (message.get("content") for message in given if isinstance(message, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MOST_PARTS:
        raise PydanticCustomError("too_long", f"must have at most {MOST_PARTS} parts of text, got {parts}")
    return messages


class Generating(Strict):
    """The fields of both endpoints."""

    model: str | None = Field(None, description="The served model's name; optional.")
    max_tokens: int | None = Field(
        None, ge=-1, description="Maximum tokens of each completion; -1 for as many as fit."
    )
    min_tokens: int | None = Field(None, ge=0, description="End tokens are excluded before this many tokens.")
    n: int | None = Field(
        None, ge=1, description="Number of completions per prompt; completion i uses seed + i."
    )
    stream: bool | None = Field(None, description="Send text as server-sent events as tokens are accepted.")
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 for greedy decoding; the default is 1."
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Draw from the most likely tokens that together have probability p; 0 for greedy decoding.",
    )
    top_k: int | None = Field(None, ge=-1, description="Draw from the k most likely tokens; 0 or -1 for all.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Draw from tokens with at least this share of the best token's probability.",
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="Above 1 discourages repetition."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from the logits of tokens that occur in the completion."
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="Subtracted from a token's logit once per occurrence in the completion.",
    )
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], _at_most(1024)] | None = Field(
        None, description="Numbers added to logits, by token id."
    )
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 63,
        description="The same seed gives the same completion under any load (up to rounding outside the compiled CPU "
        "path).",
    )
    stop: Stops | None = Field(
        None,
        description=f"Stop before this string, or the first of several (at most {MOST_STOPS}, each of at most "
        f"{LONGEST_STOP} characters).",
    )
    stop_token_ids: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=1024)] | None = Field(
        None, description="Further tokens that end the completion."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the model's end tokens.")
    response_format: ResponseFormat | None = Field(
        None,
        description="text, json_object (with or without a schema), or json_schema with a schema; needs the extra "
        "[grammar].",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the completion must match: json (a schema), json_object, regex, choice or grammar; needs "
        "the extra [grammar].",
    )
    prediction: Prediction | None = Field(
        None, description="Text that the completion is likely to repeat in large part; used for drafting."
    )
    lookahead: LookaheadFields | None = Field(
        None, description="How to draft, and what the response reports about it."
    )
    #: Fields that clients send by default and that do not affect the text here.
    user: str | None = Field(None, description="Accepted; has no effect.")
    metadata: Metadata | None = Field(None, description="Accepted; has no effect.")
    store: bool | None = Field(None, description="Accepted; has no effect, because nothing is stored here.")
    service_tier: str | None = Field(
        None, description="Accepted; has no effect, because there is only one tier."
    )
    safety_identifier: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted; has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; has no effect.")

    @property
    def limit(self) -> int | None:
        """Maximum tokens of a completion; None for as many as fit."""
        return None if self.max_tokens is None or self.max_tokens < 0 else self.max_tokens


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: Prompt = Field(description="A string, token ids, or a list of either.")
    best_of: Literal[1] | None = Field(None, description="Only 1, the default; see n.")
    suffix: str | None = Field(
        None,
        description="Text after the completion, which then fills in the middle; for models with tokens for that.",
    )
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Add the log-probability of each token, and the k most likely tokens."
    )

    @property
    def prompts(self) -> list[Any]:
        """The prompts, as a list."""
        given = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else super().limit


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=4096), BeforeValidator(_few_parts)] = (
        Field(description="The conversation so far.")
    )
    max_completion_tokens: int | None = Field(
        None, ge=-1, description="The newer name of max_tokens, and counts if both are given."
    )
    logprobs: bool | None = Field(None, description="Add the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Add the k most likely tokens to each; needs logprobs."
    )
    tools: Items[Tool] | None = Field(None, max_length=128, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether the model calls a function, and which; required and strict calls need the extra "
        "[grammar].",
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Passed to the chat template; has no effect if the template does not use it."
    )
    parallel_tool_calls: bool | None = Field(None, description="false allows at most one call.")
    chat_template_kwargs: Free | None = Field(
        None, description="Further variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of the assistant's turn; the default is true.",
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message instead of answering it; needs add_generation_prompt false.",
    )
    modalities: Items[Literal["text"]] | None = Field(None, description="Only text.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted; has no effect.")

    @property
    def limit(self) -> int | None:
        newer = self.max_completion_tokens
        return super().limit if newer is None else None if newer < 0 else newer


class TokenizeRequest(Strict):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = Field(None, description="A string.")
    messages: Items[Message] | None = Field(None, description="Or a chat.")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=1 << 17)]

"""Request fields: the OpenAI fields supported here, those that are ignored, and this library's own.

Any other field is rejected by name.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from ..option import offered
from ..options import DraftOptions

Item = TypeVar("Item")
#: A list that is rejected at its first wrong item, because one body may have a million of them.
Items = Annotated[list[Item], Field(fail_fast=True)]
TokenIds = Annotated[Items[Annotated[int, Field(ge=0)]], Field(min_length=1)]


#: Names in other libraries and endpoints -> the equivalent fields here; the first that the endpoint has is suggested.
OTHER_NAMES = {
    "max_new_tokens": ("max_tokens",),
    "max_length": ("max_tokens",),
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "num_return_sequences": ("n",),
    "best_of": ("n",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "repeat_penalty": ("repetition_penalty",),
    "do_sample": ("temperature",),
    "guided_json": ("response_format",),
    "json_schema": ("response_format",),
    "grammar": ("response_format",),
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
    known = list(model.model_fields)
    meant = [other for other in OTHER_NAMES.get(name.lower(), ()) if other in known]
    return next(iter(meant or get_close_matches(name.lower(), known, n=1)), None)


class Strict(BaseModel):
    """Rejects unknown fields, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


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


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


def plain(content: Content | None) -> str:
    """A message's content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class Prediction(Strict):
    """Text that the completion is likely to repeat."""

    type: Literal["content"]
    content: Content


class JsonSchema(Strict):
    """A JSON schema for the completion, which always follows it exactly, with or without ``strict``."""

    name: str
    schema_: dict[str, Any] = Field({}, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """Whether the completion is free text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Strict):
    """What a tool does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """A call made by an earlier completion."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    #: Response fields that clients send back; always empty here.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class Generating(Strict):
    """The fields of both endpoints."""

    model: str | None = Field(None, description="The served model's name; optional.")
    max_tokens: int | None = Field(None, ge=1, description="Maximum tokens of each completion.")
    n: int | None = Field(
        None, ge=1, description="Number of completions per prompt; completion i uses seed + i."
    )
    stream: bool | None = Field(None, description="Send text as server-sent events as tokens are accepted.")
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 for greedy decoding; the default is 1."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Draw from the most likely tokens that together have probability p."
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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Numbers added to logits, by token id."
    )
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        lt=1 << 63,
        description="The same seed gives the same completion under any load (up to rounding outside the compiled CPU "
        "path).",
    )
    stop: str | Annotated[Items[str], Field(max_length=16)] | None = Field(
        None, description="Stop before this string, or the first of several."
    )
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with a schema; needs the extra [grammar]."
    )
    prediction: Prediction | None = Field(
        None, description="Text that the completion is likely to repeat in large part; used for drafting."
    )
    lookahead: LookaheadFields | None = Field(
        None, description="How to draft, and what the response reports about it."
    )
    #: Fields that clients send by default and that can be ignored here.
    user: str | None = Field(None, description="Accepted; has no effect.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Accepted; has no effect.")
    store: Literal[False] | None = Field(
        None, description="false is accepted; true is rejected, because nothing is stored here."
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="Accepted; has no effect, because there is only one tier."
    )


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[Items[str], Field(min_length=1)]
        | Annotated[Items[TokenIds], Field(min_length=1)]
    ) = Field(description="A string, token ids, or a list of either.")
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Add the log-probability of each token, and the k most likely tokens."
    )

    @property
    def prompts(self) -> list[Any]:
        """The prompts, as a list."""
        given = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=4096)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="Another name for max_tokens.")
    logprobs: bool | None = Field(None, description="Add the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Add the k most likely tokens to each; needs logprobs."
    )
    tools: Items[Tool] | None = Field(None, max_length=128, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="Whether the model calls a function; required and a named function need the extra [grammar].",
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Passed to the chat template; has no effect if the template does not use it."
    )
    parallel_tool_calls: bool | None = Field(None, description="false allows at most one call.")


class TokenizeRequest(Strict):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = Field(None, description="A string.")
    messages: Items[Message] | None = Field(None, description="Or a chat.")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=1 << 17)]

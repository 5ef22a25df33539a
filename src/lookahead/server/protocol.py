"""What requests may hold: OpenAI's fields that work here, and this library's. Anything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..drafters import METHODS

Text = Annotated[str, Field(max_length=1 << 22)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Strict(BaseModel):
    """No unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Drafting(Strict):
    """How to draft for this request. The text does not depend on it."""

    method: str | None = Field(None, description=f"One of {', '.join(METHODS)}.")
    window_size: int | None = Field(None, ge=0, description="W: columns of the window.")
    ngram_size: int | None = Field(None, ge=1, description="N: tokens of an n-gram.")
    guess_set_size: int | None = Field(None, ge=0, description="G: candidates per step.")
    stats: bool = Field(False, description="Statistics of drafting in each choice of the answer.")
    trace: bool = Field(False, description="The tree of each step in each chunk of a stream.")


class StreamOptions(Strict):
    """Of a stream."""

    include_usage: bool = Field(False, description="Token counts in a last chunk without choices.")


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


Content = Text | list[TextPart]


def plain(content: Content | None) -> str:
    """A message's content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class Prediction(Strict):
    """A text much of which is expected to be in the answer."""

    type: Literal["content"]
    content: Content


class JsonSchema(Strict):
    """What JSON must look like."""

    name: str
    schema_: dict[str, Any] = Field({}, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """Whether the answer is free text, JSON, or JSON of a schema."""

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
    """A call that an earlier answer made."""

    name: str
    arguments: str


class ToolCall(Strict):
    """The same with its id."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionName(Strict):
    """Which function."""

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
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    #: What clients send back of an answer, always empty here.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class Generating(Strict):
    """What both endpoints take."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of each text.")
    n: int | None = Field(None, ge=1, description="Texts for each prompt; text i has seed + i.")
    stream: bool | None = Field(None, description="Server-sent events as tokens are accepted.")
    stream_options: StreamOptions | None = Field(None, description="Of a stream.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; 1 without it.")
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the nucleus of mass p.")
    top_k: int | None = Field(None, ge=-1, description="Draw from the k likeliest tokens; 0 or -1 for all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Least share of the best one's probability.")
    repetition_penalty: float | None = Field(None, gt=0, le=100, description="Above 1 against repetition.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Off the logits of tokens emitted.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="The same for each time.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id -> what is added to its logit."
    )
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=1 << 63, description="Same seed, same text, whatever the load."
    )
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = Field(
        None, description="End before this text, or the first of several."
    )
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with a schema; needs the extra [grammar]."
    )
    prediction: Prediction | None = Field(
        None, description="A text much of which is expected to be in the answer: drafts come from it."
    )
    lookahead: Drafting | None = Field(None, description="How to draft, and what to tell of it.")
    user: str | None = Field(None, description="Taken, and of no effect.")


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    ) = Field(description="A text, token ids, or a list of either.")
    echo: bool | None = Field(None, description="The prompt before the text.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Log-probabilities, with the k best tokens.")


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] = Field(
        description="The chat so far."
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="With those of the k best; needs logprobs."
    )
    tools: list[Tool] | None = Field(None, max_length=128, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether it calls one; required and a named one need the extra [grammar]."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")


class TokenizeRequest(Strict):
    """POST /tokenize."""

    model: str | None = None
    prompt: Text | None = Field(None, description="A text.")
    messages: list[Message] | None = Field(None, description="Or a chat.")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 17)]

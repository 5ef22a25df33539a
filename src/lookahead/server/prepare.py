"""Turns a validated HTTP request into engine requests, one per completion, and the answer to fill."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch

from .. import __version__
from ..core import Drafter, Request, SettingsError
from ..core.verify import as_choose
from ..drafters import as_drafter
from ..limits import NO_LIMIT
from ..llm import LLM
from ..options import Options
from ..text.prompts import encode
from .grammar import Grammars
from .logprobs import LogProbs
from .protocol import ChatRequest, CompletionRequest, Generating, LookaheadFields, plain
from .responses import Answer, ChatAnswer, CompletionAnswer
from .settings import Settings
from .tools import demanded, messages_of, offered, with_tools

#: Maximum sequence length in tokens, if --max-model-len is not given and the model allows more.
DEFAULT_LENGTH = 4096


class Preparer:
    """Turns HTTP requests into engine requests.

    Args:
        llm: the model.
        settings: the server's settings.
        name: the model's name in the API.

    Attributes:
        context: maximum sequence length in tokens, prompt included. It is within the model's limit and below the
            length at which its rotary positions change, because sequences on either side cannot share a pass.

    Raises:
        SettingsError: --max-model-len exceeds the model's limit.
    """

    def __init__(self, llm: LLM, settings: Settings, name: str) -> None:
        self.llm = llm
        self.settings = settings
        self.name = name
        self._grammars = Grammars(llm)
        facts = llm.probe.facts
        asked = settings.max_model_len
        limits = [llm.context]
        if facts is not None and facts.rope_boundary < NO_LIMIT:
            limits.append(facts.rope_boundary - 1)
        #: Maximum sequence length that the model allows here; None for no limit.
        self.longest = min((limit for limit in limits if limit is not None), default=None)
        if asked is not None and self.longest is not None and asked > self.longest:
            raise SettingsError(
                f"--max-model-len must be at most {self.longest} with this model "
                f"(its context has {llm.context} tokens), got {asked}; use a smaller value or omit it"
            )
        asked = asked if asked is not None else DEFAULT_LENGTH
        self.context = asked if self.longest is None else min(asked, self.longest)

    def warm_up(self) -> None:
        """Compile, and measure the cost of steps, before the first request."""
        for temperature in (0.0, 1.0):
            self.llm.generate(
                [1, 2, 3, 1, 2, 3],
                max_new_tokens=4,
                temperature=temperature,
                drafter=self.settings.drafting(),
            )

    def encode(self, prompt: Any, param: str, variables: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt of any length.

        Args:
            prompt: a string, chat messages or token ids.
            param: the prompt's field in the request.
            variables: further variables of the chat template.

        Raises:
            SettingsError: the prompt is not valid.
        """
        llm = self.llm
        try:
            return encode(prompt, llm.tokenizer, llm.tokenizer_error, llm.vocabulary, None, variables)
        except SettingsError as error:
            raise SettingsError(f"{param}: {error}") from None

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        """The same token ids. Raises SettingsError unless they leave room for at least one more."""
        if len(ids) >= self.context:
            raisable = self.longest is None or self.context < self.longest
            most = "" if self.longest is None else f" (at most {self.longest} with this model)"
            more = f" or start the server with a larger --max-model-len{most}" if raisable else ""
            raise SettingsError(
                f"{param}: the prompt must be shorter than this server's limit of {self.context} tokens for prompt "
                f"and answer together, got {len(ids)}; shorten it{more}"
            )
        return ids

    def completion(self, body: CompletionRequest) -> Answer:
        """The answer of /v1/completions, with its requests.

        Raises:
            SettingsError: a field that is not supported here.
        """
        if body.echo and body.stream and body.logprobs is not None:
            raise SettingsError("echo: with logprobs it cannot be streamed; omit one of the three")
        self._check_choices(body, len(body.prompts))
        requests = self._requests(
            body,
            [self._fitting(self.encode(prompt, "prompt"), "prompt") for prompt in body.prompts],
            max_tokens=body.max_tokens or 16,
            logprobs=body.logprobs,
            echo=bool(body.echo),
            schema=_schema(body),
        )
        return CompletionAnswer(body, self.name, requests, self.llm.tokenizer, self._fingerprint())

    def chat(self, body: ChatRequest) -> Answer:
        """The answer of /v1/chat/completions, with its requests.

        Raises:
            SettingsError: a field that is not supported here.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise SettingsError("top_logprobs: needs logprobs")
        schema = _schema(body)
        call = demanded(body)
        if schema is not None and call is not None:
            raise SettingsError("tool_choice: a required tool and a response_format are mutually exclusive")
        self._check_choices(body, 1)
        limits = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise SettingsError("max_tokens: must equal max_completion_tokens if both are given")
        ids = self.chat_tokens(messages_of(body.messages), offered(body), body.reasoning_effort)
        requests = self._requests(
            body,
            [self._fitting(ids, "messages")],
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            schema=schema or call,
        )
        return ChatAnswer(body, self.name, requests, self.llm.tokenizer, self._fingerprint())

    def chat_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], effort: str | None = None
    ) -> list[int]:
        """The token ids of a chat, with the tools described in it.

        Args:
            messages: the conversation so far.
            tools: the tools that may be called.
            effort: ``reasoning_effort`` for the chat template; None for the template's own default.

        Raises:
            SettingsError: the template rejects the messages.
        """
        template = str(getattr(self.llm.tokenizer, "chat_template", None) or "")
        messages = with_tools(messages, tools, template)
        variables: dict[str, Any] = {}
        if tools and "tools" in template:
            variables["tools"] = tools
        if effort is not None and "reasoning_effort" in template:
            variables["reasoning_effort"] = effort
        return self.encode(messages, "messages", variables)

    def _fingerprint(self) -> str:
        """The server properties that a completion may depend on: version, dtype, device type."""
        device = str(self.llm.model.device).partition(":")[0]
        return f"lookahead-{__version__}-{self.llm.dtype}-{device}"

    def _check_choices(self, body: Generating, prompts: int) -> None:
        """Reject a request for too many completions, before its prompts are encoded."""
        choices = (body.n or 1) * prompts
        settings = self.settings
        most = min(settings.max_choices, settings.max_concurrent + settings.max_queue)
        if choices > most:
            raise SettingsError(f"n: a request may have at most {most} completions, got {choices}")

    def _requests(
        self,
        body: Generating,
        prompts: list[list[int]],
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        echo: bool = False,
        schema: tuple[dict[str, Any], str] | None = None,
    ) -> list[Request]:
        """``n`` requests per prompt.

        Args:
            body: the validated fields.
            prompts: token ids.
            max_tokens: maximum tokens of a completion; None for as many as fit.
            logprobs: number of most likely tokens to return with each log-probability; None for no log-probabilities.
            echo: whether to return log-probabilities of the prompts too.
            schema: the schema of the answer, and the field that requests it.

        Raises:
            SettingsError: a field that is not supported here.
        """
        seed = random.getrandbits(62) if body.seed is None else body.seed
        requests = []
        for index, ids in enumerate(ids for ids in prompts for _ in range(body.n or 1)):
            options = self._options(body, ids, max_tokens, schema)
            request = self.llm.prepare(ids, options, seed + index if options.sampled else None)
            if logprobs is not None:
                recorder = request.choose = LogProbs(as_choose(request.choose), logprobs)
                request.read_prompt = recorder.read_prompt if echo else None
            request.predicted = self._predicted(body, request.drafter)
            requests.append(request)
        return requests

    def _options(
        self,
        body: Generating,
        ids: list[int],
        max_tokens: int | None,
        schema: tuple[dict[str, Any], str] | None,
    ) -> Options:
        # Logits processors run in this order.
        temperature = 1.0 if body.temperature is None else body.temperature
        processors = [self._bias(body.logit_bias)] if body.logit_bias else []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(
                penalties(len(ids), body.presence_penalty or 0.0, body.frequency_penalty or 0.0)
            )
        if schema is not None:
            processors.append(self._grammars.json(*schema))
        room = self.context - len(ids)
        given: dict[str, Any] = {
            "max_new_tokens": min(max_tokens or room, room),
            "temperature": temperature,
            "stop": body.stop or None,
            "repetition_penalty": body.repetition_penalty,
            "drafter": self._drafting(body.lookahead),
            "logits_processor": processors or None,
        }
        # Greedy decoding needs none of these filters, because the most likely token passes them all.
        if temperature > 0:
            given |= {"top_p": body.top_p, "min_p": body.min_p or None}
            given["top_k"] = body.top_k if body.top_k and body.top_k > 0 else None
        return Options(**{name: value for name, value in given.items() if value is not None})

    def _bias(self, bias: dict[str, float]) -> Callable[[Any, Any], Any]:
        row = torch.zeros(self.llm.vocabulary)
        for token, value in bias.items():
            # int() raises an error for more than 4,300 digits.
            if not token.isdecimal() or len(token) > 18 or int(token) >= self.llm.vocabulary:
                raise SettingsError(
                    f"logit_bias: token ids must be 0 to {self.llm.vocabulary - 1}, got {token!r:.40}"
                )
            row[int(token)] = value
        row = row.to(self.llm.model.device)
        return lambda ids, scores: scores + row

    def _predicted(self, body: Generating, drafter: Drafter) -> list[int]:
        """The tokens of the prediction; [] without one."""
        if body.prediction is None:
            return []
        if not drafter.uses_prediction:
            raise SettingsError(
                f"prediction: the drafter {drafter} does not use it; omit it, or choose another drafter"
            )
        text = plain(body.prediction.content)
        if self.llm.tokenizer is None:
            raise SettingsError(f"prediction: needs a tokenizer, and {self.llm.tokenizer_error}")
        ids = list(self.llm.tokenizer(text, add_special_tokens=False).input_ids) if text else []
        # The answer cannot be longer, and drafters index the whole prediction.
        if len(ids) > self.context:
            raise SettingsError(
                f"prediction: must have at most {self.context} tokens, this server's limit for prompt and answer "
                f"together, got {len(ids)}; shorten it"
            )
        # A tokenizer may have more tokens than the model, which never emits them.
        return list(takewhile(lambda token: token < self.llm.vocabulary, ids))

    def _drafting(self, requested: LookaheadFields | None) -> Drafter:
        """The drafter of a request, within the server's limits."""
        given = {}
        if requested is not None:
            given = requested.model_dump(exclude_none=True, exclude={"stats", "trace"})
        if not given:
            return self.settings.drafting()
        try:
            drafter = as_drafter(given)
        except SettingsError as error:
            raise SettingsError(f"lookahead: {error}") from None
        for name in ("head", "table"):  # a request may not make the server open files
            if getattr(drafter, name, None) not in (None, "auto"):
                raise SettingsError(
                    f"lookahead: only the server's own drafter may read a file ({name}); omit it, or "
                    "start the server with --drafter"
                )
        rows = drafter.max_step_rows  # None: the drafter adapts to the row budget
        if rows is not None and rows > self.settings.max_rows:
            raise SettingsError(
                f"lookahead: a step may have at most {self.settings.max_rows} rows, and {drafter} has {rows}"
            )
        return drafter


def _schema(body: Generating) -> tuple[dict[str, Any], str] | None:
    """(schema of the output, the field that requests it); None for free text."""
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if (form.json_schema is None) == (form.type == "json_schema"):
        raise SettingsError(
            "response_format: json_schema must be given if and only if the type is json_schema"
        )
    schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
    return schema, "response_format"


def penalties(prompt_length: int, presence: float, frequency: float) -> Callable[[Any, Any], Any]:
    """OpenAI's penalties: subtracted from the logits of tokens that occur in the completion, not in the prompt."""

    def process(ids: Any, scores: Any) -> Any:
        counts = torch.bincount(ids[0, prompt_length:], minlength=scores.shape[1])
        return scores - frequency * counts - presence * (counts > 0)

    return process

"""Turns a validated HTTP request into engine requests, one per completion, and the answer to fill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..core import Drafter, Request, SettingsError
from ..core.verify import as_choose
from ..drafters import as_drafter
from ..drafters.adaptive.remembered import owner_of, remembering
from ..llm import LLM
from ..model import NO_LIMIT
from ..options import Options
from ..text.prompts import PromptTooLong, encode, encode_text, has_chat_template
from .api_errors import Refused
from .grammar import Constraint, GrammarProcess, Grammars
from .logprobs import LogProbs
from .memory import most_tokens
from .protocol import ChatRequest, CompletionRequest, Generating, LookaheadFields, plain
from .responses import Answer, ChatAnswer, CompletionAnswer
from .settings import Settings
from .tools import demanded, messages_of, offered, with_tools

#: Maximum sequence length in tokens, if --max-model-len is not given and the model allows more.
DEFAULT_LENGTH = 4096
#: The tokens before the prompt, between it and the suffix, and after the suffix: of Qwen2.5-Coder, StarCoder and
#: Granite, SantaCoder, DeepSeek-Coder.
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
#: Arguments of ``apply_chat_template`` that a request may not set as variables of the template.
OF_THE_SERVER = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "return_dict"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
        *("return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"),
    )
)


class Preparer:
    """Turns HTTP requests into engine requests.

    Args:
        llm: the model.
        settings: the server's settings.
        name: the model's name in the API.

    Attributes:
        context: maximum sequence length in tokens, prompt included. It is within the model's limit and below the
            length at which its rotary positions change, because sequences on either side cannot share a pass.
        max_tokens: maximum number of tokens of all sequences; see ``Engine``.

    Raises:
        SettingsError: --max-model-len exceeds the model's limit, or what fits in memory.
    """

    def __init__(self, llm: LLM, settings: Settings, name: str) -> None:
        self.llm = llm
        self.settings = settings
        self.name = name
        self._grammars = Grammars(llm)
        #: The drafter of requests without their own.
        self._drafter = settings.drafting()
        if settings.remember:
            self._drafter = remembering(self._drafter, llm.model, owner_of(settings.api_key))
        #: The text of --chat-template; None without it.
        self._own_template = _read_template(settings.chat_template)
        asked = settings.max_model_len
        limits = [llm.context]
        if llm.model.rope_boundary < NO_LIMIT:
            limits.append(llm.model.rope_boundary - 1)
        #: Maximum sequence length that the model allows here; None for no limit.
        self.longest = min((limit for limit in limits if limit is not None), default=None)
        if asked is not None and self.longest is not None and asked > self.longest:
            raise SettingsError(
                f"--max-model-len must be at most {self.longest} with this model "
                f"(its context has {llm.context} tokens), got {asked}; use a smaller value or omit it"
            )
        self.max_tokens = most_tokens(llm.model, settings.kv_memory, asked or 2)
        asked = asked if asked is not None else min(DEFAULT_LENGTH, self.max_tokens)
        self.context = asked if self.longest is None else min(asked, self.longest)

    def warm_up(self) -> None:
        """Compile, measure the cost of steps, and render the chat template, before the first request."""
        # Many prompts are encoded sooner by the whole tokenizer than each by a part of its vocabulary.
        getattr(self.llm.tokenizer, "backend_tokenizer", None)
        if has_chat_template(self.llm.tokenizer):
            # A template may reject these messages.
            with suppress(SettingsError):
                self.encode([{"role": "user", "content": "Hello"}], "messages", self._variables([]))
        for temperature in (0.0, 1.0):
            self.llm.generate(
                [1, 2, 3, 1, 2, 3],
                max_new_tokens=4,
                temperature=temperature,
                drafter=self.settings.drafting(),
            )

    def encode(
        self, prompt: Any, param: str, variables: dict[str, Any] | None = None, *, fits: bool = False
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a string, chat messages or token ids.
            param: the prompt's field in the request.
            variables: further variables of the chat template.
            fits: whether the prompt must leave room for an answer.

        Raises:
            Refused: it leaves none.
            SettingsError: the prompt is not valid.
        """
        llm = self.llm
        context = self.context if fits else None
        try:
            return encode(prompt, llm.tokenizer, llm.tokenizer_error, llm.vocabulary, context, variables)
        except PromptTooLong as error:
            raise self._too_long(error.tokens, param) from None
        except SettingsError as error:
            raise SettingsError(f"{param}: {error}") from None

    def _too_long(self, tokens: str, param: str) -> Refused:
        """The refusal of a prompt. Agents recognise its code and its first sentence, and shorten the conversation."""
        raisable = self.longest is None or self.context < self.longest
        most = "" if self.longest is None else f" (at most {self.longest} with this model)"
        more = f" or start the server with a larger --max-model-len{most}" if raisable else ""
        return Refused(
            f"This model's maximum context length is {self.context} tokens. However, your {param} has {tokens} "
            f"tokens and leaves no room for an answer. Please shorten it{more}.",
            400,
            "context_length_exceeded",
            param=param,
        )

    def completion(self, body: CompletionRequest) -> Answer:
        """The answer of /v1/completions, with its requests.

        Raises:
            SettingsError: a field that is not supported here.
        """
        if body.echo and body.stream and body.logprobs is not None:
            raise SettingsError("echo: with logprobs it cannot be streamed; omit one of the three")
        if body.suffix and body.echo:
            raise SettingsError("suffix: and echo are mutually exclusive")
        self._check_choices(body, len(body.prompts))
        prompts = body.prompts
        if body.suffix:
            prompts = [self._around_gap(prompt, body.suffix) for prompt in prompts]
        requests = self._requests(
            body,
            [self.encode(prompt, "prompt", fits=True) for prompt in prompts],
            max_tokens=body.limit,
            logprobs=body.logprobs,
            echo=bool(body.echo),
            constraint=_constraint(body),
        )
        return CompletionAnswer(body, self.name, requests, self.llm.tokenizer, self._fingerprint())

    def _around_gap(self, prompt: str | list[int], suffix: str) -> list[int]:
        """The prompt of a model that fills in the middle: the texts before and after the gap, between its tokens.

        Raises:
            SettingsError: the model has no such tokens.
        """
        after = self._part(suffix, "suffix")
        tokenizer = self.llm.tokenizer
        found = (tuple(map(tokenizer.backend_tokenizer.token_to_id, names)) for names in FILL_IN)
        tokens = next((tokens for tokens in found if None not in tokens), None)
        if tokens is None:
            raise SettingsError(
                "suffix: needs a model with tokens for filling in the middle, such as <|fim_prefix|>; leave it out"
            )
        begin, gap, end = tokens
        before = self._part(prompt, "prompt") if isinstance(prompt, str) else prompt
        return [*tokenizer("").input_ids, begin, *before, gap, *after, end]

    def _part(self, text: str, param: str) -> list[int]:
        """The token ids of a text within a sequence.

        Raises:
            Refused: it is longer than a sequence.
            SettingsError: there is no tokenizer, or it is not valid text.
        """
        if self.llm.tokenizer is None:
            raise SettingsError(f"{param}: needs a tokenizer, and {self.llm.tokenizer_error}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SettingsError(f"{param}: must be text that UTF-8 can encode, got {text!r:.80}") from None
        try:
            ids = encode_text(text, self.llm.tokenizer, self.context, add_special_tokens=False)
        except PromptTooLong as error:
            raise self._too_long(error.tokens, param) from None
        if len(ids) >= self.context:
            raise self._too_long(str(len(ids)), param)
        return ids

    def chat(self, body: ChatRequest, answer: Callable[..., Answer] = ChatAnswer) -> Answer:
        """The answer of /v1/chat/completions, with its requests.

        Args:
            body: the validated fields.
            answer: makes the answer, of another endpoint that is translated to a chat.

        Raises:
            SettingsError: a field that is not supported here.
        """
        if body.top_logprobs and not body.logprobs:
            raise SettingsError("top_logprobs: needs logprobs")
        if body.limit == 0:
            raise SettingsError("max_tokens: must be at least 1 for a chat, or -1 for as many as fit, got 0")
        constraint = _constraint(body)
        call = demanded(body)
        # A required call leaves no text to which the format could apply.
        if constraint is not None and call is not None and call.kind == "calls":
            raise SettingsError(
                f"{call.param}: tools whose calls must follow a schema and {constraint.param} are mutually exclusive"
            )
        self._check_choices(body, 1)
        ids = self.chat_tokens(body, fits=True)
        requests = self._requests(
            body,
            [ids],
            max_tokens=body.limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=call or constraint,
        )
        return answer(body, self.name, requests, self.llm.tokenizer, self._fingerprint(), self._template)

    def chat_tokens(self, body: ChatRequest, *, fits: bool = False) -> list[int]:
        """The token ids of a chat, with the tools described in it; ``fits`` as in ``encode``.

        Raises:
            SettingsError: the template rejects the messages, or a field that it cannot honour.
        """
        template = self._template
        tools = offered(body)
        given = dict(body.chat_template_kwargs or {})
        reserved = next((name for name in given if name in OF_THE_SERVER), None)
        if reserved is not None:
            raise SettingsError(f"chat_template_kwargs: must not set {reserved!r}")
        if body.reasoning_effort is not None and "reasoning_effort" in template:
            given.setdefault("reasoning_effort", body.reasoning_effort)
        if body.add_generation_prompt is not None:
            given["add_generation_prompt"] = body.add_generation_prompt
        if body.continue_final_message:
            if given.setdefault("add_generation_prompt", False):
                raise SettingsError("continue_final_message: needs add_generation_prompt false")
            given["continue_final_message"] = True
        messages = with_tools(messages_of(body.messages), tools, template)
        return self.encode(messages, "messages", given | self._variables(tools), fits=fits)

    @property
    def _template(self) -> str:
        """The chat template; "" if there is none."""
        return self._own_template or str(getattr(self.llm.tokenizer, "chat_template", None) or "")

    def _variables(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Variables of the chat template that the server sets."""
        variables: dict[str, Any] = {"tools": tools} if tools and "tools" in self._template else {}
        if self._own_template is not None:
            variables["chat_template"] = self._own_template
        return variables

    def _fingerprint(self) -> str:
        """The server properties that a completion may depend on: version, dtype, device type."""
        device = self.llm.model.device.partition(":")[0]
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
        constraint: Constraint | None = None,
    ) -> list[Request]:
        """``n`` requests per prompt.

        Args:
            body: the validated fields.
            prompts: token ids.
            max_tokens: maximum tokens of a completion; None for as many as fit.
            logprobs: number of most likely tokens to return with each log-probability; None for no log-probabilities.
            echo: whether to return log-probabilities of the prompts too.
            constraint: what each completion must match; None if it is free.

        Raises:
            SettingsError: a field that is not supported here.
        """
        grammar = self._grammars.process(constraint) if constraint is not None else None
        seed = random.getrandbits(62) if body.seed is None else body.seed
        requests = []
        stops = None
        for index, ids in enumerate(ids for ids in prompts for _ in range(body.n or 1)):
            follow = grammar.copy() if grammar is not None else None
            options = self._options(body, ids, max_tokens, follow)
            stops = stops or self.llm.split_stops(options)
            request = self.llm.prepare(ids, options, seed + index if options.sampled else None, stops)
            if follow is not None:
                request.finished = follow.accept
            if body.stop_token_ids:
                request.eos |= frozenset(body.stop_token_ids)
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
        grammar: GrammarProcess | None,
    ) -> Options:
        # Logits processors run in this order.
        temperature = 0.0 if body.top_p == 0 else 1.0 if body.temperature is None else body.temperature
        processors = [self._bias(body.logit_bias)] if body.logit_bias else []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(
                penalties(len(ids), body.presence_penalty or 0.0, body.frequency_penalty or 0.0)
            )
        if grammar is not None:
            processors.append(grammar)
        room = self.context - len(ids)
        most = room if max_tokens is None else min(max(max_tokens, 1), room)
        given: dict[str, Any] = {
            "max_new_tokens": most,
            "min_new_tokens": min(body.min_tokens, most) if body.min_tokens else None,
            "ignore_eos": bool(body.ignore_eos),
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
        row = np.zeros(self.llm.vocabulary, np.float32)
        for token, value in bias.items():
            # int() raises an error for more than 4,300 digits.
            if not token.isdecimal() or len(token) > 18 or int(token) >= self.llm.vocabulary:
                raise SettingsError(
                    f"logit_bias: token ids must be 0 to {self.llm.vocabulary - 1}, got {token!r:.40}"
                )
            row[int(token)] = value
        return lambda ids, scores: scores + _like(scores, row)

    def _predicted(self, body: Generating, drafter: Drafter) -> list[int]:
        """The tokens of the prediction; [] without one."""
        if body.prediction is None:
            return []
        if not drafter.uses_prediction:
            raise SettingsError(
                f"prediction: the drafter {drafter} does not use it; omit it, or choose another drafter"
            )
        text = plain(body.prediction.content)
        ids = self._part(text, "prediction") if text else []
        # A tokenizer may have more tokens than the model, which never emits them.
        return list(takewhile(lambda token: token < self.llm.vocabulary, ids))

    def _drafting(self, requested: LookaheadFields | None) -> Drafter:
        """The drafter of a request, within the server's limits."""
        given = {}
        if requested is not None:
            given = requested.model_dump(exclude_none=True, exclude={"stats", "trace"})
        if not given:
            return self._drafter
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


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"--chat-template must be a file with a template in Jinja, got {path} ({error})"
        ) from None


def _constraint(body: Generating) -> Constraint | None:
    """What the output must match; None for free text."""
    form = body.response_format
    structured = body.structured_outputs
    if form is not None and form.schema_ is not None and form.type != "json_object":
        raise SettingsError(f"response_format: schema belongs to the type json_object, got {form.type}")
    if form is not None and form.type != "text":
        if structured is not None:
            raise SettingsError("structured_outputs: and response_format are mutually exclusive")
        if (form.json_schema is None) == (form.type == "json_schema"):
            raise SettingsError(
                "response_format: json_schema must be given if and only if the type is json_schema"
            )
        named = form.json_schema.schema_ if form.json_schema is not None else form.schema_
        schema = named if named is not None else {"type": "object"}
        return Constraint("json", schema, "response_format")
    if structured is None:
        return None
    given = structured.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1:
        raise SettingsError(
            "structured_outputs: must have one of json, json_object, regex, choice and grammar, "
            f"got {', '.join(given) or 'none'}"
        )
    ((kind, value),) = given.items()
    if kind == "json_object":
        value = {"type": "object"}
    elif kind == "choice":
        value = "start: " + " | ".join(map(json.dumps, value))
    kinds = {"json": "json", "json_object": "json", "regex": "regex"}
    return Constraint(kinds.get(kind, "lark"), value, "structured_outputs")


def penalties(prompt_length: int, presence: float, frequency: float) -> Callable[[Any, Any], Any]:
    """OpenAI's penalties: subtracted from the logits of tokens that occur in the completion, not in the prompt."""

    def process(ids: Any, scores: Any) -> Any:
        written = np.array(ids[0, prompt_length:].tolist(), np.int64)
        counts = np.bincount(written, minlength=scores.shape[1]).astype(np.float32)
        for penalty in (np.float32(frequency) * counts, np.float32(presence) * (counts > 0)):
            scores = scores - _like(scores, penalty.astype(np.float32))
        return scores

    return process


def _like(scores: Any, array: Any) -> Any:
    """A float32 array as the kind of array that scores are: numpy's, or a tensor on their device."""
    return array if isinstance(scores, np.ndarray) else scores.new_tensor(array)

"""What the routes do: texts are prepared in a thread of their own, given to the loop, answered as events come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from .. import __version__
from ..core import LookaheadError, SettingsError
from .gate import error_body
from .loop import Event, Loop, Refused
from .metrics import Metrics
from .prepare import Choice, Preparer
from .protocol import ChatRequest, CompletionRequest, Generating
from .responses import Answer, ChatAnswer, CompletionAnswer, sse
from .settings import Settings
from .tools import demanded, messages_of, offered, with_tools

if TYPE_CHECKING:
    from ..engine.llm import LLM

#: A client that went away is told nothing; this stands in the log (nginx's number).
GONE = 499


def status_of(error: LookaheadError) -> tuple[int, str | None]:
    """HTTP status of an error, and a machine's word for it."""
    if isinstance(error, Refused):
        return error.status, error.code
    return (400, "invalid_value") if isinstance(error, SettingsError) else (500, "decoding_failed")


def load_model(settings: Settings) -> LLM:
    """The model that the settings name."""
    from ..engine.loading import load

    method, config = settings.drafting()
    return load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        method=method,
        config=config,
    )


class Server:
    """One model behind HTTP: its loop, its metrics, and what its routes do."""

    def __init__(self, settings: Settings, load: Callable[[], LLM] | None = None) -> None:
        self.settings, self.metrics = settings, Metrics()
        self._load = load if load is not None else lambda: load_model(settings)
        self.preparer: Preparer | None = None
        self.name = settings.served_model_name or ""
        self.failed: Callable[[], None] = lambda: None
        self.loop = Loop(self._prepare, settings, self.metrics, lambda: self.failed())

    def _prepare(self) -> LLM:
        llm = self._load()
        preparer = Preparer(llm, self.settings)
        preparer.warm_up()
        self.name = self.name or Path(llm.name).name
        self.preparer = preparer
        return llm

    @property
    def ready(self) -> Preparer:
        """What requests are prepared with; the gate lets none through before it is there."""
        assert self.preparer is not None
        return self.preparer

    def check_model(self, asked: str | None) -> None:
        """Refuse a model that is not served."""
        if asked is not None and asked != self.name:
            raise Refused(
                f"the model {asked!r:.200} is not served here; {self.name!r} is", 404, "model_not_found"
            )

    async def answer(
        self, request: Request, body: Generating, make: Callable[[Any], tuple[list[Choice], Answer]]
    ) -> Response:
        """Decode what ``make`` prepares (in a thread of its own; it is told whom to tell), and answer."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise SettingsError("stream_options: goes with stream")
        queue: asyncio.Queue[tuple[Choice, Event]] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def deliver(choice: Choice, event: Event) -> None:
            here.call_soon_threadsafe(queue.put_nowait, (choice, event))

        choices, answer = await asyncio.to_thread(make, deliver)
        self.loop.submit([choice.sequence for choice in choices])
        record = request.state.record
        record["response"] = answer.head["id"]
        if self.settings.log_text:
            record["prompts"] = [choice.sequence.request.prompt for choice in choices]
        if body.stream:
            events = self._stream(queue, choices, answer, record)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        watcher = asyncio.create_task(self._watch(request, choices))
        try:
            async for choice, event in self._events(queue, choices):
                answer.take(choice, event)
        finally:
            watcher.cancel()
            self._close(choices, answer, record)
        return Response(json.dumps(answer.whole()), media_type="application/json")

    async def _watch(self, request: Request, choices: list[Choice]) -> None:
        """End texts whose client goes away."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.loop.cancel(choice.sequence for choice in choices)

    @staticmethod
    async def _events(
        queue: asyncio.Queue[tuple[Choice, Event]], choices: list[Choice]
    ) -> AsyncIterator[tuple[Choice, Event]]:
        """Events until every text has ended.

        Raises:
            LookaheadError: what ended one of them.
        """
        left = len(choices)
        while left:
            choice, event = await queue.get()
            if event.error is not None:
                raise event.error
            if event.finish == "cancelled":
                raise Refused("the client went away", GONE, "cancelled")
            yield choice, event
            left -= event.finish is not None

    async def _stream(
        self,
        queue: asyncio.Queue[tuple[Choice, Event]],
        choices: list[Choice],
        answer: Answer,
        record: dict[str, Any],
    ) -> AsyncIterator[bytes]:
        try:
            for chunk in answer.opening():
                yield chunk
            async for choice, event in self._events(queue, choices):
                made = answer.take(choice, event)
                if made is not None:
                    yield answer.chunk(made)
            if answer.usage_asked:
                yield answer.chunk(usage=answer.usage())
            yield sse(b"[DONE]")
        except LookaheadError as error:
            record["error"] = str(error)
            yield sse(error_body(str(error), *status_of(error)))
        finally:
            self._close(choices, answer, record)

    def _close(self, choices: list[Choice], answer: Answer, record: dict[str, Any]) -> None:
        self.loop.cancel(choice.sequence for choice in choices)
        usage = answer.usage()
        record["prompt_tokens"], record["completion_tokens"] = (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        record["finish"] = [state.finish for state in answer.texts]
        if self.settings.log_text:
            record["texts"] = [state.text for state in answer.texts]

    def fingerprint(self) -> str:
        """Of everything that the text may depend on beside the request."""
        llm = self.ready.llm
        return f"lookahead-{__version__}-{llm.dtype}-{llm.model.device.type}"

    def completion(self, body: CompletionRequest, deliver: Any) -> tuple[list[Choice], Answer]:
        """The texts of /v1/completions."""
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if body.echo and body.stream and body.logprobs is not None:
            raise SettingsError("echo: with logprobs it cannot be streamed; leave out one of the three")
        prompts = [self.ready.encode(one, "prompt") for one in (prompt if several else [prompt])]
        choices = self.ready.choices(
            body, prompts, deliver, max_tokens=body.max_tokens or 16, logprobs=body.logprobs,
            echo=bool(body.echo), schema=self._schema(body),
        )  # fmt: skip
        return choices, CompletionAnswer(
            body, self.name, choices, self.ready.llm.tokenizer, self.fingerprint()
        )

    def chat(self, body: ChatRequest, deliver: Any) -> tuple[list[Choice], Answer]:
        """The texts of /v1/chat/completions."""
        if body.top_logprobs is not None and not body.logprobs:
            raise SettingsError("top_logprobs: needs logprobs")
        schema, asked = self._schema(body), demanded(body)
        if schema is not None and asked is not None:
            raise SettingsError(
                "tool_choice: a tool that must be called and a response_format exclude each other"
            )
        ids = self.chat_tokens(messages_of(body.messages), offered(body))
        choices = self.ready.choices(
            body, [ids], deliver, max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None, schema=schema or asked,
        )  # fmt: skip
        return choices, ChatAnswer(body, self.name, choices, self.ready.llm.tokenizer, self.fingerprint())

    def chat_tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of a chat."""
        llm = self.ready.llm
        template = getattr(llm.tokenizer, "chat_template", None) or ""
        messages = with_tools(messages, tools, str(template))
        if not tools or "tools" not in template:
            return self.ready.encode(messages, "messages")
        try:
            chat = llm.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template's own complaint
            raise SettingsError(f"messages: the chat template refuses them: {error}") from None
        return self.ready.encode(list(chat), "messages")

    @staticmethod
    def _schema(body: Generating) -> tuple[dict[str, Any], str] | None:
        form = body.response_format
        if form is None or form.type == "text":
            return None
        if (form.json_schema is None) == (form.type == "json_schema"):
            raise SettingsError("response_format: json_schema goes with type json_schema, and only with it")
        schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
        return schema, "response_format"

"""The work of the routes: prepare texts in a worker thread, submit them to the loop, and answer as updates arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from .. import __version__
from ..core import LookaheadError, SettingsError
from ..engine.engine import PassFailed
from ..engine.results import Update
from ..llm import LLM
from ..loading import load_with
from ..options import OF_LLAMA_CPP, LoadOptions
from .choice import Choice, Refused
from .engine_thread import Loop
from .gate import error_body
from .metrics import Metrics
from .prepare import Preparer
from .protocol import ChatRequest, CompletionRequest, Generating
from .responses import Answer, ChatAnswer, CompletionAnswer, sse
from .settings import Settings
from .tools import demanded, messages_of, offered, with_tools

#: Logged status of a request whose client disconnected (as in nginx).
GONE = 499


def status_of(error: LookaheadError) -> tuple[int, str | None]:
    """The HTTP status and the code of an error."""
    if isinstance(error, Refused):
        return error.status, error.code
    if isinstance(error, PassFailed):
        return 500, "step_failed"
    return (400, "invalid_value") if isinstance(error, SettingsError) else (500, "decoding_failed")


def load_model(settings: Settings) -> LLM:
    """The model that the settings name."""
    return load_with(
        LoadOptions(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            drafter=settings.drafting(),
            **{name: getattr(settings, name) for name in ("engine", *OF_LLAMA_CPP)},
        )
    )


class Server:
    """One model behind HTTP: its loop, its metrics, and the work of the routes."""

    def __init__(self, settings: Settings, load: Callable[[], LLM] | None = None) -> None:
        self.settings, self.metrics = settings, Metrics()
        self._load = load if load is not None else lambda: load_model(settings)
        self.preparer: Preparer | None = None
        self.name = settings.served_model_name or ""
        self.failed: Callable[[], None] = lambda: None
        #: Receives a line when the model is ready.
        self.say: Callable[[str], None] = lambda line: None
        self.loop = Loop(
            self._prepare, settings, self.metrics, lambda: self.failed(), lambda: self._say_ready()
        )
        self._created = monotonic()

    def _prepare(self) -> LLM:
        llm = self._load()
        preparer = Preparer(llm, self.settings)
        preparer.warm_up()
        self.name = self.name or Path(llm.name).name
        self.preparer = preparer
        return llm

    def _say_ready(self) -> None:
        self.say(f"ready after {monotonic() - self._created:.0f} s: {self.name}, {self.ready.llm.dtype}")

    @property
    def ready(self) -> Preparer:
        """The preparer of requests. The gate refuses requests until there is one."""
        assert self.preparer is not None
        return self.preparer

    def check_model(self, asked: str | None) -> None:
        """Refuse a model that is not served."""
        if asked is not None and asked != self.name:
            raise Refused(
                f"the model {asked!r:.200} is not served here; {self.name!r} is", 404, "model_not_found"
            )

    async def answer(
        self,
        request: Request,
        body: Generating,
        make: Callable[[Callable[[Update], None]], tuple[list[Choice], Answer]],
    ) -> Response:
        """Decode the texts that ``make(deliver)`` prepares in a worker thread, and answer the request."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise SettingsError("stream_options: needs stream")
        if body.lookahead is not None and body.lookahead.trace and not body.stream:
            raise SettingsError("lookahead.trace: needs stream, whose chunks show the trees")
        queue: asyncio.Queue[Update] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def deliver(update: Update) -> None:
            here.call_soon_threadsafe(queue.put_nowait, update)

        choices, answer = await asyncio.to_thread(make, deliver)
        self.loop.submit(choices)
        record = request.state.record
        record["response"] = answer.head["id"]
        if self.settings.log_text:
            record["prompts"] = [choice.request.prompt for choice in choices]
        if body.stream:
            chunks = self._stream(queue, choices, answer, record)
            return StreamingResponse(
                chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        watcher = asyncio.create_task(self._watch(request, choices))
        try:
            async for update in self._updates(queue, choices):
                answer.take(update)
        finally:
            watcher.cancel()
            self._close(choices, answer, record)
        return Response(json.dumps(answer.whole()), media_type="application/json")

    async def _watch(self, request: Request, choices: list[Choice]) -> None:
        """End the texts when their client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.loop.cancel(choices)

    @staticmethod
    async def _updates(queue: asyncio.Queue[Update], choices: list[Choice]) -> AsyncIterator[Update]:
        """Updates until every text has ended.

        Raises:
            LookaheadError: the error that ended one of the texts.
        """
        left = len(choices)
        while left:
            update = await queue.get()
            if update.result is not None:
                update.result.checked()
                if update.result.finish_reason == "cancelled":
                    raise Refused("the client went away", GONE, "cancelled")
                left -= 1
            yield update

    async def _stream(
        self,
        queue: asyncio.Queue[Update],
        choices: list[Choice],
        answer: Answer,
        record: dict[str, Any],
    ) -> AsyncIterator[bytes]:
        try:
            for chunk in answer.opening():
                yield chunk
            async for update in self._updates(queue, choices):
                choice = answer.take(update)
                if choice is not None:
                    yield answer.chunk(choice)
            if answer.usage_asked:
                yield answer.chunk(usage=answer.usage())
            yield sse(b"[DONE]")
        except LookaheadError as error:
            record["error"] = str(error)
            yield sse(error_body(str(error), *status_of(error)))
        finally:
            self._close(choices, answer, record)

    def _close(self, choices: list[Choice], answer: Answer, record: dict[str, Any]) -> None:
        self.loop.cancel(choices)
        usage = answer.usage()
        record |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        record["finish"] = [choice.finish for choice in choices]
        if self.settings.log_text:
            record["texts"] = [choice.shown for choice in choices]

    def fingerprint(self) -> str:
        """The properties of the server that a text may depend on: version, dtype, type of device."""
        llm = self.ready.llm
        device = str(llm.model.device).partition(":")[0]
        return f"lookahead-{__version__}-{llm.dtype}-{device}"

    def completion(
        self, body: CompletionRequest, deliver: Callable[[Update], None]
    ) -> tuple[list[Choice], Answer]:
        """The texts of /v1/completions, and their answer."""
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if body.echo and body.stream and body.logprobs is not None:
            raise SettingsError("echo: with logprobs it cannot be streamed; leave out one of the three")
        prompts = [self.ready.encode(text, "prompt") for text in (prompt if several else [prompt])]
        choices = self.ready.choices(
            body,
            prompts,
            deliver,
            max_tokens=body.max_tokens or 16,
            logprobs=body.logprobs,
            echo=bool(body.echo),
            schema=self._schema(body),
        )
        return choices, CompletionAnswer(
            body, self.name, choices, self.ready.llm.tokenizer, self.fingerprint()
        )

    def chat(self, body: ChatRequest, deliver: Callable[[Update], None]) -> tuple[list[Choice], Answer]:
        """The texts of /v1/chat/completions, and their answer."""
        if body.top_logprobs is not None and not body.logprobs:
            raise SettingsError("top_logprobs: needs logprobs")
        schema, call = self._schema(body), demanded(body)
        if schema is not None and call is not None:
            raise SettingsError("tool_choice: a required tool and a response_format exclude each other")
        ids = self.chat_tokens(messages_of(body.messages), offered(body))
        choices = self.ready.choices(
            body,
            [ids],
            deliver,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            schema=schema or call,
        )
        return choices, ChatAnswer(body, self.name, choices, self.ready.llm.tokenizer, self.fingerprint())

    def chat_tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """The token ids of a chat, with the tools described in it."""
        llm = self.ready.llm
        template = getattr(llm.tokenizer, "chat_template", None) or ""
        messages = with_tools(messages, tools, str(template))
        if not tools or "tools" not in template:
            return self.ready.encode(messages, "messages")
        try:
            chat = llm.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise errors of many types
            raise SettingsError(f"messages: the chat template refuses them: {error}") from None
        return self.ready.encode(list(chat), "messages")

    @staticmethod
    def _schema(body: Generating) -> tuple[dict[str, Any], str] | None:
        form = body.response_format
        if form is None or form.type == "text":
            return None
        if (form.json_schema is None) == (form.type == "json_schema"):
            raise SettingsError(
                "response_format: json_schema must be given if, and only if, the type is json_schema"
            )
        schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
        return schema, "response_format"

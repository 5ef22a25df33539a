"""The HTTP application: routes, whole or streamed responses, and errors in OpenAI's format.

app = create_app(Settings.read())      # ASGI, for any server
serve(Settings.read())                 # until SIGTERM or SIGINT
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from .. import __version__
from ..core import LookaheadError, SettingsError, Update
from ..llm import LLM
from ..text.prompts import has_chat_template
from .api_errors import ErrorReply, Refused, error_response, status_of
from .connections import http_config
from .engine_thread import EngineThread
from .gate import Gate
from .logs import log_failure, log_to_stderr
from .messages_api import CountRequest, MessageAnswer, MessagesRequest
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generating,
    TokenizeRequest,
    suggestion,
)
from .response_api import ResponseAnswer, ResponsesRequest
from .responses import Answer
from .service import Server
from .settings import Settings

#: The request body of each path, for suggestions when a field is unknown.
REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
#: Error responses, in the OpenAPI document.
ERRORS: dict[str, Any] = {"model": ErrorReply, "description": "an error in OpenAI's format"}
STREAMS: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
#: A branch of a union in the path of an error, which is not a field.
BRANCH = re.compile(r"(str|constrained-str|NamedTool|AllowedToolChoice)$|list\[|literal\[|function-")
log = logging.getLogger("lookahead.server")
PAGE = Path(__file__).with_name("page.html")
#: Logged status of a request whose client disconnected (as in nginx).
GONE = 499


async def _refused(request: Request, error: Any) -> Response:
    status, code = status_of(error)
    named = re.match(r"([a-z_]+(?:\.[a-z_]+)?)(?::| must| needs)", str(error))
    param = named[1] if named and isinstance(error, SettingsError) else getattr(error, "param", None)
    return error_response(str(error), status, code, param, getattr(error, "retry_after", None))


async def _invalid(request: Request, error: Any) -> Response:
    """Status 400 for a body that does not match the endpoint. The message names the field."""
    problems = error.errors()
    sent = request.headers.get("content-type", "").partition(";")[0]
    if sent != "application/json" or any(problem["type"] == "json_invalid" for problem in problems):
        return error_response("the body must be JSON, sent as application/json", 400, "invalid_json")
    # A union reports an error for each branch. The deepest error is the most specific.
    first = max(problems, key=lambda problem: (problem["type"] == "unknown_field", len(problem["loc"])))
    path = [str(part) for part in first["loc"][1:] if not BRANCH.match(str(part))]
    if first["type"] == "unknown_field":
        path.append(str(first["ctx"]["name"])[:100])
        asked = REQUESTS.get(request.url.path)
        meant = suggestion(asked, path) if asked is not None else None
        hint = f"; did you mean {'.'.join([*path[:-1], meant])!r}?" if meant is not None else ""
        unknown = ".".join(path)
        return error_response(
            f"unknown or unsupported field {unknown!r}{hint}", 400, "unknown_field", unknown
        )
    param = ".".join(path) or None
    return error_response(f"{param or 'the body'}: {first['msg']}", 400, "invalid_value", param)


async def _http_error(request: Request, error: Any) -> Response:
    messages = {
        404: "no such path",
        405: "this path needs another method",
        413: "the request body is too large",
    }
    codes = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 400: "invalid_body"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(message, error.status_code, codes.get(error.status_code))


def _translated(chat: Callable[[], ChatRequest]) -> ChatRequest:
    """The chat that a request of another API stands for."""
    try:
        return chat()
    except ValidationError as error:
        places = [one | {"loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(places) from None


async def _answer(
    server: Server, request: Request, body: Generating, prepare: Callable[[], Answer]
) -> Response:
    """Run ``prepare`` in a worker thread, submit its requests, and respond as updates arrive."""
    server.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise SettingsError("stream_options: needs stream")
    if body.lookahead is not None and body.lookahead.trace and not body.stream:
        raise SettingsError("lookahead.trace: needs stream, because the trees are sent in chunks")
    server.loop.check_room()  # before the prompts are encoded; ``submit`` counts the requests
    arrived = monotonic()
    queue: asyncio.Queue[Update] = asyncio.Queue()
    here = asyncio.get_running_loop()

    def deliver(update: Update) -> None:
        here.call_soon_threadsafe(queue.put_nowait, update)

    # Not cut off at the time limit, because the thread would run on; sizes limit how long it takes.
    answer = await asyncio.to_thread(prepare)
    if await request.is_disconnected():
        raise Refused("the client disconnected", GONE, "cancelled")
    answer.sequences = server.loop.submit(answer.requests, deliver, arrived)
    record = request.state.record
    record["response"] = answer.head["id"]
    if server.settings.log_text:
        record["prompts"] = [one.prompt for one in answer.requests]
    if body.stream:
        chunks = _stream(server, queue, answer, record)
        return StreamingResponse(
            chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    watcher = asyncio.create_task(_watch(server, request, answer))
    try:
        async for update in _updates(queue, answer):
            answer.take(update)
    finally:
        watcher.cancel()
        _close(server, answer, record)
    # In a thread, because the log-probabilities of a long prompt take seconds.
    content = await asyncio.to_thread(lambda: json.dumps(answer.whole()))
    return Response(content, media_type="application/json")


async def _watch(server: Server, request: Request, answer: Answer) -> None:
    """End the sequences when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    server.loop.cancel(answer.sequences)


async def _updates(queue: asyncio.Queue[Update], answer: Answer) -> AsyncIterator[Update]:
    """Yield updates until every sequence of an answer has ended.

    Raises:
        LookaheadError: the error that ended one of the sequences.
    """
    left = len(answer.sequences)
    while left:
        update = await queue.get()
        if update.result is not None:
            try:
                update.result.checked()
            except SettingsError as error:  # the request has been checked, so it is the server's fault
                raise Refused(str(error), 500, "decoding_failed") from error
            if update.result.finish_reason == "cancelled":
                raise Refused("the client disconnected", GONE, "cancelled")
            left -= 1
        yield update


async def _stream(
    server: Server, queue: asyncio.Queue[Update], answer: Answer, record: dict[str, Any]
) -> AsyncIterator[bytes]:
    """The server-sent events of an answer."""
    try:
        for chunk in answer.opening():
            yield chunk
        async for update in _updates(queue, answer):
            for choice in answer.take(update):
                yield answer.chunk(choice)
        for chunk in answer.ending():
            yield chunk
    except Exception as failed:
        error: LookaheadError = Refused("the server failed; see its log", 500, "internal")
        if isinstance(failed, LookaheadError):
            error = failed
        else:
            log_failure("a stream failed", failed, server.settings.log_text)
        # A message may quote the completion, so that only its client gets it.
        record["error"] = str(error) if server.settings.log_text else status_of(error)[1]
        yield answer.failure(error)
    finally:
        _close(server, answer, record)


def _close(server: Server, answer: Answer, record: dict[str, Any]) -> None:
    """End sequences that still run, and complete the log record."""
    server.loop.cancel(answer.sequences)
    usage = answer.usage()
    record |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    record["finish"] = [part.finish for part in answer.parts]
    waits = [one.first_token - one.added for one in answer.sequences if one.first_token is not None]
    if waits:
        record["first_token_seconds"] = round(min(waits), 4)
    if server.settings.log_text:
        record["texts"] = [part.shown for part in answer.parts]


def create_app(settings: Settings, load: Callable[[], LLM] | None = None, wait: bool = False) -> FastAPI:
    """The ASGI application. Its lifespan starts and ends the loop.

    Args:
        settings: the server's settings.
        load: loads the model; None loads the model named in the settings.
        wait: whether the lifespan waits for the model, and raises the error of loading if that fails. Otherwise,
            /health answers 503 until the model is ready.
    """
    server = Server(settings, load)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Start the thread that loads the model and decodes.
        server.loop.start()
        while wait and not server.loop.ready:
            if server.loop.error is not None:
                raise server.loop.error
            await asyncio.sleep(0.05)
        yield
        # End the sequences that still run, and wait for the thread.
        server.loop.stop()
        if server.loop.engine is not None:  # loading cannot be interrupted, and ends with the process
            await asyncio.to_thread(server.loop.join)

    # The application and its error handlers.
    app = FastAPI(
        title="lookahead",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": ERRORS, "5XX": ERRORS},
    )
    app.state.server = server
    for kind, handler in (
        (LookaheadError, _refused),
        (RequestValidationError, _invalid),
        (HTTPException, _http_error),
    ):
        app.add_exception_handler(kind, handler)

    # Generation. The lambdas run in a worker thread, because encoding a long prompt would block the event loop.
    @app.post("/v1/completions", responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(server, request, body, lambda: server.ready.completion(body))

    @app.post("/v1/chat/completions", responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _answer(server, request, body, lambda: server.ready.chat(body))

    @app.post("/v1/responses", responses=STREAMS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        messages = [*server.conversations.of(body.previous_response_id), *body.messages()]
        chat = _translated(lambda: body.chat(messages))
        answer = partial(ResponseAnswer, asked=body, messages=messages, conversations=server.conversations)
        return await _answer(server, request, chat, lambda: server.ready.chat(chat, answer))

    @app.post("/v1/messages", responses=STREAMS)
    async def anthropic_messages(body: MessagesRequest, request: Request) -> Response:
        chat = _translated(body.chat)
        return await _answer(server, request, chat, lambda: server.ready.chat(chat, MessageAnswer))

    @app.post("/v1/messages/count_tokens")
    def count_tokens(body: CountRequest) -> dict[str, int]:
        server.check_model(body.model)
        return {"input_tokens": len(server.ready.chat_tokens(_translated(body.chat)))}

    def described() -> dict[str, Any]:
        return {
            "id": server.name,
            "object": "model",
            "created": 0,
            "owned_by": "lookahead",
            "max_model_len": server.ready.context,
            "chat_template": has_chat_template(server.ready.llm.tokenizer),
        }

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise Refused(
            "this server generates text and has no embeddings; use a library with an embedding model, such as "
            "sentence-transformers",
            400,
            "not_supported",
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return described()

    # Monitoring; the gate requires no key for these paths.
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", response_class=Response)
    async def livez() -> Response:
        return Response(status_code=200)

    @app.head("/health", include_in_schema=False)
    @app.head("/readyz", include_in_schema=False)
    @app.get("/health", response_class=Response)
    @app.get("/readyz", response_class=Response)
    async def health() -> Response:
        if (refusal := server.loop.refusal) is not None:
            raise refusal
        return Response(status_code=200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    # Tokenization. Functions that are not async run in worker threads, so a long text does not block the event loop.
    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise SettingsError("prompt: either prompt or messages must be given")
        if body.messages is not None:
            ids = server.ready.chat_tokens(ChatRequest.model_construct(messages=body.messages))
        else:
            ids = server.ready.encode(body.prompt, "prompt")
        return {"tokens": ids, "count": len(ids), "max_model_len": server.ready.context}

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        llm = server.ready.llm
        outside = next((token for token in body.tokens if token >= llm.vocabulary), None)
        if outside is not None:
            raise SettingsError(f"tokens: must be below {llm.vocabulary}, got {outside}")
        if llm.tokenizer is None:
            raise SettingsError(f"tokens: detokenizing needs a tokenizer, and {llm.tokenizer_error}")
        return {"prompt": llm.tokenizer.decode(body.tokens)}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8")

    # Middleware, added last because it needs the routes.
    routes = {str(getattr(route, "path", "")) for route in app.routes}
    app.add_middleware(
        Gate, settings=settings, metrics=server.metrics, refusal=lambda: server.loop.refusal, routes=routes
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class _Uvicorn(uvicorn.Server):
    """Stops the loop first on shutdown, so that streams end properly."""

    def __init__(self, config: uvicorn.Config, loop: EngineThread, seconds: float) -> None:
        super().__init__(config)
        self._loop = loop
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.stop(self._seconds)
        # Connections stay open meanwhile, and new requests on them get status 503.
        while self._loop.engine is not None and self._loop.is_alive and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def serve(settings: Settings, say: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: the server's settings.
        say: receives a line before the model is loaded, and one when the server is ready; None to log them.

    Raises:
        SettingsError: the address is not free, or the model cannot be loaded.
    """
    log_to_stderr()
    six = ":" in settings.host
    host = f"[{settings.host}]" if six else settings.host  # as in a URL
    try:
        family = socket.AF_INET6 if six else socket.AF_INET
        listening = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise SettingsError(
            f"--host and --port must be a free address, got {host}:{settings.port} ({error})"
        ) from None
    app = create_app(settings)
    server: Server = app.state.server
    config = http_config(app, timeout_graceful_shutdown=int(settings.shutdown_timeout) + 5)
    http = _Uvicorn(config, server.loop, settings.shutdown_timeout)
    server.failed = lambda: setattr(http, "should_exit", True)
    say = server.say = say if say is not None else log.info
    model = settings.model or "the default model"
    address = f"http://{host}:{listening.getsockname()[1]}"
    server.address = address
    say(f"loading and compiling {model} for {address} (Ctrl-C ends the server)")
    http.run(sockets=[listening])
    if server.loop.error is not None:
        raise server.loop.error

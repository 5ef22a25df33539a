"""Middleware for every HTTP request: request id, host name, API key, body size limit, and a log line at the end."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Callable
from ipaddress import ip_address
from time import monotonic
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_errors import Refused, error_response
from .logs import log_failure
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("lookahead.server")

#: Paths that need neither the key nor a loaded model.
OPEN = ("/", "/health", "/livez", "/readyz", "/metrics", "/version", "/openapi.json")


class Gate:
    """ASGI middleware.

    Args:
        app: the application behind it.
        settings: the server's settings.
        metrics: counts the responses.
        refusal: why requests are not accepted, or None; see ``EngineThread.refusal``.
        routes: paths with separate counters.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        refusal: Callable[[], Refused | None],
        routes: set[str],
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._not_ready = refusal
        self._routes = routes
        #: Host names that requests may give; None for all.
        self._hosts: set[str] | None = None
        if settings.allowed_host is not None or _is_local(settings.host):
            self._hosts = {name.lower() for name in [settings.host, *(settings.allowed_host or [])]}
        key = settings.api_key
        self._key = b"Bearer " + key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The request's id: the client's if it is short and printable, else a new one.
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if 0 < len(given) <= 64 and given.isascii() and given.isprintable() else uuid.uuid4().hex
        scope["path"] = self._route_of(scope["path"])
        # What the log line needs. The application adds fields to the record.
        begin = monotonic()
        status = 0
        size = 0
        record: dict[str, Any] = {}
        scope.setdefault("state", {})["record"] = record

        # Count the body as it arrives, because a chunked body has no content-length.
        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._settings.max_body_bytes:
                raise HTTPException(413)
            return message

        # Record the status, and add the id to the headers.
        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        # Respond, then count and log the request in every case.
        try:
            refusal = self._refusal(scope["path"], headers)
            await (refusal if refusal is not None else self._app)(scope, counted, answered)
        except Exception as error:
            log_failure(f"request {name} failed", error, self._settings.log_text)
            if not status:
                await error_response("the server failed; see its log", 500, "internal")(
                    scope, receive, answered
                )
        finally:
            path = scope["path"] if scope["path"] in self._routes else "other"
            client = (scope.get("client") or ("",))[0]
            self._metrics.http.labels(path, str(status or 499)).inc()
            line = {"id": name, "client": client, "method": scope["method"], "path": path}
            line |= {"status": status or 499}
            if path not in OPEN:  # monitoring polls these every few seconds
                log.info(
                    "request", extra={"record": line | {"seconds": round(monotonic() - begin, 4)} | record}
                )

    def _route_of(self, path: str) -> str:
        """The route of a path that lacks /v1, or ends with a slash, as some clients write it."""
        path = path.rstrip("/") or "/"
        known = f"/v1{path}" in self._routes or path.startswith("/models/")
        return f"/v1{path}" if path not in self._routes and known else path

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The response that rejects a request, decided without reading its body; None to accept it."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and host and not self._is_allowed(host):
            return error_response(
                f"this server does not answer to the host name {host!r:.80}; use its address, or start it with "
                "--allowed-host",
                400,
                "wrong_host",
            )
        if path in OPEN:
            return None
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")  # Anthropic's
        if self._key is not None and not hmac.compare_digest(given, self._key):
            return error_response("the API key is missing or wrong", 401, "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            return error_response(
                f"a request body may have at most {self._settings.max_body_bytes} bytes", 413, "too_large"
            )
        if (error := self._not_ready()) is not None:
            return error_response(str(error), error.status, error.code, retry_after=error.retry_after)
        return None

    def _is_allowed(self, host: str) -> bool:
        """Whether a Host header names this server.

        A web page of another site can reach a local server under the site's own name (DNS rebinding), but not under
        an address or as localhost.
        """
        assert self._hosts is not None
        name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
        return _is_address(name) or name == "localhost" or name in self._hosts or "*" in self._hosts


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)

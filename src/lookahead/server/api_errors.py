"""Errors in OpenAI's format: rejections, HTTP statuses, and response bodies."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from ..core import LookaheadError, PassFailed, SettingsError

#: OpenAI's type of an error, by status.
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Refused(LookaheadError):
    """The server rejected a request or ended it.

    Attributes:
        status: the HTTP status.
        code: the error code of the API.
        retry_after: seconds after which the client may retry, or None.
        param: the field of the request that caused the error, or None.
    """

    def __init__(
        self,
        message: str,
        status: int,
        code: str,
        retry_after: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.param = param


class ErrorFields(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of an error response, as ``error_body`` makes it."""

    error: ErrorFields


def status_of(error: LookaheadError) -> tuple[int, str | None]:
    """The HTTP status and the code of an error."""
    if isinstance(error, Refused):
        return error.status, error.code
    if isinstance(error, PassFailed):
        return 500, "step_failed"
    return (400, "invalid_value") if isinstance(error, SettingsError) else (500, "decoding_failed")


def error_body(
    message: str, status: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's format.

    Args:
        message: the text for the client.
        status: the HTTP status, which determines the error's type.
        code: the error code of the API, or None.
        param: the field of the request that caused the error, or None.
    """
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    code: str | None = None,
    param: str | None = None,
    retry_after: int | None = None,
) -> Response:
    """An error in OpenAI's format, as a response.

    Args:
        message, status, code, param: as in ``error_body``.
        retry_after: seconds after which the client may retry, or None; the header Retry-After.
    """
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = json.dumps(error_body(message, status, code, param))
    return Response(body, status, headers, media_type="application/json")

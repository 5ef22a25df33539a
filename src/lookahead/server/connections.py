"""The connections of the HTTP server: a bound on their number, and time limits for clients that send or read slowly.

uvicorn limits neither. Without a bound, clients that connect and send nothing use up the process's files; without
time limits, they keep them.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds in which a request must arrive in full, and after which an idle connection is closed. Clients close idle
#: connections after 5 s; with the same limit, the server could close one while a client is sending.
SENDING = 30.0
#: Seconds for which a client may leave an answer unread once the buffers are full.
READING = 30.0
#: Connections that the system may hold before the server accepts them, and that it may accept at once.
BACKLOG = 128
#: Files that are not connections: the model, libraries, the log.
OTHER_FILES = 64
#: Largest number of connections, if the limit of open files allows more.
MOST = 4096


def most_connections() -> int:
    """How many connections the process may have, so that its limit of open files is not reached."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST
    return min(MOST, max(files - BACKLOG - OTHER_FILES, files // 4))


def http_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """The configuration of an HTTP server for an application, with the limits of this module.

    Args:
        app: the application.
        **options: further options of ``uvicorn.Config``.
    """
    protocol: Any = partial(Connection, most=most_connections())
    return uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=int(SENDING),
        **options,
    )


class Connection(H11Protocol):
    """One connection. If there are too many, a new one replaces the one that has waited longest for its client.

    Args:
        most: largest number of connections.
        **options: as in uvicorn.
    """

    def __init__(self, *, most: int, **options: Any) -> None:
        super().__init__(**options)
        self._most = most
        self._idle = True
        #: When the server began to wait for a request.
        self._since = 0.0
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    @property
    def _waits(self) -> bool:
        """Whether the client has to send something: a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        others = [each for each in self.connections if not each.transport.is_closing()]
        super().connection_made(transport)
        self._expect_request()
        if len(others) >= self._most:
            waiting = [other for other in others if isinstance(other, Connection) and other._waits]
            min(waiting, key=lambda other: other._since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle = False
            self._expect_request()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._idle = True
        self._expect_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(READING, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._sending)
        self._cancel(self._reading)
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        """End the connection unless a whole request arrives in time."""
        self._cancel(self._sending)
        self._since = self.loop.time()
        end: Callable[[], None] = lambda: self.transport.abort() if self._waits else None  # noqa: E731
        self._sending = self.loop.call_later(SENDING, end)

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

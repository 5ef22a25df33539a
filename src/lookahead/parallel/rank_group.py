"""All ranks as seen from rank 0: sending, receiving, heartbeats, and joint shutdown."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch

from ..core import OutOfMemory, Target
from ..core.errors import summary
from ..model import Model
from .connect import Connections, check_same_model
from .executor import serve
from .wire import Message, RankError

#: Seconds to wait for each rank to receive the reason for the shutdown.
SHUTDOWN_TIMEOUT = 5.0
#: Compares two ranks' logits of one row, (V,) each. Returns the difference as a phrase if it is too large, else "".
Differ = Callable[[torch.Tensor, torch.Tensor], str]


class RankGroup:
    """All ranks, represented on rank 0. Created by ``join``, with its arguments.

    Several ``ParallelTarget`` objects, even in several threads, may share a group; one step is evaluated at a time.

    Attributes:
        lock: held while the other ranks work; see ``exchange``.
        error: the error that ended the group; every later use raises it.
    """

    def __init__(self, make_target: Callable[[], Target], connections: Connections, differ: Differ) -> None:
        self.make_target = make_target
        self.connections = connections
        self.differ = differ
        self.lock = threading.RLock()
        self.error: RankError | None = None
        self._numbers = count(1)
        # Numbers of garbage-collected targets, sent with the next message, because a finalizer may run at any moment,
        # even during a message.
        self._retired: deque[int] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="lookahead-heartbeat").start()
        atexit.register(self.close)

    @property
    def bytes_exchanged(self) -> int:
        """Bytes that rank 0 has sent and received."""
        return sum(link.exchanged for link in self.connections.links.values())

    def register(self, target: object) -> int:
        """A number for a new target in messages. The other ranks free their targets when it is garbage-collected.

        Raises:
            RankError: the group is closed.
        """
        if self._closed.is_set():
            raise RankError(0, "this group is closed and its ranks have ended; join again")
        number = next(self._numbers)
        weakref.finalize(target, self._retired.append, number)
        return number

    def send(self, rank: int, kind: str, **fields: Any) -> None:
        """Send a message to one rank.

        Raises:
            RankError: the group has ended with an error, or a rank cannot be reached.
        """
        if self.error is not None:
            raise self.error
        with self._failing_together():
            while self._retired:
                number = self._retired.popleft()
                for link in self.connections.links.values():
                    link.send("retire", target=number)
            self.connections.links[rank].send(kind, **fields)

    def broadcast(self, kind: str, **fields: Any) -> None:
        """Send a message to every other rank. Raises RankError as ``send`` does."""
        for rank in self.connections.links:
            self.send(rank, kind, **fields)

    def receive(self, rank: int) -> Message:
        """Receive a rank's answer.

        Raises:
            RankError: the rank failed, died or hangs; the group ends with this error.
        """
        with self._failing_together():
            answer = self.connections.links[rank].receive()
            if answer["kind"] == "failed":
                raise RankError(rank, f"rank {rank} failed: {answer['text']}")
        return answer

    def receive_row(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Receive a row of logits requested from a rank, with the shape, dtype and device of ``like``.

        Raises:
            RankError: the rank died or hangs; the group ends with this error.
        """
        with self._failing_together():
            return self.connections.links[rank].receive_row(like)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Hold the lock for messages that belong together.

        An error between them, such as Ctrl-C, would leave the ranks out of step, so it ends the group. A pass that
        did not fit in memory does not.
        """
        with self.lock:
            try:
                yield
            except (RankError, OutOfMemory):
                raise
            except BaseException as error:
                self.fail(RankError(0, f"rank 0 failed: {summary(error)}"))
                raise

    def fail(self, error: RankError) -> RankError:
        """End the group with an error. Keep it, and send it to every rank that can still be reached."""
        if self.error is None:
            self.error = error
            for rank, link in self.connections.links.items():
                if rank != error.rank:
                    # If this fails, the rank reports that rank 0 is gone.
                    with suppress(RankError):
                        link.flush(SHUTDOWN_TIMEOUT)
                        link.send("failed", rank=error.rank, text=str(error))
                        link.flush(SHUTDOWN_TIMEOUT)
        return self.error

    def close(self) -> None:
        """End the other ranks. Their processes exit with ``SystemExit(0)``."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        for link in self.connections.links.values() if self.error is None else ():
            with suppress(RankError):
                link.send("stop")
                link.flush()
        self.connections.close()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except RankError as error:
            raise self.fail(error) from error.__cause__

    def _send_heartbeats(self) -> None:
        """Tell the other ranks that rank 0 is alive while no other messages are sent."""
        while not self._closed.wait(self.connections.timeout / 3):
            if self.lock.acquire(blocking=False):
                try:
                    if self.error is not None or self._closed.is_set():
                        return
                    self.broadcast("heartbeat")
                except RankError:
                    return  # the group keeps the error, and the next step raises it
                finally:
                    self.lock.release()


def join(
    make_target: Callable[[], Target],
    connections: Connections,
    model: Model,
    differ: Differ,
) -> RankGroup:
    """Join all ranks. Rank 0 gets the group; the other ranks serve it until it ends.

    Then they exit with ``SystemExit(0)``, so this function returns only on rank 0.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        connections: from ``start``.
        model: the model of the targets.
        differ: compares two ranks' logits of one token, (V,) each; returns the difference as a phrase, or "".

    Raises:
        SettingsError: the ranks do not have the same model.
        SystemExit: raised on the other ranks when the group has ended, or if rank 0 has nothing to decode.
        RankError: raised on the other ranks; it names the rank that died, hangs or failed.
    """
    check_same_model(connections, make_target(), model)
    if connections.rank == 0:
        return RankGroup(make_target, connections, differ)
    serve(connections.links[0], make_target)
    connections.close()
    raise SystemExit(0)

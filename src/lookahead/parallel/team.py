"""Rank 0's hold on the other ranks: telling, hearing, keeping them waiting, and ending all when one fails."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ..core import Target
from .errors import RankError
from .group import Group, compare
from .wire import Kind, Status, pack_text, unpack_text

if TYPE_CHECKING:
    from .target import ParallelTarget

#: Seconds that each rank is given to hear why all must end.
FAREWELL = 5.0


class Team:
    """All ranks, seen from rank 0. Made by ``join``.

    It may have several targets at once, used by several threads: one step is evaluated at a time.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        group: from ``start``.
        model: the torch module behind the targets; None takes their attribute ``model``.
        check_every: steps between two comparisons of the ranks' logits at the root; their tokens are
            compared in every step.

    Attributes:
        lock: held while the other ranks are at work.
        error: what ended the team; every later use raises it.
    """

    def __init__(
        self,
        make_target: Callable[[], Target],
        group: Group,
        model: Any = None,
        check_every: int = 16,
    ) -> None:
        if group.rank != 0:
            raise AssertionError(f"rank {group.rank} must follow, only rank 0 leads")
        compare(group, make_target(), model)
        self.make_target = make_target
        self.group = group
        self.check_every = max(1, check_every)
        self.lock = threading.RLock()
        self.error: RankError | None = None
        self._numbers = count(1)
        # Targets that were collected; the other ranks are told at the next order (a finaliser may run
        # at any moment, also in the middle of a frame).
        self._retired: deque[int] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._keep_alive, daemon=True, name="lookahead-pulse").start()
        atexit.register(self.close)

    @property
    def bytes_exchanged(self) -> int:
        """Bytes that rank 0 has sent and received."""
        return sum(link.sent + link.received for link in self.group.links.values())

    def target(self) -> ParallelTarget:
        """A fresh target that all ranks evaluate together."""
        from .target import ParallelTarget

        if self._closed.is_set():
            raise RankError(0, "this team is closed and its ranks are gone; join them again")
        number = next(self._numbers)
        target = ParallelTarget(self, number)
        weakref.finalize(target, self._retired.append, number)
        return target

    def tell(self, rank: int, kind: Kind, target: int = 0, numbers: Sequence[int] = ()) -> None:
        """Send an order to one rank."""
        if self.error is not None:
            raise self.error
        try:
            while self._retired:
                number = self._retired.popleft()
                for link in self.group.links.values():
                    link.send(Kind.RETIRE, number)
            self.group.links[rank].send(kind, target, numbers)
        except RankError as error:
            raise self.fail(error) from error

    def tell_all(self, kind: Kind, target: int = 0, numbers: Sequence[int] = ()) -> None:
        """Send an order to every other rank."""
        for rank in self.group.links:
            self.tell(rank, kind, target, numbers)

    def hear(self, rank: int) -> list[int]:
        """A rank's answer, status first."""
        try:
            _, _, numbers = self.group.links[rank].receive()
        except RankError as error:
            raise self.fail(error) from error
        if numbers[0] == Status.FAILED:
            raise self.fail(RankError(rank, f"rank {rank} failed: {unpack_text(numbers[3:])}"))
        return numbers

    def fail(self, error: RankError) -> RankError:
        """Remember the error and tell it to every rank that can still hear it."""
        if self.error is None:
            self.error = error
            for rank, link in self.group.links.items():
                if rank == error.rank:
                    continue
                try:
                    link.flush(FAREWELL)
                    link.send(Kind.FAIL, 0, [error.rank, *pack_text(str(error))])
                    link.flush(FAREWELL)
                except RankError:
                    continue  # it will find rank 0 gone, which is also an end with a name
        return self.error

    def close(self) -> None:
        """Let the other ranks go; they return from ``follow``."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        for link in self.group.links.values() if self.error is None else ():
            try:
                link.send(Kind.STOP)
                link.flush()
            except RankError as error:
                self.error = self.error or error
        self.group.close()

    def _keep_alive(self) -> None:
        """While nothing is asked of the other ranks, tell them that rank 0 lives."""
        while not self._closed.wait(self.group.timeout / 3):
            if self.lock.acquire(blocking=False):
                try:
                    if self.error is not None or self._closed.is_set():
                        return
                    self.tell_all(Kind.PING)
                except RankError:
                    return  # remembered, and raised by the next step
                finally:
                    self.lock.release()

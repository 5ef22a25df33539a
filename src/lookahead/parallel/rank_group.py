"""All ranks together: seen from rank 0 (send, receive, heartbeat, one end for all), and the work of the others."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch

from ..core import OutOfMemory, Target, TokenTree
from .connect import Connections, check_same_model
from .executor import RankExecutor
from .wire import Link, Message, RankError, first_line

#: Seconds that each rank is given to take the message why all must end.
SHUTDOWN_TIMEOUT = 5.0


class RankGroup:
    """What stands for all ranks on rank 0. Made by ``join``, with its arguments.

    It may have several ``ParallelTarget`` at once, used by several threads: one step is evaluated at a time.

    Attributes:
        lock: held while the other ranks are at work.
        error: what ended the group; every later use raises it.
    """

    def __init__(
        self, make_target: Callable[[], Target], connections: Connections, model: Any, check_every: int
    ) -> None:
        check_same_model(connections, make_target(), model)
        self.make_target = make_target
        self.connections = connections
        self.check_every = max(1, check_every)
        self.lock = threading.RLock()
        self.error: RankError | None = None
        self._numbers = count(1)
        # Targets that were collected. The other ranks are told with the next message: a finaliser may run at
        # any moment, also in the middle of one.
        self._retired: deque[int] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="lookahead-heartbeat").start()
        atexit.register(self.close)

    @property
    def bytes_exchanged(self) -> int:
        """Bytes that rank 0 has sent and received."""
        return sum(link.sent + link.received for link in self.connections.links.values())

    def register(self, target: object) -> int:
        """The number by which the other ranks know a new target; they free theirs once it is collected."""
        if self._closed.is_set():
            raise RankError(0, "this group is closed and its ranks are gone; join them again")
        number = next(self._numbers)
        weakref.finalize(target, self._retired.append, number)
        return number

    def send(self, rank: int, kind: str, **fields: Any) -> None:
        """Send a message to one rank."""
        if self.error is not None:
            raise self.error
        links = self.connections.links
        with self._failing_together():
            while self._retired:
                number = self._retired.popleft()
                for link in links.values():
                    link.send("retire", target=number)
            links[rank].send(kind, **fields)

    def broadcast(self, kind: str, **fields: Any) -> None:
        """Send a message to every other rank."""
        for rank in self.connections.links:
            self.send(rank, kind, **fields)

    def receive(self, rank: int) -> Message:
        """A rank's answer."""
        with self._failing_together():
            answer = self.connections.links[rank].receive()
            if answer["kind"] == "failed":
                raise RankError(rank, f"rank {rank} failed: {answer['text']}")
        return answer

    def receive_row(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """The row of logits that was asked of a rank, of the shape, dtype and device of ``like``."""
        with self._failing_together():
            return self.connections.links[rank].receive_row(like)

    def fail(self, error: RankError) -> RankError:
        """Keep the error and send it to every rank that can still be reached."""
        if self.error is None:
            self.error = error
            for rank, link in self.connections.links.items():
                if rank != error.rank:
                    # Where this fails the rank will find rank 0 gone, which is also an end with a name.
                    with suppress(RankError):
                        link.flush(SHUTDOWN_TIMEOUT)
                        link.send("failed", rank=error.rank, text=str(error))
                        link.flush(SHUTDOWN_TIMEOUT)
        return self.error

    def close(self) -> None:
        """Let the other ranks go: their processes leave with ``SystemExit(0)``."""
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
        """While nothing is asked of the other ranks, tell them that rank 0 is alive."""
        while not self._closed.wait(self.connections.timeout / 3):
            if self.lock.acquire(blocking=False):
                try:
                    if self.error is not None or self._closed.is_set():
                        return
                    self.broadcast("heartbeat")
                except RankError:
                    return  # kept, and raised by the next step
                finally:
                    self.lock.release()


def join(
    make_target: Callable[[], Target], connections: Connections, model: Any = None, check_every: int = 16
) -> RankGroup:
    """On rank 0 the group of all ranks; the other ranks work for it until it ends.

    Then they leave with ``SystemExit(0)``: on any rank but 0 this does not return.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        connections: from ``start``.
        model: the torch module behind the targets; None takes their attribute ``model``.
        check_every: steps between two comparisons of whole rows of logits; argmaxes are compared in every step.

    Raises:
        SettingsError: the ranks do not hold the same model.
        RankError: on the other ranks, naming the rank that died, hangs or failed.
    """
    if connections.rank == 0:
        return RankGroup(make_target, connections, model, check_every)
    check_same_model(connections, make_target(), model)
    _serve(connections.links[0], make_target)
    connections.close()
    raise SystemExit(0)


def _serve(link: Link, make_target: Callable[[], Target]) -> None:
    """Do what rank 0 asks for, until it says stop."""
    executors: dict[int, RankExecutor] = defaultdict(lambda: RankExecutor(make_target()))
    while (message := link.receive())["kind"] != "stop":
        if message["kind"] == "failed":
            raise RankError(message["rank"], message["text"])
        try:
            _execute(link, executors, message)
        except RankError:
            raise
        except BaseException as error:
            if isinstance(error, OutOfMemory) and message["kind"] in ("prefill", "forward"):
                link.send("no_memory", text=first_line(error))
                continue
            link.send("failed", text=f"{type(error).__name__}: {first_line(error, 400)}")
            link.flush()
            raise


def _execute(link: Link, executors: dict[int, RankExecutor], message: Message) -> None:
    if message["kind"] == "heartbeat":
        return
    if message["kind"] == "retire":
        executors.pop(message["target"], None)
        return
    executor = executors[message["target"]]
    answer: dict[str, Any] = {}
    row = None
    match message["kind"]:
        case "commit":
            return executor.commit(message["accepted"])
        case "release":
            return executor.release(message["slot"])
        case "prefill":
            answer["best"] = [[one.best_or_nan(0)] for one in executor.prefill(message["prompts"])]
        case "forward":
            trees = []
            for slot, tokens, parents, needs_logits in message["trees"]:
                trees.append((slot, TokenTree.of(tokens, parents)))
                trees[-1][1].needs_logits = needs_logits
            answer["best"] = [
                [one.best_or_nan(node) if needed else -1 for node, needed in enumerate(tree.needs_logits)]
                for one, (_, tree) in zip(executor.forward(trees), trees, strict=True)
            ]
        case "row":
            row = executor.scores[message["b"]].row_tensor(message["row"])
        case "top":
            scores = executor.scores[message["b"]]
            answer["ids"], answer["log_odds"] = scores.top(message["rows"], message["k"])
        case kind:
            raise AssertionError(f"rank 0 sent {kind!r}, which no rank knows")
    link.send("done", checksum=executor.checksum, **answer)
    if row is not None:
        link.send_row(row)

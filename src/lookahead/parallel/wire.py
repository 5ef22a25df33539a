"""Messages between rank 0 and one other rank: frames of whole numbers in tensors, never pickled objects.

A frame is a tensor of ``FRAME`` int64: [kind, target, length, numbers ...]; where the numbers do not fit,
the rest follows in a second tensor. Every pair (rank 0, rank r) has a process group of its own, because gloo
gives up all connections of a group when one of them times out, and the others must still be told why.

These numbers are made and read by Python on the host, so they travel by gloo on every machine; only rows of
logits are worth a device's own network.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from ..core import TokenTree
from .errors import RankError

FRAME = 512
HEAD = 3


class Kind(IntEnum):
    """What a frame asks for, or brings."""

    HELLO = 1
    VERDICT = 2
    PREFILL = 3
    FORWARD = 4
    COMMIT = 5
    RELEASE = 6
    ROW = 7
    TOP = 8
    SETTLE = 9
    RETIRE = 10
    PING = 11
    STOP = 12
    FAIL = 13
    ANSWER = 14


class Status(IntEnum):
    """How a rank's part of a step ended."""

    DONE = 0
    MEMORY = 1
    FAILED = 2


class Link:
    """One pair's connection, seen from one end.

    Args:
        peer: the rank at the other end.
        group: gloo process group of this pair.
        timeout: seconds after which a silent peer counts as hung.
        rows: process group for rows of logits on a device (nccl); None sends them by gloo.
    """

    def __init__(self, peer: int, group: Any, timeout: float, rows: Any = None) -> None:
        self.peer = peer
        self.timeout = timeout
        self.sent = 0
        self.received = 0
        self._group = group
        self._rows = rows
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def send(self, kind: Kind, target: int = 0, numbers: Sequence[int] = ()) -> None:
        """Send without waiting for the peer to take it; at most one frame is under way."""
        self.flush()
        frame = torch.zeros(FRAME, dtype=torch.int64)
        head = [int(kind), target, len(numbers), *numbers[: FRAME - HEAD]]
        frame[: len(head)] = torch.tensor(head)
        self._post(frame)
        if len(numbers) > FRAME - HEAD:
            self._post(torch.tensor(numbers[FRAME - HEAD :]))

    def receive(self) -> tuple[Kind, int, list[int]]:
        """Wait for a frame: (kind, target, numbers). Raises RankError: the peer is gone or silent."""
        frame = self._take(torch.empty(FRAME, dtype=torch.int64))
        kind, target, length, *numbers = frame.tolist()
        if length > FRAME - HEAD:
            rest = self._take(torch.empty(length - FRAME + HEAD, dtype=torch.int64))
            return Kind(kind), target, numbers + rest.tolist()
        return Kind(kind), target, numbers[:length]

    def send_row(self, row: torch.Tensor) -> None:
        """Send one row of logits, shape (V,)."""
        self.flush()
        self.sent += row.numel() * row.element_size()
        if self._rows is not None:
            dist.send(row.contiguous(), self.peer, group=self._rows)
        else:
            self._post(row.detach().cpu().contiguous().view(torch.uint8), counted=True)

    def receive_row(self, like: torch.Tensor) -> torch.Tensor:
        """Receive a row of the shape, dtype and device of ``like``."""
        if self._rows is not None:
            row = torch.empty_like(like)
            work = dist.irecv(row, self.peer, group=self._rows)
            # The device would wait without end for a peer that dies now; the host looks and gives up.
            end = monotonic() + self.timeout
            while not work.is_completed():
                if monotonic() > end:
                    raise self._blame(RuntimeError("timed out"))
                sleep(0)
            work.wait()
            self.received += row.numel() * row.element_size()
            return row
        data = self._take(torch.empty(like.numel() * like.element_size(), dtype=torch.uint8))
        return data.view(like.dtype).to(like.device)

    def flush(self, within: float | None = None) -> None:
        """Wait until the peer has taken what was sent, ``timeout`` seconds at most unless told otherwise."""
        for work, _ in self._in_flight:
            self._wait(work, within)
        self._in_flight.clear()

    def _post(self, tensor: torch.Tensor, counted: bool = False) -> None:
        if not counted:
            self.sent += tensor.numel() * tensor.element_size()
        try:
            self._in_flight.append((dist.isend(tensor, self.peer, group=self._group), tensor))
        except RuntimeError as error:
            raise self._blame(error) from error

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            work = dist.irecv(tensor, self.peer, group=self._group)
        except RuntimeError as error:
            raise self._blame(error) from error
        self._wait(work)
        self.received += tensor.numel() * tensor.element_size()
        return tensor

    def _wait(self, work: Any, within: float | None = None) -> None:
        try:
            work.wait(timedelta(seconds=within if within is not None else self.timeout))
        except RuntimeError as error:
            raise self._blame(error) from error

    def _blame(self, error: Exception) -> RankError:
        self._in_flight.clear()
        if "timed out" in str(error).lower():
            return RankError(
                self.peer,
                f"rank {self.peer} did not answer within {self.timeout:g} s: it hangs, or its step takes "
                "longer than the timeout (raise the timeout if so)",
            )
        first_line = (str(error).splitlines() or [""])[0][:120]
        return RankError(self.peer, f"rank {self.peer} is gone: its connection is closed ({first_line})")


def pack_tree(tree: TokenTree) -> list[int]:
    """One number per row: token, parent and read flag."""
    return [
        token << 32 | (parent + 1) << 1 | read
        for token, parent, read in zip(tree.tokens, tree.parents, tree.needs_logits, strict=True)
    ]


def unpack_tree(numbers: Sequence[int]) -> TokenTree:
    """The inverse of ``pack_tree``; the root always counts as read."""
    tree = TokenTree(numbers[0] >> 32)
    for number in numbers[1:]:
        tree.add(number >> 32, (number >> 1 & 0x7FFFFFFF) - 1, bool(number & 1))
    return tree


def pack_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    """Several lists of numbers in one."""
    packed = [len(lists)]
    for numbers in lists:
        packed.append(len(numbers))
        packed += numbers
    return packed


def unpack_lists(packed: Sequence[int]) -> Iterator[list[int]]:
    """The inverse of ``pack_lists``."""
    place = 1
    for _ in range(packed[0]):
        length = packed[place]
        yield list(packed[place + 1 : place + 1 + length])
        place += 1 + length


def pack_text(text: str) -> list[int]:
    """UTF-8, seven bytes to a number; cut to what fits in one frame."""
    data = text.encode()[:2048]
    return [len(data), *(int.from_bytes(data[i : i + 7], "little") for i in range(0, len(data), 7))]


def unpack_text(numbers: Sequence[int]) -> str:
    """The inverse of ``pack_text``."""
    data = b"".join(number.to_bytes(7, "little") for number in numbers[1:])
    return data[: numbers[0]].decode(errors="replace")


def pack_floats(values: Sequence[float]) -> list[int]:
    """Each double's bits as one number."""
    return list(struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values)))


def unpack_floats(numbers: Sequence[int]) -> list[float]:
    """The inverse of ``pack_floats``."""
    return list(struct.unpack(f"<{len(numbers)}d", struct.pack(f"<{len(numbers)}q", *numbers)))

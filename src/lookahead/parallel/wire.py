"""Messages between rank 0 and one other rank, as JSON in byte tensors (never pickled objects), and their errors.

    before a pass        rank 0   forward            tokens, parents and "needs logits" of the rank's rows
                         rank 0   prefill, release   the prompts; a slot that is free again
    after a pass         rank r   done               argmaxes of its rows and of the root, a checksum of all tokens
                         rank r   no_memory          the pass did not fit
    after verification   rank 0   commit             the accepted tokens
    on request           both     row, top; done     one row of logits; the k best tokens of some rows
    when idle            rank 0   heartbeat          rank 0 is alive
    at the end           rank 0   retire, stop       a target is no longer used; decoding is over
                         both     failed             an error and the rank at fault

A message is sent through gloo in a tensor of ``FRAME`` bytes that begins with its length; the rest of a longer
message follows in a second tensor. Every pair (rank 0, rank r) has its own process group, because gloo closes all
connections of a group when one of them times out, and the other ranks must still receive the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from ..core import LookaheadError
from ..core.errors import first_line

#: Bytes of a message's first tensor, and of the length that it begins with.
FRAME = 4096
HEAD = 8

Message = dict[str, Any]


class RankError(LookaheadError):
    """A rank died, did not answer in time, or failed, and decoding cannot continue. ``rank`` is the rank at fault."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class DivergenceError(RankError):
    """A rank has different tokens from rank 0, or computes different logits."""


class Link:
    """One end of a connection between two ranks. All methods raise RankError if the peer is gone or silent.

    Args:
        peer: the rank at the other end.
        group: gloo process group of this pair.
        timeout: seconds after which a silent peer is considered hung.
        rows: process group for rows of logits on a device (nccl); None to send them through gloo.

    Attributes:
        exchanged: bytes sent and received so far.
    """

    def __init__(self, peer: int, group: Any, timeout: float, rows: Any = None) -> None:
        self.peer = peer
        self.timeout = timeout
        self.exchanged = 0
        self._group = group
        self._rows = rows
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message without waiting until the peer receives it; at most one message is in flight."""
        self.flush()
        # ``int`` converts token ids of another library's integer types.
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":"), default=int).encode()
        data = (len(data).to_bytes(HEAD, "little") + data).ljust(FRAME, b"\0")
        for part in filter(None, (data[:FRAME], data[FRAME:])):
            self._send_bytes(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> Message:
        """Wait for a message."""
        data = bytes(self._receive_bytes(FRAME).numpy())
        end = HEAD + int.from_bytes(data[:HEAD], "little")
        if end > FRAME:
            data += bytes(self._receive_bytes(end - FRAME).numpy())
        message: Message = json.loads(data[HEAD:end])
        return message

    def send_row(self, row: torch.Tensor) -> None:
        """Send one row of logits, shape (V,)."""
        self.flush()
        if self._rows is None:
            self._send_bytes(row.detach().cpu().contiguous().view(torch.uint8))
        else:
            self.exchanged += row.nbytes
            dist.send(row.contiguous(), self.peer, group=self._rows)

    def receive_row(self, like: torch.Tensor) -> torch.Tensor:
        """Receive a row with the shape, dtype and device of ``like``."""
        if self._rows is None:
            return self._receive_bytes(like.nbytes).view(like.dtype).to(like.device)
        row = torch.empty_like(like)
        work: Any = dist.irecv(row, self.peer, group=self._rows)
        # If the peer died now, the device would wait forever, so the host polls until the timeout.
        end = monotonic() + self.timeout
        while not work.is_completed():
            if monotonic() > end:
                raise self._rank_error("timed out")
            sleep(0)
        work.wait()
        self.exchanged += row.nbytes
        return row

    def flush(self, within: float | None = None) -> None:
        """Wait until the peer has received everything, for at most ``within`` seconds (default: ``timeout``)."""
        with self._naming_the_peer():
            for work, _ in self._in_flight:
                work.wait(timedelta(seconds=within if within is not None else self.timeout))
        self._in_flight.clear()

    def _send_bytes(self, data: torch.Tensor) -> None:
        self.exchanged += data.nbytes
        with self._naming_the_peer():
            self._in_flight.append((dist.isend(data, self.peer, group=self._group), data))

    def _receive_bytes(self, size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        with self._naming_the_peer():
            work: Any = dist.irecv(data, self.peer, group=self._group)
            work.wait(timedelta(seconds=self.timeout))
        self.exchanged += size
        return data

    @contextmanager
    def _naming_the_peer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._in_flight.clear()
            raise self._rank_error(first_line(error, 1000)) from error

    def _rank_error(self, why: str) -> RankError:
        if "timed out" in why.lower():
            text = f"did not answer within {self.timeout:g} s: it hangs, or its step takes longer than the timeout"
            return RankError(self.peer, f"rank {self.peer} {text} (raise the timeout if so)")
        return RankError(self.peer, f"rank {self.peer} is gone: its connection is closed ({why[:120]})")

"""The other ranks: evaluate what rank 0 sends, until it lets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import OutOfMemory, Target
from .errors import RankError
from .group import Group, compare
from .share import Share, best_or_nan, sketch
from .wire import Kind, Link, Status, pack_floats, pack_text, unpack_lists, unpack_text, unpack_tree


def follow(make_target: Callable[[], Target], group: Group, model: Any = None) -> None:
    """Work for rank 0; returns when rank 0 closes its team.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        group: from ``start``; any rank but 0.
        model: the torch module behind the targets; None takes their attribute ``model``.

    Raises:
        SettingsError: this or another rank holds another model.
        RankError: rank 0 or, as it told, another rank died, hangs or failed.
    """
    compare(group, make_target(), model)
    worker = _Worker(make_target, group.links[0])
    while worker.serve():
        pass


class _Part:
    """What this rank holds for one of rank 0's targets: its share, and the last step's scores."""

    def __init__(self, target: Target) -> None:
        self.share = Share(target)
        self.scores: list[Any] = []
        self.offsets: list[int] = []


class _Worker:
    def __init__(self, make_target: Callable[[], Target], link: Link) -> None:
        self.make_target = make_target
        self.link = link
        self.parts: dict[int, _Part] = {}

    def serve(self) -> bool:
        """One order of rank 0's; False when it was the last."""
        kind, number, numbers = self.link.receive()
        if kind is Kind.STOP:
            return False
        if kind is Kind.FAIL:
            raise RankError(numbers[0], unpack_text(numbers[1:]))
        if kind is Kind.PING:
            return True
        if kind is Kind.RETIRE:
            self.parts.pop(number, None)
            return True
        try:
            self._obey(kind, number, numbers)
        except OutOfMemory as error:
            if kind not in (Kind.PREFILL, Kind.FORWARD):
                raise
            self.link.send(Kind.ANSWER, 0, [Status.MEMORY, 0, 0, *pack_text(str(error))])
        except RankError:
            raise
        except BaseException as error:
            first_line = (str(error).splitlines() or [""])[0][:400]
            text = pack_text(f"{type(error).__name__}: {first_line}")
            self.link.send(Kind.ANSWER, 0, [Status.FAILED, 0, 0, *text])
            self.link.flush()
            raise
        return True

    def _obey(self, kind: Kind, number: int, numbers: list[int]) -> None:
        part = self.parts.get(number)
        if part is None:
            part = self.parts[number] = _Part(self.make_target())
        if kind is Kind.PREFILL:
            prompts = [(slot, prompt) for slot, *prompt in unpack_lists(numbers)]
            scores = part.share.prefill(prompts)
            self._answer(part, [], [sketch(one, 0) for one in scores])
        elif kind is Kind.FORWARD:
            self._forward(part, bool(numbers[0]), list(unpack_lists(numbers[1:])))
        elif kind is Kind.COMMIT:
            orders = [(slot, rest[:n], rest[n:]) for slot, n, *rest in unpack_lists(numbers)]
            part.share.commit(orders)
        elif kind is Kind.RELEASE:
            part.share.release(numbers[0])
        elif kind is Kind.SETTLE:
            part.share.pay_all()
            part.share.checksum = numbers[0]
        elif kind is Kind.ROW:
            self._send_row(part, *numbers)
        elif kind is Kind.TOP:
            self._send_top(part, *numbers[:2], numbers[2:])
        else:
            raise AssertionError(f"rank 0 sent {kind.name}, which is no order")

    def _forward(self, part: _Part, check: bool, lists: Sequence[Sequence[int]]) -> None:
        trees = [(slot, unpack_tree(packed)) for slot, *packed in lists]
        part.scores, part.offsets = part.share.forward(trees)
        best, sketches = [], []
        for (_, tree), scores, offset in zip(trees, part.scores, part.offsets, strict=True):
            best += [best_or_nan(scores, offset + row) for row, read in enumerate(tree.needs_logits) if read]
            if check:
                sketches.append(sketch(scores, offset))
        self._answer(part, best, sketches)

    def _answer(self, part: _Part, best: list[int], sketches: list[list[float]]) -> None:
        floats = pack_floats([value for one in sketches for value in one])
        head = [Status.DONE, part.share.checksum, len(best)]
        self.link.send(Kind.ANSWER, 0, [*head, *best, *floats])

    def _send_row(self, part: _Part, b: int, row: int) -> None:
        values = part.scores[b].row(part.offsets[b] + row)
        self._answer(part, [], [])
        self.link.send_row(values if torch.is_tensor(values) else torch.tensor(values, dtype=torch.float64))

    def _send_top(self, part: _Part, b: int, k: int, rows: Sequence[int]) -> None:
        ids, odds = part.scores[b].top([part.offsets[b] + row for row in rows], k)
        flat_ids = [int(value) for line in ids for value in line]
        flat_odds = [float(value) for line in odds for value in line]
        columns = len(flat_ids) // len(rows)
        head = [Status.DONE, part.share.checksum, 0]
        self.link.send(Kind.ANSWER, 0, [*head, columns, *flat_ids, *pack_floats(flat_odds)])

"""The other ranks: evaluate what rank 0 sends, until it lets go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core import OutOfMemory, Target, TokenTree
from .connect import Connections
from .errors import RankError, first_line
from .executor import RankExecutor
from .model_check import check_same_model
from .rank_group import RankGroup
from .wire import Link, Message


def join(
    make_target: Callable[[], Target], connections: Connections, model: Any = None, check_every: int = 16
) -> RankGroup:
    """On rank 0 the group of all ranks; the other ranks work for it until it ends, and then exit.

    On any rank but 0 this does not return: once rank 0 has closed the group, or ended, the process leaves
    with ``SystemExit(0)``.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        connections: from ``start``.
        model: the torch module behind the targets; None takes their attribute ``model``.
        check_every: steps between two comparisons of the ranks' whole rows of logits at the root; their argmaxes
            are compared in every step.

    Raises:
        SettingsError: the ranks do not hold the same model.
        RankError: on the other ranks, naming the rank that died, hangs or failed.
    """
    if connections.rank == 0:
        return RankGroup(make_target, connections, model, check_every)
    check_same_model(connections, make_target(), model)
    worker = _Worker(make_target, connections.links[0])
    while worker.serve():
        pass
    connections.close()
    raise SystemExit(0)


class _Worker:
    def __init__(self, make_target: Callable[[], Target], link: Link) -> None:
        self.make_target = make_target
        self.link = link
        self.executors: dict[int, RankExecutor] = {}

    def serve(self) -> bool:
        """Do what one message of rank 0's asks for; False when it was the last."""
        message = self.link.receive()
        try:
            return self._execute(message)
        except OutOfMemory as error:
            if message["kind"] not in ("prefill", "forward"):
                raise
            self.link.send("no_memory", text=first_line(error))
        except RankError:
            raise
        except BaseException as error:
            self.link.send("failed", text=f"{type(error).__name__}: {first_line(error, 400)}")
            self.link.flush()
            raise
        return True

    def _execute(self, message: Message) -> bool:
        match message["kind"]:
            case "stop":
                return False
            case "failed":
                raise RankError(message["rank"], message["text"])
            case "retire":
                self.executors.pop(message["target"], None)
            case "heartbeat":
                pass
            case kind:
                number = message["target"]
                if number not in self.executors:
                    self.executors[number] = RankExecutor(self.make_target())
                self._step(self.executors[number], kind, message)
        return True

    def _step(self, executor: RankExecutor, kind: str, message: Message) -> None:
        match kind:
            case "prefill":
                scores = executor.prefill(message["prompts"])
                self._done(executor, best=[[one.best_or_nan(0)] for one in scores])
            case "forward":
                trees = []
                for slot, tokens, parents, needs_logits in message["trees"]:
                    tree = TokenTree.of(tokens, parents)
                    tree.needs_logits = needs_logits
                    trees.append((slot, tree))
                best = [
                    [one.best_or_nan(row) for row in tree.needs_logits_nodes()]
                    for one, (_, tree) in zip(executor.forward(trees), trees, strict=True)
                ]
                self._done(executor, best=best)
            case "commit":
                executor.commit(message["paths"])
            case "release":
                executor.release(message["slot"])
            case "row":
                row = executor.scores[message["b"]].row_tensor(message["row"])
                self._done(executor)
                self.link.send_row(row)
            case "top":
                ids, log_odds = executor.scores[message["b"]].top(message["rows"], message["k"])
                self._done(executor, ids=ids, log_odds=log_odds)
            case _:
                raise AssertionError(f"rank 0 sent {kind!r}, which no rank knows")

    def _done(self, executor: RankExecutor, **fields: Any) -> None:
        self.link.send("done", checksum=executor.checksum, **fields)

"""The other ranks: evaluate what rank 0 sends, until it lets go."""

from __future__ import annotations

from collections import defaultdict
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
    kind: str = message["kind"]
    number: int = message.get("target", 0)
    if kind == "heartbeat":
        return
    if kind == "retire":
        executors.pop(number, None)
        return
    executor = executors[number]
    answer: dict[str, Any] = {}
    row = None
    match kind:
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
            answer["ids"], answer["log_odds"] = executor.scores[message["b"]].top(
                message["rows"], message["k"]
            )
        case _:
            raise AssertionError(f"rank 0 sent {kind!r}, which no rank knows")
    link.send("done", checksum=executor.checksum, **answer)
    if row is not None:
        link.send_row(row)

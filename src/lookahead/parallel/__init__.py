"""Lookahead parallelism (paper, section 3.4): one sequence's rows spread over several devices.

Every rank holds the whole model. Each step's tree is cut into parent-closed shards, one per rank; nothing is
exchanged inside a forward pass, and after it a few kilobytes of whole numbers are.

    shard    which rows each rank evaluates                (trees only)
    share    what each rank does with its shard, and how it catches up on rows it lacks
    wire     frames of whole numbers between rank 0 and another rank
    group    how the ranks find each other and compare what they hold
    team     rank 0's hold on the others
    target   rank 0: a ``Target`` like any other; ``scores`` its logits
    worker   the other ranks

Every process runs the same program:

    group = parallel.start()
    team = parallel.join(lambda: make_target(model), group, model)   # only rank 0 gets past this line
    target = team.target()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core import Target
from .errors import DivergenceError, RankError
from .group import TIMEOUT, Group, dismiss, local_device, start, started_by_torchrun
from .shard import Shards, shard
from .target import ParallelTarget
from .team import Team
from .worker import follow

__all__ = [
    "TIMEOUT",
    "DivergenceError",
    "Group",
    "ParallelTarget",
    "RankError",
    "Shards",
    "Team",
    "dismiss",
    "follow",
    "join",
    "local_device",
    "shard",
    "start",
    "started_by_torchrun",
]


def join(make_target: Callable[[], Target], group: Group, model: Any = None, check_every: int = 16) -> Team:
    """On rank 0 the team of all ranks; the other ranks work for it until it ends, and then exit.

    On any rank but 0 this does not return: once rank 0 has closed the team, or ended, the process leaves
    with ``SystemExit(0)``. Use ``follow`` for a call that returns.

    Args:
        make_target: makes a fresh inner target on this rank's model.
        group: from ``start``.
        model: the torch module behind the targets; None takes their attribute ``model``.
        check_every: steps between two comparisons of the ranks' logits at the root beyond their argmax.

    Raises:
        SettingsError: the ranks do not hold the same model.
        RankError: on the other ranks, naming the rank that died, hangs or failed.
    """
    if group.rank == 0:
        return Team(make_target, group, model, check_every)
    follow(make_target, group, model)
    group.close()
    raise SystemExit(0)

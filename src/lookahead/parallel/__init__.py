"""Lookahead parallelism (paper, section 3.4): the rows of one sequence are evaluated on several devices.

Every rank has the whole model. Each step's tree is divided into parent-closed shards, one per rank (drawn in
``shard``). Ranks exchange nothing during a forward pass, and only a few kilobytes after it.

Every process runs the same program:

    connections = parallel.start()
    rank_group = parallel.join(lambda: make_target(model), connections, model, differ)   # only rank 0 gets past this
    target = parallel.ParallelTarget(rank_group)
"""

from __future__ import annotations

from .connect import TIMEOUT, Connections, dismiss, local_device, start
from .parallel_target import ParallelTarget
from .rank_group import RankGroup, join
from .shard import Shards, shard
from .wire import DivergenceError, RankError

__all__ = [
    "TIMEOUT",
    "Connections",
    "DivergenceError",
    "ParallelTarget",
    "RankError",
    "RankGroup",
    "Shards",
    "dismiss",
    "join",
    "local_device",
    "shard",
    "start",
]

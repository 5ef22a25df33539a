"""Learns from a model's own text in steps, each of which ends with a better table; run by ``server.idle_learner``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from ..core import LookaheadError
from ..drafters import Plain
from ..options import LoadOptions
from .table_learner import Goal, Learner

#: Tokens between two tables, and the number after which more text adds little.
STEP, MOST = 20_000, 400_000


def main(options: str) -> None:
    """Learn until the model's own text has ``MOST`` tokens, or the server has ended. An error is one line on stderr.

    Args:
        options: the fields of ``LoadOptions`` that are not defaults, in JSON.
    """
    from ..loading import load_with

    server = os.getppid()

    def progress(*_: object) -> None:
        if os.getppid() != server:
            sys.exit("the server has ended")

    try:
        learner = Learner(load_with(replace(LoadOptions(**json.loads(options)), drafter=Plain())))
        while learner.folder.tokens < MOST:
            learner.write(Goal(tokens=learner.folder.tokens + STEP), progress)
            learner.build()
    except LookaheadError as error:
        sys.exit(str(error))

"""The target's tokens at the same position in the last step: each row's answer to what follows it.

They are a feature of the joint bucket: a token may be the position's likeliest answer, or a later one.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from ....machine_code import compiled
from ..calibration import AGREEMENT
from ..layout import index_of
from .source import Setup, Source

#: Largest number of answers kept per position.
ANSWERS = 3
#: The joint bucket's feature: this token was the position's first answer, or a later one; 0 is no answer.
ANSWERED_BEST, ANSWERED_LATER = 1, 2


class Answers(NamedTuple):
    """The last step's answers."""

    # (depths, ANSWERS): tokens by depth below the root, likeliest first; -1 for none
    tokens: Annotated[Any, "i8", 2]


@compiled
def _refine(memory: Any, own: Answers, node: int, number: int) -> None:
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    if row.depth >= len(own.tokens):
        return
    answered = ANSWERED_BEST
    for token in own.tokens[row.depth]:
        if token < 0:
            break
        index = index_of(proposals, row.proposals, token)
        if index < 0:
            index = row.proposals
            row.proposals += 1
            proposals[index].token, proposals[index].source = token, number
            proposals[index].joint = row.rest
        proposals[index].joint += answered * AGREEMENT
        proposals[index].probability = memory.joint[proposals[index].joint].probability
        answered = ANSWERED_LATER


@compiled
def _learn(memory: Any, own: Answers, ids: Any, odds: Any, length: int) -> None:
    """Keep the target's tokens under this step's rows, by depth below the next root, in row order."""
    tokens, answers = own.tokens, memory.own
    tokens[:] = -1
    for node in range(memory.tree.sizes[0].rows):
        depth = memory.tree.nodes[node].depth - length
        if 0 <= depth < len(tokens) and answers[node] >= 0:
            for index in range(ANSWERS):
                if tokens[depth, index] == answers[node]:
                    break
                if tokens[depth, index] < 0:
                    tokens[depth, index] = answers[node]
                    break


class Jacobi(Source):
    """The answers of the last step."""

    name = "jacobi"
    most = ANSWERS
    Arrays = Answers
    refine = staticmethod(_refine)
    learn = staticmethod(_learn)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.arrays = Answers(np.full((setup.config.table_rows, ANSWERS), -1))

    def interrupt(self) -> None:
        """Forget the answers, whose positions have passed."""
        self.arrays.tokens[:] = -1

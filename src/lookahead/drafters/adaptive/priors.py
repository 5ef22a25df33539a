"""What buckets are worth before anything was observed: logistic fits to counts, no text in them.

Fitted to runs over first halves of MBPP solutions and GSM8K training questions (120 prompts, cold each time),
with calibrations kept across prompts: greedy with two checkpoints of the bundled model (199,231 proposals,
28,254 right), sampled at temperature 1 with the noise known (79,072 proposals, 5,232 right). A bucket's log-odds
are the sum of one number per feature. A prior counts as four observations, so it matters for the first
dozens of steps only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp

from .buckets import ANSWERED, HEIGHTS, KINDS, STATES, ZONES

Features = tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """Log-odds by feature.

    Attributes:
        suffix: base, then by order, share, times seen, and whether seen in this text.
        logits: base, then by order, height of the best score (sampling only), origin and kind.
        joint: by zone, and by what the last step answered.
        pairs: tenths of log-odds by state of the suffix match (rows) and of the logit cache (columns).
    """

    suffix: tuple[float, Features, Features, Features, Features]
    logits: tuple[float, Features, Features, Features, Features]
    joint: tuple[Features, Features]
    pairs: tuple[tuple[int, ...], ...]


# fmt: off
GREEDY = Fit(
    suffix=(
        0.3,
        (-1.25, -0.53, -0.37, -0.22, 0.07, 0.51, 0.76, 1.02),
        (-1.24, -0.8, -0.24, 0.29, 1.99),
        (-0.96, 0.07, 0.89),
        (-0.3, 0),
    ),
    logits=(
        -1.08,
        (-0.31, 0.01, 0.3),
        (0,),
        (0.16, -0.03, -0.13),
        (0.65, 1.17, 1.58, 1.95, 2.2, 2.25, 2.72, 3.2, 3.71, 4.24, 4.73, 5.54, -0.06, -0.69, -1.2, -1.69,
        -2.3, -2.73, -3.16, -3.66, -4, -4.07, -4.83, -5.54),
    ),
    joint=((-0.04, -0.03, 0.07), (-0.35, -0.13, -0.32)),
    pairs=(
        (-41, -40, -34, -28, -20, -3, -6, 2, 6, 10, -26, -26, -38, -42, -36, -41, -43, -41, -40, -41, -20),
        (-33, -20, -27, -21, -14, 4, 2, 5, 14, 20, -17, -17, -29, -33, -18, -33, -35, -34, -32, -34, -13),
        (-44, -34, -30, -30, -21, -17, -9, -4, 3, 11, -28, -28, -40, -43, -38, -44, -46, -36, -43, -44, -22),
        (-23, -21, -20, -22, -17, -3, 0, 0, 2, 2, -22, -22, -34, -38, -21, -31, -33, -32, -40, -26, -21),
        (-36, -26, -24, -18, -12, -5, 0, 2, 9, 10, -22, -22, -34, -38, -27, -34, -36, -31, -36, -35, -13),
        (-23, -21, -16, -11, -10, -4, 2, 5, 11, 12, -17, -17, -29, -32, -28, -30, -31, -24, -25, -38, 6),
        (-22, -22, -15, -11, -1, 4, 7, 9, 20, 24, -12, -12, -25, -28, -26, -26, -24, -31, -26, -28, 5),
        (-11, -15, -8, -4, -8, 4, 15, 15, 23, 27, -5, -5, -17, -21, -16, -22, -18, -19, -14, -18, 16),
        (-2, -9, -7, -3, -2, 2, 12, 20, 27, 33, -1, -1, -13, -17, -4, -14, -12, -13, -1, -3, 16),
        (21, 11, 8, 8, 3, 14, 15, 25, 36, 50, 15, 15, 3, -1, 5, -6, 1, 7, 14, 19, 17),
        (-35, -34, -28, -20, -12, -4, 4, 8, 12, 16, -20, -20, -32, -35, -30, -35, -36, -35, -34, -35, -14),
        (-29, -30, -23, -15, -7, 1, 11, 13, 17, 21, -15, -15, -27, -31, -25, -31, -32, -30, -29, -31, -9),
        (-34, -35, -21, -27, -7, -9, 7, 3, 6, 16, -20, -20, -32, -27, -30, -36, -37, -36, -35, -36, -14),
        (-37, -43, -34, -32, -15, -3, 1, 12, 14, 16, -24, -24, -36, -40, -36, -42, -39, -44, -45, -43, -18),
        (-39, -38, -37, -26, -18, -11, -1, 7, 16, 25, -25, -25, -37, -42, -38, -38, -48, -38, -50, -46, -24),
        (-36, -43, -34, -26, -21, -16, -4, 2, 5, 16, -27, -27, -39, -43, -38, -49, -43, -50, -50, -39, -29),
        (-45, -43, -37, -26, -17, -10, 0, 10, 12, 25, -26, -26, -38, -44, -43, -38, -43, -42, -49, -47, -30),
        (-46, -45, -37, -28, -21, -11, -5, 3, 6, 15, -29, -29, -41, -45, -42, -43, -55, -49, -48, -51, -40),
        (-54, -46, -38, -30, -20, -11, -2, 2, 2, 4, -31, -31, -44, -48, -37, -52, -45, -51, -54, -58, -44),
        (-70, -55, -41, -31, -21, -14, -10, -5, -13, -21, -41, -41, -53, -56, -50, -56, -61, -50, -68, -70, -35),
        (-46, -40, -35, -24, -16, -5, 5, 11, 20, 26, -24, -24, -36, -43, -37, -41, -43, -42, -49, -46, -24),
    ),
)
SAMPLED = Fit(
    suffix=(
        -0.38,
        (-1.04, -0.33, 0.17, 0.25, 0.85, 0.4, -0.1, -0.2),
        (-0.38, -0.48, -0.02, 0.03, 0.84),
        (-1.28, 0.07, 1.21),
        (-0.3, 0),
    ),
    logits=(
        -1.55,
        (-0.33, 0.07, 0.27),
        (-0.15, -0.14, 0.01, 0.28),
        (-0.01, 0.04, -0.02),
        (0.59, 0.76, 0.97, 1.24, 1.66, 1.87, 2.22, 2.3, 2.83, 3.17, 3.19, 3.67, 0.1, -0.01, -0.35, -0.95,
        -1.33, -1.85, -2.46, -3.04, -3.16, -3.51, -3.77, -4.12),
    ),
    joint=((0.02, -0.02, 0), (-0.59, 0.34, 0.11)),
    pairs=(
        (-36, -32, -27, -18, -8, -2, 6, 12, 19, 22, -19, -19, -19, -39, -29, -33, -36, -36, -41, -43, -21),
        (-22, -19, -13, -3, 6, 13, 21, 26, 33, 37, -5, -5, -5, -25, -14, -11, -21, -22, -27, -29, -7),
        (-36, -33, -28, -19, -12, 3, 0, 11, 18, 23, -19, -19, -19, -40, -29, -34, -38, -29, -42, -44, -22),
        (-27, -33, -22, -12, -10, -3, 3, 11, 16, 14, -20, -20, -20, -41, -36, -40, -43, -47, -45, -48, -22),
        (-29, -22, -24, -16, -3, -1, 6, 11, 20, 16, -16, -16, -16, -37, -24, -36, -33, -28, -33, -37, -16),
        (-24, -17, -23, -12, -15, 4, 8, 14, 15, 20, -13, -13, -13, -34, -23, -33, -23, -28, -34, -39, 5),
        (-28, -19, -14, -9, 1, 3, 15, 19, 20, 28, -9, -9, -9, -29, -20, -25, -26, -23, -35, -34, 7),
        (-15, -7, -11, -5, 10, 14, 28, 24, 32, 43, -2, -2, -2, -22, -12, -16, -21, -21, -27, -27, -1),
        (-22, -19, -9, 7, 6, 14, 24, 31, 26, 34, -3, -3, -3, -24, -13, -18, -21, -20, -26, -28, 0),
        (-23, -19, -15, -4, 5, 6, 20, 27, 26, 39, -6, -6, -6, -26, -15, -20, -22, -23, -28, -30, 1),
        (-36, -32, -27, -18, -8, -2, 6, 12, 19, 22, -19, -19, -19, -39, -29, -33, -36, -36, -41, -43, -21),
        (-49, -44, -40, -30, -21, -14, -6, -4, 6, 9, -32, -32, -32, -52, -41, -45, -48, -49, -54, -56, -34),
        (-46, -42, -37, -27, -10, -11, -7, -3, 14, 15, -28, -28, -28, -48, -38, -42, -45, -46, -50, -53, -31),
        (-44, -40, -32, -25, -14, -6, 1, 6, 11, 28, -25, -25, -25, -46, -44, -39, -45, -42, -45, -54, -29),
        (-42, -39, -35, -23, -21, -6, 2, 4, 12, 14, -25, -25, -25, -47, -33, -37, -43, -44, -44, -43, -29),
        (-41, -35, -37, -29, -13, -10, 4, 5, 8, 19, -25, -25, -25, -46, -38, -37, -43, -49, -43, -54, -35),
        (-45, -39, -34, -29, -12, -11, -4, 5, 15, 16, -27, -27, -27, -47, -34, -39, -50, -39, -57, -55, -35),
        (-54, -41, -42, -27, -7, -10, -10, 2, 16, 15, -29, -29, -29, -49, -39, -45, -48, -49, -54, -55, -32),
        (-51, -45, -33, -30, -7, -18, 4, 14, 16, 19, -26, -26, -26, -46, -35, -34, -45, -45, -51, -46, -29),
        (-46, -33, -29, -22, -14, -9, 3, 12, 20, 20, -22, -22, -22, -43, -32, -27, -39, -41, -46, -49, -26),
        (-42, -39, -33, -24, -13, -9, -1, 6, 15, 17, -25, -25, -25, -47, -33, -39, -39, -41, -50, -54, -29),
    ),
)
# fmt: on


def _shares(base: float, *features: Features) -> tuple[float, ...]:
    """Probabilities of all combinations, the last feature running quickest."""
    return tuple(1 / (1 + exp(-base - sum(chosen))) for chosen in product(*features))


@cache
def match_priors(sampled: bool) -> tuple[float, ...]:
    """Of suffix matches, in the order of ``buckets``."""
    return _shares(*(SAMPLED if sampled else GREEDY).suffix)


@cache
def logit_priors(order: int, sampled: bool) -> tuple[float, ...]:
    """Of rows found by their last ``order`` + 1 tokens."""
    base, orders, heights, origins, kinds = (SAMPLED if sampled else GREEDY).logits
    assert (len(kinds), len(heights)) == (KINDS, len(HEIGHTS) + 1 if sampled else 1)
    return _shares(base + orders[order], heights, origins, kinds)


@cache
def joint_priors(sampled: bool) -> tuple[float, ...]:
    """Of what all sources say together."""
    fit = SAMPLED if sampled else GREEDY
    zones, answered = fit.joint
    assert (len(zones), len(answered), len(fit.pairs)) == (ZONES, ANSWERED, STATES)
    return _shares(0.0, zones, answered, tuple(pair / 10 for row in fit.pairs for pair in row))

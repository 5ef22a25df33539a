"""What buckets are worth before anything was observed: logistic fits to counts, no text in them.

Fitted to one run over first halves of MBPP solutions and GSM8K training questions (120 prompts, cold, an early
checkpoint of the bundled model), with calibrations kept across prompts: 127,525 proposals, 21,192 right ones.
A bucket's log-odds are the sum of one number per feature. A prior weighs as much as four observations, so it
matters for the first dozens of steps only.
"""

from __future__ import annotations

from math import exp

from .calibration import STATES, VOICES, ZONES
from .logits import HEIGHTS, KINDS

SUFFIX_BASE = 0.17
SUFFIX_ORDER = (-1.26, -0.46, -0.33, -0.29, -0.01, 0.47, 0.85, 1.04)
SUFFIX_SHARE = (-1.76, -0.75, -0.22, 0.42, 2.31)
SUFFIX_SEEN = (-0.91, 0.13, 0.79)
#: Seen in earlier texts only, or in this one.
SUFFIX_HERE = (-0.3, 0.0)

LOGIT_BASE = -1.04
LOGIT_ORDER = (-0.37, 0.02, 0.35)
LOGIT_ORIGIN = (0.17, -0.03, -0.14)
LOGIT_BEST = (0.74, 1.14, 1.59, 1.92, 2.2, 2.24, 2.71, 3.21, 3.75, 4.2, 4.72, 5.83)
LOGIT_OTHER = (-0.2, -0.75, -1.19, -1.65, -2.33, -2.82, -3.13, -3.61, -3.95, -4.11, -4.91, -5.63)
LOGIT_HEIGHT = (-0.5, -0.2, 0.0, 0.1)

ZONE = (-0.07, -0.04, 0.11)
VOICE = (-0.32, -0.18, -0.38, -0.03, 0.91)
#: Tenths of log-odds by level of S (rows) and of L (columns): confidence, silent beside a best, no word.
PAIRS = (
    (-41, -40, -34, -28, -19, -4, -5, 3, 5, 10, -26, -26, -38, -41, -34, -39, -45, -40, -40, -41, -18),
    (-33, -19, -27, -21, -13, 3, 2, 6, 13, 20, -17, -17, -29, -33, -17, -32, -37, -33, -33, -34, -12),
    (-49, -48, -43, -35, -26, -21, -12, -8, 6, 2, -33, -33, -45, -49, -42, -47, -52, -48, -48, -49, -26),
    (-24, -19, -22, -15, -15, 1, 12, 8, -2, 5, -19, -19, -31, -35, -17, -34, -33, -29, -29, -29, -13),
    (-41, -27, -24, -20, -11, -6, 0, 0, 7, 11, -22, -22, -34, -38, -26, -35, -39, -30, -39, -36, -13),
    (-23, -23, -16, -12, -11, -7, 1, 5, 9, 12, -19, -19, -31, -34, -28, -34, -37, -24, -33, -42, -2),
    (-24, -22, -17, -11, 1, 2, 7, 10, 21, 26, -11, -11, -24, -27, -24, -23, -31, -31, -26, -26, 10),
    (-4, -13, -4, 2, 6, 12, 16, 21, 24, 32, 0, 0, -12, -16, -11, -13, -19, -13, -7, -16, 18),
    (-1, -13, -10, -4, -4, 1, 13, 19, 27, 34, -1, -1, -13, -17, -4, -13, -12, -13, -6, -8, 17),
    (21, 11, 8, 8, 3, 13, 18, 27, 35, 50, 16, 16, 4, 0, 7, -4, -1, 7, 14, 18, 17),
    (-35, -33, -28, -19, -11, -5, 4, 9, 11, 16, -19, -19, -31, -35, -28, -33, -38, -33, -34, -35, -12),
    (-30, -30, -24, -15, -7, 0, 11, 13, 15, 20, -15, -15, -27, -31, -24, -30, -33, -29, -30, -32, -8),
    (-29, -29, -19, -22, 0, 1, 13, 15, 17, 22, -14, -14, -26, -21, -22, -29, -33, -28, -29, -29, -6),
    (-35, -39, -30, -31, -14, -7, 2, 11, 13, 12, -23, -23, -35, -39, -34, -39, -43, -39, -42, -40, -16),
    (-38, -40, -39, -28, -17, -13, -1, 6, 20, 24, -25, -25, -37, -42, -37, -35, -47, -34, -49, -43, -28),
    (-38, -42, -31, -25, -21, -16, -4, -4, 6, 12, -27, -27, -39, -42, -37, -44, -44, -48, -50, -37, -26),
    (-49, -45, -38, -27, -15, -9, 2, 14, 13, 22, -25, -25, -38, -43, -41, -37, -47, -40, -48, -44, -30),
    (-48, -44, -41, -29, -23, -7, -11, 6, -3, 8, -30, -30, -42, -46, -42, -41, -54, -41, -43, -52, -33),
    (-54, -44, -38, -31, -19, -12, -3, 4, 3, 5, -31, -31, -43, -47, -36, -50, -45, -48, -53, -59, -43),
    (-70, -53, -41, -31, -22, -20, -12, -6, -13, -22, -41, -41, -53, -57, -50, -55, -62, -51, -67, -70, -34),
    (-49, -39, -38, -24, -16, -6, 6, 12, 21, 30, -24, -24, -36, -43, -35, -37, -44, -44, -45, -44, -22),
)


def _share(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))


def suffix_priors() -> list[float]:
    """By order, share, times seen, and whether seen in this text."""
    return [
        _share(SUFFIX_BASE + order + share + seen + here)
        for order in SUFFIX_ORDER
        for share in SUFFIX_SHARE
        for seen in SUFFIX_SEEN
        for here in SUFFIX_HERE
    ]


def logit_priors(order: int, sampled: bool) -> list[float]:
    """By height of the best score (sampling only), origin and kind."""
    assert len(LOGIT_BEST + LOGIT_OTHER) == KINDS
    assert len(LOGIT_HEIGHT) == len(HEIGHTS) + 1
    return [
        _share(LOGIT_BASE + LOGIT_ORDER[order] + origin + kind + height)
        for height in (LOGIT_HEIGHT if sampled else (0.0,))
        for origin in LOGIT_ORIGIN
        for kind in LOGIT_BEST + LOGIT_OTHER
    ]


def joint_priors() -> list[float]:
    """By zone, voice, level of S and level of L."""
    assert (len(ZONE), len(VOICE), len(PAIRS)) == (ZONES, VOICES, STATES)
    return [
        _share(zone + voice + pair / 10) for zone in ZONE for voice in VOICE for row in PAIRS for pair in row
    ]

"""Compares the completions of servers, or of one server under two conditions, and judges each difference.

It knows HTTP and OpenAI's API, and neither models nor tensors.
"""

from .client import Completion, NoAnswer, Server, Token
from .distribution import ERROR_RATE, p_value
from .judge import BOUND, SHOWN, Finding, Verdict, judge, shown_prompt, spread, status, verdict_of
from .run import Report, Side, compare_greedy, compare_sampled

__all__ = [
    "BOUND",
    "ERROR_RATE",
    "SHOWN",
    "Completion",
    "Finding",
    "NoAnswer",
    "Report",
    "Server",
    "Side",
    "Token",
    "Verdict",
    "compare_greedy",
    "compare_sampled",
    "judge",
    "p_value",
    "shown_prompt",
    "spread",
    "status",
    "verdict_of",
]

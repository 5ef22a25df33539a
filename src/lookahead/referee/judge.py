"""Judges where two completions of one prompt differ: is it rounding, or is it wrong?

Greedy decoding takes the most likely token. Rounding changes it only where another token is almost as likely, so the
gap log P(plain token) - log P(other token), both as the plain side computes them, says which it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from .client import Completion, Prompt, Token

#: Largest gap that is called rounding by default. A large logit is between 16 and 32, where neighbouring bfloat16
#: numbers are 0.125 apart; if rounding moves two logits one step in opposite directions, their gap changes by 0.25.
BOUND = 0.25
#: Characters shown before a difference, and from it on.
SHOWN = 40


class Verdict(StrEnum):
    """What a comparison of one prompt found."""

    EQUAL = "equal"
    ALIKE = "alike"  # sampled: the texts differ, and their distributions do not
    ROUNDING = "rounding"
    WRONG = "wrong"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the comparison of one prompt found.

    Attributes:
        prompt: the prompt, for display.
        verdict: the verdict.
        new_tokens: tokens of the other completion; None if unknown.
        first_divergence: the index of the first different token; None if there is none, or if tokens are unknown.
        gap: how much more likely the plain token is there, in nats; None if there is no difference, or if unknown.
        at_least: whether the other token is not among the most likely, so that the gap is a lower bound.
        before: the end of the common text.
        plain, other: both texts from the difference on.
        plain_token, other_token: both tokens; "" for the end of the completion; None if unknown.
        p: sampled: the p-value of the test of equal distributions.
        why: why it could not be judged.
    """

    prompt: str
    verdict: Verdict
    new_tokens: int | None = None
    first_divergence: int | None = None
    gap: float | None = None
    at_least: bool = False
    before: str = ""
    plain: str = ""
    other: str = ""
    plain_token: str | None = None
    other_token: str | None = None
    p: float | None = None
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {"equal": self.verdict is Verdict.EQUAL} | asdict(self)


def verdict_of(gap: float, bound: float) -> Verdict:
    """The verdict on a difference with this gap."""
    return Verdict.ROUNDING if gap <= bound else Verdict.WRONG


def status(verdicts: Iterable[Verdict], strict: bool = False) -> int:
    """The exit status: 2 if any is wrong, else 3 if any could not be judged, else 1 if any is rounding and
    ``strict``, else 0."""
    found = set(verdicts)
    if Verdict.WRONG in found:
        return 2
    if Verdict.NOT_JUDGED in found:
        return 3
    return int(strict and Verdict.ROUNDING in found)


def judge(prompt: str, plain: Completion, other: Completion, bound: float) -> Finding:
    """Compare two greedy completions.

    Args:
        prompt: the prompt, for display.
        plain: the completion that is right, with its tokens if the server gives log-probabilities.
        other: the completion to judge; its text is enough.
        bound: the largest gap that is called rounding.
    """
    if plain.text == other.text and _ended(plain) == _ended(other):
        return Finding(prompt, Verdict.EQUAL, other.count)
    at = _common(plain.text, other.text)
    index = _index(plain.tokens, at)
    if index is None:
        shown = (plain.text[max(0, at - SHOWN) : at], plain.text[at:][:SHOWN], other.text[at:][:SHOWN])
        why = "the plain side gives no log-probabilities there" if plain.tokens else "no log-probabilities"
        return Finding(prompt, Verdict.NOT_JUDGED, other.count, None, None, False, *shown, why=why)
    token = plain.tokens[index]
    start = min(token.start, at)
    shown = (
        plain.text[max(0, start - SHOWN) : start],
        plain.text[start:][:SHOWN],
        other.text[start:][:SHOWN],
    )
    gap, name = _closest(plain.tokens, other.text, at)
    if gap is None:
        why = "the server gives no log-probabilities of other tokens"
        return Finding(prompt, Verdict.NOT_JUDGED, other.count, index, None, False, *shown, why=why)
    found = verdict_of(gap, bound)
    if (
        name is None and found is Verdict.ROUNDING
    ):  # it is none of the likely tokens, and all of them are this close
        found = Verdict.NOT_JUDGED
    return Finding(
        prompt, found, other.count, index, gap, name is None, *shown, plain_token=token.text, other_token=name
    )


def _closest(tokens: list[Token], other: str, at: int) -> tuple[float | None, str | None]:
    """The smallest gap among the likely tokens that the other text may have, and that token.

    The token is None if none of them fits; the gap is then that of the least likely. The gap is None if the server
    gave no other tokens.

    Args:
        tokens: the plain tokens.
        other: the other text.
        at: the first character that differs. An earlier token counts if it reaches past it: "the" + "re" and
            "theory" differ in the first token.
    """
    start = max(token.start for token in tokens if token.start <= at)
    gaps = [
        (token.logprob - value, name)
        for token in tokens
        if token.start <= start
        for name, value in token.top
        if not (name == token.text and value >= token.logprob)  # the plain token itself
        and (
            _continues(name, other[start:])
            if token.start == start
            else token.start + len(name) > at and other.startswith(name, token.start)
        )
    ]
    if gaps:
        return min(gaps)
    here = [token for token in tokens if token.start == start and len(token.top) > 1]
    return min((token.logprob - token.top[-1][1] for token in here), default=None), None


def shown_prompt(prompt: Prompt) -> str:
    """A prompt in one line."""
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    last = prompt[-1]
    text = last.get("content") if isinstance(last, Mapping) else f"{len(prompt)} token ids"
    return " ".join(str(text).split())


def spread(one: Completion, other: Completion) -> float:
    """The largest difference of the log-probabilities of a token between two runs, over their common tokens."""
    largest = 0.0
    for a, b in zip(one.tokens, other.tokens, strict=False):
        if a.text != b.text:
            break
        largest = max(largest, abs(a.logprob - b.logprob))
    return largest


def _ended(completion: Completion) -> bool:
    """Whether the model ended the completion itself."""
    return completion.finish_reason != "length"


def _common(a: str, b: str) -> int:
    """The length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _index(tokens: list[Token], at: int) -> int | None:
    """The index of the token with the character ``at``; of the token after the text if the text ends there.

    Tokens that are parts of one character all start there; it is the first of them.
    """
    starts = [token.start for token in tokens if token.start <= at]
    if not starts:
        return None
    last = tokens[len(starts) - 1]
    inside = at < last.start + len(last.text) or not last.text
    return starts.index(starts[-1]) if inside or len(starts) < len(tokens) else None


def _continues(token: str, rest: str) -> bool:
    """Whether a token may be the next one of a text. An end token has no text, or a name such as <|im_end|>; the text
    of a part of a character is unknown."""
    if "\ufffd" in token or token.startswith("bytes:"):
        return True
    if not rest:
        return not token or (token.startswith("<") and token.endswith(">"))
    return bool(token) and rest.startswith(token)

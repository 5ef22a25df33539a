"""Errors. A message states the requirement, the value given and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LookaheadError(Exception):
    """Base class of the errors that this library raises."""


class SettingsError(LookaheadError, ValueError):
    """An invalid setting, prompt or option."""


class NumericalError(LookaheadError, ArithmeticError):
    """The target's logits are NaN, so no token can be chosen."""


class OutOfMemory(LookaheadError, MemoryError):
    """A forward pass did not fit in memory; the decoding loop retries it with fewer rows."""


class Unsupported(Exception):
    """The compiled CPU path cannot run a model; the message is the reason, in one line."""


def first_line(error: BaseException, longest: int = 300) -> str:
    """The first line of an error's message, at most ``longest`` characters; the type's name if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def summary(error: BaseException) -> str:
    """An error's type and the first line of its message, if it has one."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def failure(what: str, error: Exception, kind: type[LookaheadError] = LookaheadError) -> LookaheadError:
    """The error that ends a sequence whose code raised ``error``: ``error`` itself, or a ``kind`` caused by it.

    Args:
        what: what failed, as in "the drafter".
        error: the exception raised.
        kind: the class of the result if ``error`` is not a ``LookaheadError``.
    """
    if isinstance(error, LookaheadError):
        return error
    failed = kind(f"{what} failed: {summary(error)}")
    failed.__cause__ = error
    return failed


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name closest to an unknown one, as in " (did you mean 'max_new_tokens'?)"; "" if none is close."""
    close = get_close_matches(str(name).lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

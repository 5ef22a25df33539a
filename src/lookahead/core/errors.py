"""Errors. A message states the requirement, the value given and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType


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


def shown(text: str, longest: int = 60) -> str:
    """Text from a file, for a message: at most ``longest`` characters, with control characters escaped."""
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: longest + 1])
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."


def first_line(error: BaseException, longest: int = 300) -> str:
    """The first line of an error's message, as ``shown``; the type's name if it is empty."""
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0], longest)


def summary(error: BaseException) -> str:
    """An error's type and the first line of its message, if it has one."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def failure(what: str, error: Exception, of: type[LookaheadError] = LookaheadError) -> LookaheadError:
    """The error that ends a sequence whose code raised ``error``: ``error`` itself, or one of ``of`` caused by it.

    Args:
        what: what failed, as in "the drafter".
        error: the exception raised.
        of: the class of the result if ``error`` is not a ``LookaheadError``.
    """
    if isinstance(error, LookaheadError):
        return error
    failed = of(f"{what} failed: {summary(error)}")
    failed.__cause__ = error
    return failed


def meant(
    name: object, known: Collection[str], elsewhere: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str | None:
    """The known name that an unknown one stands for; None if there is none.

    Args:
        name: the unknown name.
        known: the known names.
        elsewhere: names in other software -> the equivalents here, of which the first known one counts.
    """
    lower = str(name).lower()
    equivalent = [ours for ours in elsewhere.get(lower, ()) if ours in known]
    return next(iter(equivalent or get_close_matches(lower, known, n=1)), None)


def nearest(name: object, known: Collection[str]) -> str:
    """The known name that an unknown one stands for, as in " (did you mean 'max_new_tokens'?)"; "" if none."""
    found = meant(name, known)
    return f" (did you mean {found!r}?)" if found is not None else ""

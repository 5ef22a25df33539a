"""Errors that are meant to be read: what must hold, what was given, what to do."""

from __future__ import annotations


class LookaheadError(Exception):
    """Base of every error this library raises on purpose."""


class SettingsError(LookaheadError, ValueError):
    """A setting, a prompt or an option that cannot be honoured."""


class NumericalError(LookaheadError, ArithmeticError):
    """The target produced logits that name no token (NaN)."""


class OutOfMemory(LookaheadError, MemoryError):
    """A forward pass did not fit; the decoding loop answers with fewer rows."""


def first_line(error: BaseException, longest: int = 300) -> str:
    """Of what a library says, at most ``longest`` characters; its type's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]

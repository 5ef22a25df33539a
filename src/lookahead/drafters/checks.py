"""Validation of drafter settings, and their text form."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from ..core import SettingsError


def check_whole(settings: Any, name: str, low: int, high: int | None = None) -> None:
    """Check that a field is a whole number of at least ``low`` and, unless it is None, at most ``high``.

    Raises:
        SettingsError: it is not.
    """
    value = getattr(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
        limits = f"of at least {low}" if high is None else f"between {low} and {high}"
        raise SettingsError(f"{name} must be a whole number {limits}, got {value!r}")


def check_flag(settings: Any, name: str) -> None:
    """Convert a field to bool. 0 and 1 are allowed, as in the POOL_FROM_PROMPT=1 of the authors' code.

    Raises:
        SettingsError: any other value.
    """
    value = getattr(settings, name)
    if value not in (0, 1):
        raise SettingsError(f"{name} must be true or false, got {value!r}")
    object.__setattr__(settings, name, bool(value))


def setting_names(kind: type) -> list[str]:
    """The settings of a drafter that can be given as text: all fields except state shared by sequences."""
    return [field.name for field in fields(kind) if field.compare] if is_dataclass(kind) else []


def all_settings(settings: Any) -> dict[str, Any]:
    """Every setting by name, as JSON values."""
    return {name: getattr(settings, name) for name in setting_names(type(settings))}


def text_form(name: str, settings: Any, triple: tuple[str, ...] = ()) -> str:
    """A drafter as a string for ``as_drafter``: NAME, then W,N,G if it has them, then non-default settings."""
    parts = [name]
    if triple:
        parts.append(",".join(str(getattr(settings, field)) for field in triple))
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not field.compare or field.name in triple or value == field.default:
            continue
        shown = "+".join(value) + ("+" if len(value) < 2 else "") if isinstance(value, tuple) else str(value)
        parts.append(f"{field.name}={shown.lower() if isinstance(value, bool) else shown}")
    return ":".join(parts)

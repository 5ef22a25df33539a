"""Declares an option: a field of a dataclass with its default, its help text and the rule that other values satisfy.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import partial
from math import inf
from typing import Any, ClassVar, Self, get_type_hints

from .core import SettingsError
from .core.errors import nearest

#: The requirement, as in "a whole number", and its test.
Rule = tuple[str, Callable[[Any], bool]]


def option(
    default: Any,
    help: str,
    rule: Rule | None = None,
    *,
    common: bool = False,
    metavar: str | None = None,
    kind: Any = None,
    text: bool = True,
    keyword: bool = True,
    secret: bool = False,
    variable: str | None = None,
    neutral: float | None = None,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its neutral value.
        help: its description, wherever the option is offered.
        rule: the rule that other values must satisfy.
        common: whether ``--help`` shows it; ``--help-all`` shows every option.
        metavar: the placeholder for its value on a command line.
        kind: its type when given as text, if that differs from the field's type.
        text: whether it can be given as text (command line, environment, files, requests).
        keyword: whether it is a keyword-only argument in Python.
        secret: whether messages must not show its value.
        variable: an environment variable from which every command reads it.
        neutral: for options that change the scores when sampling, the value without effect, which has the type of
            the processor's argument.
    """
    metadata = {"help": help, "rule": rule, "common": common, "metavar": metavar, "kind": kind, "text": text}
    metadata |= {"neutral": neutral, "variable": variable}
    return dataclasses.field(default=default, kw_only=keyword, repr=not secret, metadata=metadata)


hidden = partial(option, text=False)


@dataclass(frozen=True)
class OptionSet:
    """Base class of the dataclasses of options.

    Attributes:
        GROUP: the heading of these options in ``--help``.
    """

    GROUP: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            rule = field.metadata["rule"]
            if rule is not None and not (value is None and field.default is None) and not rule[1](value):
                shown = f", got {value!r}" if field.repr else ""
                raise SettingsError(f"{field.name} must be {rule[0]}{shown}")

    @classmethod
    def of(cls, options: OptionSet | None, keywords: Mapping[str, Any]) -> Self:
        """Options from an object, or from keywords.

        Raises:
            SettingsError: both are given, a name is not an option, or a value is not allowed.
        """
        if options is None:
            refuse_unknown(cls, keywords)
            return cls(**keywords)
        if keywords:
            raise SettingsError(
                f"options and {next(iter(keywords))} cannot be given together; put everything into options"
            )
        return options if isinstance(options, cls) else cls(**options.keywords())

    def keywords(self) -> dict[str, Any]:
        """The options with non-default values, as keywords."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}


def refuse_unknown(options: type[OptionSet], given: Collection[str]) -> None:
    """Raise SettingsError for the first name that is not an option; the message suggests the nearest one."""
    known = [field.name for field in fields(options)]
    for name in given:
        if name not in known:
            raise SettingsError(
                f"unknown option {name!r}{nearest(name, known)}; known are {', '.join(known)}"
            )


def offered(options: type[OptionSet], only: Collection[str] = ()) -> dict[str, tuple[Any, Field[Any]]]:
    """(type, field) of the options that can be given as text, by name; all of them, or those in ``only``."""
    hints = get_type_hints(options)
    chosen = [field for field in fields(options) if field.metadata["text"]]
    return {
        field.name: (field.metadata["kind"] or hints[field.name], field)
        for field in chosen
        if not only or field.name in only
    }


def flag_of(name: str) -> str:
    """The flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"


# ------------------------------------------------------------------------------- rules


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _word(value: Any) -> bool:
    """A string, or a list of token ids."""
    if isinstance(value, str):
        return True
    return _sequence(value) and len(value) > 0 and all(_whole(token) and token >= 0 for token in value)


def listed(value: Any) -> list[Any]:
    """A value, a sequence of values, or None, as a list."""
    if value is None:
        return []
    return list(value) if _sequence(value) else [value]


def at_least(low: int, high: float = inf, more: str = "") -> Rule:
    """A whole number in a range."""
    limits = f"of at least {low}" if high == inf else f"from {low} to {high}"
    return f"a whole number {limits}{more}", lambda n: _whole(n) and low <= n <= high


def one_of(*values: str) -> Rule:
    """One of several strings."""
    return f"one of {', '.join(values)}", values.__contains__


def only(value: str) -> Rule:
    """A single string, or None."""
    return f"{value!r} or None", lambda given: bool(given == value)


COUNT = at_least(1)
KEPT = at_least(0)
SHARE = ("above 0 and at most 1", lambda p: _number(p) and 0 < p <= 1)
WHOLE = ("a whole number or None", _whole)
#: Scores divided by a smaller temperature would not fit into float32.
TEMPERATURE = ("0, which is greedy, or at least 1e-6", lambda t: _number(t) and (t == 0 or 1e-6 <= t < inf))
POSITIVE = ("above 0; 1 is neutral", lambda r: _number(r) and 0 < r < inf)
YES_OR_NO = ("true or false", lambda given: isinstance(given, bool))
WORDS = (
    "a list of strings or of lists of token ids",
    lambda given: _sequence(given) and all(map(_word, given)),
)
STOPS = (
    "a non-empty string or a list of them",
    lambda given: all(isinstance(text, str) and text != "" for text in listed(given)),
)
SEEDS = ("a list of whole numbers", lambda given: _sequence(given) and all(map(_whole, given)))
CALLABLES = ("a callable or a list of callables", lambda given: all(map(callable, listed(given))))

"""Options as dataclass fields with their help and rule, and functions that take these fields as keywords.

Each field declares an option once: the types, signatures and docstrings of the Python API are made from it, and so is
``--help`` (``lookahead.cli.adapter``). This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, get_type_hints

from .core import SettingsError

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
C = TypeVar("C", bound=type)
#: What must hold, as in "a whole number", and the test for it.
Rule = tuple[str, Callable[[Any], bool]]


def option(
    default: Any,
    help: str,
    rule: Rule | None = None,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    kind: Any = None,
    cli: bool = True,
    keyword: bool = True,
    warper: tuple[str, float] | None = None,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its neutral value.
        help: its description in ``--help`` and in the API reference.
        rule: the rule that every other value must satisfy.
        panel, metavar: in ``--help``, the heading of its group (None for the dataclass's ``PANEL``) and the
            placeholder for its value.
        kind: its type on a command line, if that differs from the field's type.
        cli: whether the command line offers it.
        keyword: whether it is a keyword-only argument in Python.
        warper: the class of transformers that applies it to the scores when sampling, and its neutral value, which
            also gives the type.
    """
    metadata = {"help": help, "rule": rule, "panel": panel, "metavar": metavar, "kind": kind, "cli": cli}
    metadata["warper"] = warper
    return dataclasses.field(default=default, kw_only=keyword, metadata=metadata)


class OptionSet:
    """Base class of the dataclasses of options."""

    __slots__ = ()
    PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, field.name), field.metadata["rule"]
            if rule is not None and not (value is None and field.default is None) and not rule[1](value):
                raise SettingsError(f"{field.name} must be {rule[0]}, got {value!r}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make options from keywords.

        Raises:
            SettingsError: a name that is not an option, or a value that is not allowed.
        """
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SettingsError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**given)

    def keywords(self) -> dict[str, Any]:
        """The options that are not at their defaults, as keywords."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return {field.name: value for field, value in values if value != field.default}


class _Unimported:
    """Stands for torch when annotations are read: every attribute is Any."""

    def __getattr__(self, name: str) -> Any:
        return Any


def offered_types(options: Any) -> dict[str, Any]:
    """The fields that a command line offers, with their types: a field's ``kind``, or else its annotation."""
    hints = get_type_hints(options, localns={"torch": _Unimported(), "Process": Any})
    offered = [field for field in dataclasses.fields(options) if field.metadata["cli"]]
    return {field.name: field.metadata["kind"] or hints[field.name] for field in offered}


def documented(cls: C) -> C:
    """Append the help of the fields to a dataclass's docstring."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{_lines(cls)}\n"
    return cls


def parameters_of(options: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the function has the parameters of this dataclass."""
    return lambda function: _declare(function, options)


def keywords_of(
    options: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, A, ...], R]], Callable[Concatenate[S, A, P], R]]:
    """A decorator: besides its first parameter, the method has the fields of this dataclass as keywords."""
    return lambda function: _declare(function, options)


def _declare(function: Any, options: Any) -> Any:
    """Add the fields to the signature, and to the docstring in place of {options}."""
    own = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kept = [parameter for parameter in own.parameters.values() if parameter.kind not in variable]
    function.__signature__ = own.replace(parameters=[*kept, *inspect.signature(options).parameters.values()])
    if function.__doc__:
        function.__doc__ = inspect.cleandoc(function.__doc__).replace("    {options}", _lines(options))
    return function


def _lines(cls: Any) -> str:
    return "\n".join(f"    {field.name}: {field.metadata['help']}" for field in dataclasses.fields(cls))

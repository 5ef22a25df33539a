"""Options as dataclass fields that bear their own help, and functions that take them as keywords.

One field is one option everywhere: ``parameters_of`` and ``keywords_of`` put it into the type, the signature and
the docstring of a function of the Python API, and ``lookahead.cli.options`` into ``--help``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
C = TypeVar("C", bound=type)
#: Where a docstring of a function names the fields' help.
PLACE = "{options}"


def option(
    default: Any,
    help: str,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    kind: Any = None,
    cli: bool = True,
    keyword: bool = True,
) -> Any:
    """A dataclass field with what people are told of it.

    Args:
        default: its neutral value.
        help: one or two sentences, for ``--help`` and the API reference alike.
        panel: heading of the group in ``--help``.
        metavar: placeholder of the value there.
        kind: its type on a command line, where the field's own says more than text can.
        cli: whether it can be said on a command line at all.
        keyword: whether Python takes it by keyword only.
    """
    metadata = {"help": help, "panel": panel, "metavar": metavar, "kind": kind, "cli": cli}
    return dataclasses.field(default=default, kw_only=keyword, metadata=metadata)


def documented(cls: C) -> C:
    """Append the help of the fields to a dataclass's docstring."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{_lines(cls)}\n"
    return cls


def parameters_of(options: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the function has the parameters of this dataclass."""

    def apply(function: Callable[..., R]) -> Callable[P, R]:
        _declare(function, options)
        return function

    return apply


def keywords_of(
    options: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, A, ...], R]], Callable[Concatenate[S, A, P], R]]:
    """A decorator: the method has, beside its first parameter, the fields of this dataclass as keywords."""

    def apply(function: Callable[Concatenate[S, A, ...], R]) -> Callable[Concatenate[S, A, P], R]:
        _declare(function, options)
        return function

    return apply


def _declare(function: Any, options: Any) -> None:
    """Write the fields into the signature and the docstring, for help() and for editors."""
    own = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kept = [parameter for parameter in own.parameters.values() if parameter.kind not in variable]
    fields = inspect.signature(options).parameters.values()
    function.__signature__ = own.replace(parameters=[*kept, *fields])
    if function.__doc__:
        function.__doc__ = inspect.cleandoc(function.__doc__).replace(f"    {PLACE}", _lines(options))


def _lines(cls: Any) -> str:
    return "\n".join(f"    {field.name}: {field.metadata['help']}" for field in dataclasses.fields(cls))

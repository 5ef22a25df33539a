"""Turns option dataclasses into command-line options, one for each field that text can express."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import Field
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from ..option import OptionSet, flag_of, offered
from .command import help_all, placeholder, with_placeholder


def with_options(
    *, only: Collection[str] = (), without: Collection[str] = ("parallel_timeout",), **defaults: Any
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for commands: a parameter that is a dataclass of options becomes one option per field.

    All fields are offered, or ``only`` some, except those in ``without``. ``defaults`` override for this command.
    """

    def apply(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[Parameter] = []
        groups: dict[str, tuple[type[OptionSet], dict[str, Any]]] = {}
        for name, parameter in signature(command).parameters.items():
            kind = hints[name]
            if not (isinstance(kind, type) and issubclass(kind, OptionSet)):
                parameters.append(parameter.replace(annotation=with_placeholder(kind)))
                continue
            chosen = {field: of for field, of in offered(kind, only).items() if field not in without}
            groups[name] = kind, chosen
            parameters += [_parameter(kind, *of, defaults) for of in chosen.values()]
        rare = {f.name for _, of in groups.values() for _, f in of.values() if not f.metadata["common"]}

        @wraps(command)
        def run(help_all: bool = False, **values: Any) -> Any:
            given = {name: kind(**{f: values.pop(f) for f in of}) for name, (kind, of) in groups.items()}
            return command(**values, **given)

        parameters += help_all(len(rare), parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__dict__ |= {"__signature__": Signature(parameters), "rare": rare}  # typer reads both
        return run

    return apply


def _parameter(group: type[OptionSet], kind: Any, field: Field[Any], defaults: dict[str, Any]) -> Parameter:
    """A field as a typer parameter. Positional fields are arguments; a flag off by default has no --no-FLAG form."""
    default = defaults.get(field.name, field.default)
    info: Any = typer.Option(rich_help_panel=group.GROUP) if field.kw_only else typer.Argument()
    info.param_decls = (flag_of(field.name),) if field.default is False else None
    info.help = field.metadata["help"]
    info.envvar = field.metadata["variable"]
    info.metavar = field.metadata["metavar"] or placeholder(kind)
    typed: Any = Annotated[kind if default is not None else kind | None, info]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=typed)

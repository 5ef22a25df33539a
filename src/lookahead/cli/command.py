"""A command whose ``--help`` shows the common options; ``--help-all`` shows every option."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand
from typer.models import OptionInfo

#: The placeholder of a value in the help, by type. A flag has none.
METAVARS = {str: "TEXT", list[str]: "TEXT", int: "NUMBER", float: "NUMBER", Path: "FILE"}
FLAG = " "
#: The key in a context's ``meta`` that is set if the help shows every option.
EVERY = "lookahead.help_all"


class Command(TyperCommand):
    """A typer command. Its function's attribute ``rare`` names the options that only ``--help-all`` shows."""

    def __init__(self, *args: Any, help: str | None = None, **rest: Any) -> None:
        # typer would keep the line breaks of all paragraphs except the first.
        paragraphs = [" ".join(text.split()) for text in (help or "").split("\n\n")]
        super().__init__(*args, help="\n\n".join(paragraphs), **rest)

    def get_params(self, ctx: Any) -> Any:
        """The parameters. Flags show no placeholder, and --help is in the first group if every option is in a
        group."""
        parameters = without_types(super().get_params(ctx))
        *own, asks_for_help = parameters
        groups = [parameter.rich_help_panel for parameter in own if parameter.param_type_name == "option"]
        if groups and all(groups):
            asks_for_help.rich_help_panel = groups[0]
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the help; rare options only with ``--help-all``."""
        rare = () if ctx.meta.get(EVERY) else getattr(self.callback, "rare", ())
        parameters: Any = self.params
        before = self.help, [(parameter, parameter.help, parameter.hidden) for parameter in parameters]
        # Text in brackets, such as [serve], is not markup.
        self.help = escape(self.help or "")
        for parameter in parameters:
            parameter.help = escape(parameter.help or "")
            parameter.hidden = parameter.hidden or parameter.name in rare
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help, shown = before
            for parameter, text, hidden in shown:
                parameter.help = text
                parameter.hidden = hidden


def without_types(parameters: Any) -> Any:
    """The same typer parameters, but flags such as ``--help`` show no placeholder for a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = FLAG
    return parameters


def placeholder(kind: Any) -> str | None:
    """The placeholder for a value of this type; None to let typer choose it."""
    return METAVARS.get(
        next((part for part in get_args(kind) if part is not NoneType), kind), METAVARS.get(kind)
    )


def with_placeholder(kind: Any) -> Any:
    """The same parameter annotation; its option, if any, gets a placeholder for its value."""
    for info in getattr(kind, "__metadata__", ()):
        info.metavar = info.metavar or placeholder(get_args(kind)[0])
    return kind


def help_all(rare: int, parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameter ``--help-all`` of a command with this many rare options, if any."""

    def show(ctx: typer.Context, asked: bool) -> None:
        if asked:
            ctx.meta[EVERY] = True
            typer.echo(ctx.get_help())
            raise typer.Exit

    kinds = [get_args(parameter.annotation) for parameter in parameters]
    groups = [kind[-1].rich_help_panel for kind in kinds if kind and isinstance(kind[-1], OptionInfo)]
    group = groups[0] if all(groups) else None
    info: Any = typer.Option("--help-all", callback=show, is_eager=True, rich_help_panel=group)
    info.help = f"Show all options, including {rare} less common ones."
    typed: Any = Annotated[bool, info]
    made = Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=typed)
    return [made] if rare else []

"""``lookahead serve``: an OpenAI-compatible server. Its options are the fields of ``lookahead.server.settings``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ..core import SettingsError
from .adapter import Command, metavar_of, quiet
from .console import note

#: A command made from the settings parses the arguments after ``serve``, so no other command loads the settings.
RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
#: What --help shows where the packages of the extra, from which the options come, are not installed.
WITHOUT_EXTRA = """\
Usage: lookahead serve [OPTIONS] [MODEL]

Serve a model over HTTP, compatible with OpenAI's API: /v1/chat/completions, /v1/completions, and a page at /.

MODEL is a directory, a .gguf file or a hub id; the default is SmolLM2-135M-Instruct.

The server needs {missing}, which is not installed. Install it with pip install '.[serve]' in the project's folder.
Then lookahead serve --help shows the options, which docs/server.md lists, too."""


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API; --help shows its options."""
    try:
        from ..server.app import serve as serve_http
        from ..server.settings import Settings
    except ImportError as error:
        if "--help" in ctx.args:
            typer.echo(WITHOUT_EXTRA.format(missing=error.name))
            return
        raise SettingsError(
            f"lookahead serve needs {error.name}; install it with pip install '.[serve]' in the project's folder"
        ) from None

    def run(*, config: Path | None, **given: Any) -> None:
        settings = Settings.read({name: v for name, v in given.items() if v not in (None, [])}, config)
        quiet()
        serve_http(settings, note)

    run.__doc__ = (
        "Serve a model over HTTP, compatible with OpenAI's API. Each option may also be given as LOOKAHEAD_* in "
        "the environment (--max-queue is LOOKAHEAD_MAX_QUEUE) or in a YAML file. Options override the environment, "
        "and the environment overrides the file."
    )
    parameters = _parameters(Settings.model_fields)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(run)
    app(args=ctx.args, prog_name="lookahead serve", standalone_mode=False)


def _parameters(fields: Mapping[str, Any]) -> list[inspect.Parameter]:
    """One option for each setting; settings that are not given come from the environment, the file or the default."""
    config: Any = typer.Option(
        help="A YAML file of these settings.", metavar="FILE", envvar="LOOKAHEAD_CONFIG"
    )
    made: list[tuple[str, Any]] = [("config", Annotated[Path | None, config])]
    for name, field in fields.items():
        kinds = [kind for kind in get_args(field.annotation) or [field.annotation] if kind is not type(None)]
        kind: Any = kinds[0] if kinds[0] in (bool, int, float) else str
        kind = list[str] if field.annotation == list[str] else kind
        default = "" if field.default in (None, False, []) else f" (default {field.default})"
        info: Any = typer.Option(
            help=f"{field.description}{default}", metavar=metavar_of(kind), show_default=False
        )
        if name == "model":
            info = typer.Argument(help=field.description, metavar="MODEL", show_default=False)
        made.append((name, Annotated[kind | None, info]))
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in made]

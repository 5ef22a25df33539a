"""``lookahead serve``: an OpenAI-compatible server. Its options are the fields of ``server.settings.Settings``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core import SettingsError
from ..server.settings import Settings
from .adapter import with_options
from .console import note, stderr


@with_options()
def serve(
    ctx: typer.Context,
    *,
    settings: Settings,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file of these settings.", metavar="FILE", envvar="LOOKAHEAD_CONFIG"),
    ] = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API, and a demo page at /.

    Each option may also be given as LOOKAHEAD_* in the environment (--max-queue is LOOKAHEAD_MAX_QUEUE) or in a YAML
    file. Options override the environment, and the environment overrides the file.

    The server needs extra packages: run pip install '.[serve]' in the project's folder.
    """
    from ..hf.load import quiet

    try:
        from ..server.app import serve as serve_http
    except ImportError as error:
        raise SettingsError(
            f"lookahead serve needs {error.name}; install it with pip install '.[serve]' in the project's folder "
            f"({error})"
        ) from None

    def was_given(name: str) -> bool:
        source = ctx.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    given = {name: value for name, value in vars(settings).items() if was_given(name)}
    chosen = Settings.read(given, config)
    quiet()
    serve_http(chosen, note if stderr().is_terminal else None)  # the log, which is JSON

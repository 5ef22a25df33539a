"""The command line, one file per command. To add a command, add a file, and a line to ``COMMANDS``.

An invalid option or input prints one red line, ``error: ...``, on stderr; the exit status is 2. Other errors (NaN
logits, out of memory) print such a line and exit with status 1; Ctrl-C exits with status 130. None shows a traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..core import LookaheadError, SettingsError
from .command import Command, without_types
from .console import Interrupted, is_follower, note, problem, ranks

if TYPE_CHECKING:
    app: typer.Typer

__all__ = ["app", "main"]

#: The commands, in the order of the help, and the module and function of each. A start imports only its own.
COMMANDS = {
    "generate": ("generate", "generate"),
    "show": ("show", "show"),
    "chat": ("chat", "chat"),
    "demo": ("demo", "demo"),
    "serve": ("serve", "serve"),
    "verify": ("verify_exact", "verify"),
    "doctor": ("doctor", "doctor"),
    "tune": ("tune", "tune"),
    "learn": ("learn_table", "learn"),
    "forget": ("forget", "forget"),
    "models": ("models", "models"),
    "train-head": ("train_head", "train_head"),
}
#: Commands that torchrun may start.
PARALLEL = ("generate",)


class Commands(TyperGroup):
    """Reports errors in one line."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before typer turns it into a silent exit
            raise Interrupted("interrupted") from None

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        extra["standalone_mode"] = False
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: note(f"note: {message}", "yellow")
            for category in (UserWarning, RuntimeWarning):  # shown regardless of -W
                warnings.simplefilter("default", category)
            sys.exit(self._guarded(*args, **extra))

    def _guarded(self, *args: Any, **extra: Any) -> int:
        """The exit status. Errors are reported on stderr."""
        if sys.stdout is None:  # closed, so a file opened later would get its file descriptor
            problem("stdout must be open, but it is closed; redirect it to a file or to /dev/null")
            return 2
        try:
            status = super().main(*args, **extra)
            sys.stdout.flush()
        except LookaheadError as error:
            if not (isinstance(error, SettingsError) and is_follower()):  # rank 0 reports the same error
                problem(str(error))
            return 2 if isinstance(error, SettingsError) else 1
        except (Interrupted, KeyboardInterrupt) as error:
            note(str(error) or "interrupted", "yellow")
            return 130
        except OSError as error:  # from stdout: errors of named files are reported where they are opened
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the flush at exit would fail again
            if isinstance(error, BrokenPipeError):  # the reader closed the pipe
                return 1
            reason = error.strerror or error
            problem(
                f"{error.filename}: {reason}" if error.filename else f"the output must be writable: {reason}"
            )
            return 2
        except Exception as error:
            # A usage error. Its class differs between typer versions, but always has these two attributes.
            if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
                raise
            if message := error.format_message():
                command = getattr(getattr(error, "ctx", None), "command", None)
                takes = [each.name for each in getattr(command, "params", ())]
                extra_prompt = "unexpected extra argument" in message and "prompt" in takes
                problem(f"{message} ({'a prompt is given with --prompt' if extra_prompt else 'see --help'})")
            return int(error.exit_code)
        return status if isinstance(status, int) else 0


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lookahead {__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    elif ranks() > 1 and ctx.invoked_subcommand not in PARALLEL:
        raise SettingsError(
            f"torchrun can start only {', '.join(PARALLEL)}, got {ctx.invoked_subcommand}; start it without torchrun"
        )


def make_app(names: Iterable[str] | None = None) -> typer.Typer:
    """The command line with some commands, by default with all of them."""
    made = typer.Typer(
        cls=Commands,
        pretty_exceptions_enable=False,
        help="Exact, training-free, draft-free acceleration of LLM decoding.",
    )
    made.callback(invoke_without_command=True)(_root)
    for module, function in map(COMMANDS.__getitem__, COMMANDS if names is None else names):
        made.command(cls=Command)(getattr(import_module(f"{__name__}.{module}"), function))
    if names is None:
        from . import bench

        made.add_typer(
            bench.app,
            name="bench",
            help="Measure methods side by side on your prompts: does drafting pay here?",
        )
    return made


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()[name] = make_app()
    return app


def main() -> None:
    """Entry point of the ``lookahead`` command and of ``python -m lookahead``."""
    # Characters that the encoding lacks are escaped, so that a completion is not cut short. The encoding is kept,
    # because a terminal that expects Latin-1 would show UTF-8 wrongly. Records of JSON are always UTF-8.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    first = sys.argv[1:2]
    make_app(first if first and first[0] in COMMANDS else None)(prog_name="lookahead")

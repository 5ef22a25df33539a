"""Options of commands, made from the dataclasses of the Python API, and loading. Imports no torch."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from ..core import SettingsError
from ..engine.options import LoadOptions

if TYPE_CHECKING:
    from ..engine.llm import LLM

R = TypeVar("R")
Json = Annotated[bool, typer.Option("--json", help="One JSON object in place of text.")]


def takes(
    *, only: Collection[str] = (), without: Collection[str] = ("parallel_timeout",), **defaults: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator of commands: a parameter that is a dataclass of options becomes one option per field.

    Args:
        only: fields that this command offers; none named are all.
        without: fields that it does not offer.
        **defaults: of this command, where they are not the fields' own.
    """

    def apply(command: Callable[..., R]) -> Callable[..., R]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            kind = hints[parameter.name]
            if not is_dataclass(kind):
                parameters.append(parameter.replace(annotation=kind))
                continue
            offered = [f for f in fields(kind) if f.metadata["cli"] and f.name not in without]
            offered = [f for f in offered if not only or f.name in only]
            groups[parameter.name] = kind, [f.name for f in offered]
            parameters += [_parameter(kind, f, defaults.get(f.name, f.default)) for f in offered]

        def run(**values: Any) -> R:
            for name, (kind, names) in groups.items():
                values[name] = kind(**{field: values.pop(field) for field in names})
            return command(**values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return apply


def _parameter(options: Any, field: Field[Any], default: Any) -> inspect.Parameter:
    """One field as typer reads parameters; what Python takes by position is an argument."""
    told = field.metadata
    kind: Any = told["kind"] or field.type
    if isinstance(kind, str):
        owner = next(c for c in options.__mro__ if field.name in inspect.get_annotations(c))
        kind = eval(kind, vars(sys.modules[owner.__module__]))
    if default is None:
        kind = kind | None
    info: Any
    if field.kw_only:
        # A flag that is given says yes; there is no --no-flag.
        flag = [f"--{field.name.replace('_', '-')}"] if kind is bool else []
        info = typer.Option(*flag, help=told["help"], metavar=told["metavar"], rich_help_panel=told["panel"])
    else:
        info = typer.Argument(help=told["help"], metavar=told["metavar"])
    kind = Annotated[kind, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def load_model(load: LoadOptions, method: str | None = None, config: Any = None) -> LLM:
    """``lookahead.load`` without the progress bars and log lines of transformers."""
    if load.parallel_timeout is not None and ranks() == 1:
        raise SettingsError(
            "--parallel-timeout is for processes that torchrun starts; leave it out without it"
        )
    from ..engine.loading import load as load_llm

    quiet()
    parallel = "lookahead" if ranks() > 1 else None
    return load_llm(**replace(load, method=method, config=config, parallel=parallel).keywords())


def quiet() -> None:
    """No progress bars and log lines of transformers from here on."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def warm_pool(llm: LLM, file: Path | None) -> Iterator[dict[str, Any]]:
    """Options that make adaptive go on from a file; what it has learnt is written back, errors or not.

    Raises:
        SettingsError: the file cannot be used, or not be written.
    """
    if file is None:
        yield {}
        return
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"--warm must be a file in a folder that exists, got {file}")
    state = llm.warm_state(file)
    try:
        yield {"pool": state}
    finally:
        try:
            state.save(file)
        except OSError as error:
            raise SettingsError(
                f"--warm must be a file that can be written, got {file} ({error.strerror})"
            ) from None


def follow(load: LoadOptions, method: str | None, config: Any) -> None:
    """On any rank but 0 of those that torchrun started: work for rank 0, which alone reads and writes."""
    if ranks() > 1 and os.environ["RANK"] != "0":
        load_model(load, method, config)


def dismiss() -> None:
    """Let the ranks that follow go, where no model was needed."""
    if ranks() > 1:
        from ..engine.loading import dismiss_ranks

        dismiss_ranks()


def ranks() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def read_bytes(path: Path, option: str) -> bytes:
    """A file; "-" is stdin.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return typer.get_binary_stream("stdin").read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{option} must be a file that can be read, got {path} ({error.strerror})"
        ) from None


def read_text(path: Path, option: str) -> str:
    """A text file in UTF-8; "-" is stdin.

    Raises:
        SettingsError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, option).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{option} must be UTF-8 text; {path} is not (byte {error.start}); convert it first"
        ) from None


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers with commas between, in order and each once.

    Raises:
        SettingsError: it is something else, or one is below 1.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise SettingsError(f"{option} must be whole numbers of at least 1, as in 1,4,16; got {text!r}")
    return found

"""Options of commands, made from the dataclasses of the Python API, and loading. Does not import torch."""

# ruff: noqa: RUF009
from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from .. import Adaptive
from ..core import Drafter, SettingsError
from ..fields import OptionSet, offered_types, option
from ..options import LoadOptions, flag_of

if TYPE_CHECKING:
    from ..llm import LLM

R = TypeVar("R")
#: The placeholder of an option's value in ``--help``, by its type. A flag has no value.
METAVARS: dict[Any, str] = {
    str: "TEXT",
    list[str]: "TEXT",
    int: "NUMBER",
    float: "NUMBER",
    Path: "FILE",
    bool: " ",
}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))


def without_types(parameters: Any) -> Any:
    """The same typer parameters; flags, such as ``--help``, show no placeholder for a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = METAVARS[bool]
    return parameters


def metavar_of(kind: Any) -> str | None:
    """The placeholder for a value of this type; None to let typer choose it."""
    if isinstance(kind, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return METAVARS.get(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(OptionSet):
    """What to complete, and how results are shown and saved. Contradictory options are rejected by name."""

    prompt: str | None = option(None, "The prompt.")
    prompt_file: Path | None = option(None, "Read the prompt from a file, unchanged; - is stdin.")
    input: Path | None = option(
        None,
        'JSON lines with "prompt", "messages" or "input_ids" each, and an "id" of your own; - is stdin.',
    )
    output: Path | None = option(None, "The file for the results of --input. [default: stdout]")
    resume: bool = option(False, "Continue an --output of an earlier run with the same settings.")
    mix_settings: bool = option(False, "Let --resume continue with other settings.")
    overwrite: bool = option(False, "Replace an --output or a --trace that exists.")
    batch_size: int = option(1, "Prompts of --input that share forward passes.")
    compare: bool = option(False, "Also decode plainly, and compare texts, steps and seconds.")
    color: bool = option(False, "Show the tokens of each step in one colour.")
    trace: Path | None = option(None, "Write every step to this file as JSON lines, for lookahead show.")
    json: bool = option(False, "Print one JSON object instead of text.")

    def __post_init__(self) -> None:
        given = self.keywords()
        sources = [flag_of(name) for name in ("prompt", "prompt_file", "input") if name in given]
        if len(sources) != 1:
            raise SettingsError(
                "exactly one of --prompt, --prompt-file and --input must be given, got "
                + (" and ".join(sources) or "none")
            )
        for name in ("output", "resume", "batch_size"):
            if name in given and self.input is None:
                raise SettingsError(f"{flag_of(name)} needs --input, which is not given")
        if self.overwrite and self.input is None and self.trace is None:
            raise SettingsError("--overwrite needs --input or --trace, and neither is given")
        exclusive = (
            ("resume", "overwrite"),
            ("color", "input"),
            ("color", "json"),
            ("json", "input"),
            ("trace", "input"),
        )
        for one, other in exclusive:
            if one in given and other in given:
                raise SettingsError(f"--{one} and --{other} cannot be given together; use one of them")
        if self.mix_settings and not self.resume:
            raise SettingsError("--mix-settings needs --resume, which is not given")
        if self.resume and self.output is None:
            raise SettingsError("--resume needs --output, which is not given")
        if self.batch_size < 1:
            raise SettingsError(f"--batch-size must be at least 1, got {self.batch_size}")


def with_options(
    *, only: Collection[str] = (), without: Collection[str] = ("parallel_timeout",), **defaults: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator for commands: a parameter that is a dataclass of options becomes one option per field.

    Args:
        only: the fields that are offered; empty for all.
        without: fields that are not offered.
        **defaults: this command's defaults.
    """

    def apply(command: Callable[..., R]) -> Callable[..., R]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            kind = hints[parameter.name]
            if not is_dataclass(kind):
                for info in getattr(kind, "__metadata__", ()):
                    info.metavar = info.metavar or metavar_of(get_args(kind)[0])
                parameters.append(parameter.replace(annotation=kind))
                continue
            types = offered_types(kind)
            offered = [f for f in fields(kind) if f.name in types and f.name not in without]
            offered = [f for f in offered if not only or f.name in only]
            groups[parameter.name] = kind, [f.name for f in offered]
            for f in offered:
                parameters.append(_parameter(kind, f, types[f.name], defaults.get(f.name, f.default)))

        def run(**values: Any) -> R:
            for name, (kind, names) in groups.items():
                values[name] = kind(**{field: values.pop(field) for field in names})
            return command(**values)

        run.__name__ = command.__name__
        # typer keeps the line breaks of all paragraphs but the first.
        paragraphs = inspect.getdoc(command) or ""
        run.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs.split("\n\n"))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return apply


def _parameter(options: Any, field: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    """A field of ``options`` as a parameter for typer; positional fields of Python become arguments."""
    metadata = field.metadata
    metavar = metadata["metavar"] or metavar_of(kind)
    if default is None:
        kind = kind | None
    info: Any = typer.Argument(help=metadata["help"], metavar=metavar)
    if field.kw_only:
        # There is no --no-flag.
        flag = [flag_of(field.name)] if kind is bool else []
        panel = metadata["panel"] or options.PANEL
        info = typer.Option(*flag, help=metadata["help"], metavar=metavar, rich_help_panel=panel)
    annotation = Annotated[kind, info]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def load_model(load: LoadOptions, drafter: Drafter | None = None) -> LLM:
    """``lookahead.load`` without the progress bars and log lines of transformers."""
    if load.parallel_timeout is not None and ranks() == 1:
        raise SettingsError(
            "--parallel-timeout is for processes that torchrun starts; leave it out without it"
        )
    gc.disable()  # imports and metadata create a million lasting objects; garbage collection would take a second
    try:
        from ..loading import load_with

        quiet()
        return load_with(replace(load, drafter=drafter, parallel="lookahead" if ranks() > 1 else None))
    finally:
        gc.freeze()
        gc.unfreeze()  # freezing and unfreezing moves them to the oldest generation, which is seldom scanned
        gc.enable()


def quiet() -> None:
    """Turn off progress bars and log lines of transformers without importing it, which takes a second."""
    if "transformers" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def warm_pool(llm: LLM, file: Path | None) -> Iterator[dict[str, Any]]:
    """Options with which adaptive continues from a file. What it learns is written back, even after an error."""
    if file is None:
        yield {}
        return
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"--warm must be a file in a folder that exists, got {file}")
    state = llm.warm_state(file)
    try:
        adaptive = llm.drafter if isinstance(llm.drafter, Adaptive) else Adaptive()
        yield {"drafter": replace(adaptive, state=state)}
    finally:
        try:
            state.save(file)
        except OSError as error:
            raise SettingsError(
                f"--warm must be a file that can be written, got {file} ({error.strerror})"
            ) from None


def ranks() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def dismiss() -> None:
    """End the other ranks if no model was needed."""
    if ranks() > 1:
        from ..loading import dismiss_ranks

        dismiss_ranks()


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
    """Whole numbers separated by commas, sorted, without duplicates."""
    try:
        parsed = sorted({int(part) for part in text.split(",")})
    except ValueError:
        parsed = []
    if not parsed or parsed[0] < 1:
        raise SettingsError(f"{option} must be whole numbers of at least 1, as in 1,4,16; got {text!r}")
    return parsed

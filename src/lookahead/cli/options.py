"""Options that several commands share, and how they become settings. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import PRESETS, LookaheadConfig, SettingsError
from ..drafters import DEFAULT_METHOD, METHODS, OWN_SETTINGS

if TYPE_CHECKING:
    from ..engine import LLM

DRAFT, SAMPLE, MACHINE = "Drafting", "Sampling", "Model and machine"

Model = Annotated[
    str | None,
    typer.Argument(help="A directory or a hub id; without it the bundled model.", metavar="[MODEL]"),
]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"How to draft; {DEFAULT_METHOD} unless W, N or G are given.",
        metavar="|".join(METHODS),
        rich_help_panel=DRAFT,
    ),
]
Triple = Annotated[
    str | None,
    typer.Option(
        "--lookahead", help="Window, n-gram and guess set size.", metavar="W,N,G", rich_help_panel=DRAFT
    ),
]
WindowSize = Annotated[int | None, typer.Option(help="W: columns of the window.", rich_help_panel=DRAFT)]
NgramSize = Annotated[int | None, typer.Option(help="N: tokens of an n-gram.", rich_help_panel=DRAFT)]
GuessSetSize = Annotated[int | None, typer.Option(help="G: candidates per step.", rich_help_panel=DRAFT)]
Preset = Annotated[
    str | None, typer.Option(help="Settings by name.", metavar="|".join(PRESETS), rich_help_panel=DRAFT)
]
MaxRows = Annotated[
    int | None, typer.Option(help="Rows of a step at most (adaptive).", rich_help_panel=DRAFT)
]
Sources = Annotated[
    str | None,
    typer.Option(
        help="Where drafts come from (adaptive): suffix, logits, ngrams, jacobi, corpus.",
        metavar="LIST",
        rich_help_panel=DRAFT,
    ),
]
NoBudget = Annotated[
    bool,
    typer.Option(
        "--no-budget", help="Always --max-rows, whatever they cost (adaptive).", rich_help_panel=DRAFT
    ),
]
Warm = Annotated[
    Path | None,
    typer.Option(
        help="Keep what adaptive learns in this file: read first where it exists, written at the end. It holds "
        "statistics of the texts.",
        metavar="FILE",
        rich_help_panel=DRAFT,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.", rich_help_panel=SAMPLE)]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest.", rich_help_panel=SAMPLE)]
TopP = Annotated[float | None, typer.Option(help="Draw from the nucleus of mass p.", rich_help_panel=SAMPLE)]
MinP = Annotated[
    float | None, typer.Option(help="Draw from tokens with p of the best.", rich_help_panel=SAMPLE)
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="1 is neutral.", rich_help_panel=SAMPLE)]
NoRepeatNgramSize = Annotated[
    int | None, typer.Option(help="No n-gram of this size twice.", rich_help_panel=SAMPLE)
]
Seed = Annotated[int | None, typer.Option(help="Of the draws.", rich_help_panel=SAMPLE)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16 or float64.", rich_help_panel=MACHINE)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=MACHINE)]
Threads = Annotated[int | None, typer.Option(help="Threads of torch on the CPU.", rich_help_panel=MACHINE)]
ParallelTimeout = Annotated[
    float | None,
    typer.Option(
        help="Under torchrun: seconds of silence after which a rank counts as hung; 120 without it.",
        rich_help_panel=MACHINE,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Of a hub id.", rich_help_panel=MACHINE)]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's own code run.", rich_help_panel=MACHINE)
]

#: What a method takes of the drafting options; one that is not named takes (W, N, G).
FIXED = ("--lookahead", "--preset", "--window-size", "--ngram-size", "--guess-set-size")
TAKES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt-lookup": (),
    "jacobi": ("--window-size",),
    "adaptive": ("--window-size", "--ngram-size", "--max-rows", "--sources", "--no-budget", "--warm"),
}


def settings(
    method: str | None,
    triple: str | None = None,
    window_size: int | None = None,
    ngram_size: int | None = None,
    guess_set_size: int | None = None,
    preset: str | None = None,
    max_rows: int | None = None,
    sources: str | None = None,
    no_budget: bool = False,
    warm: Path | None = None,
) -> tuple[str, Any]:
    """(method, its settings) from the options; no settings where the library is to choose.

    Where no method is named, W, N or G ask for lookahead. What contradicts itself is refused by name.

    Raises:
        SettingsError: contradictory options, unknown names, values out of range.
    """
    if method is not None and method not in METHODS:
        raise SettingsError(f"--method must be one of {', '.join(METHODS)}, got {method!r}")
    values = {
        "--lookahead": triple, "--preset": preset, "--window-size": window_size, "--ngram-size": ngram_size,
        "--guess-set-size": guess_set_size, "--max-rows": max_rows, "--sources": sources,
        "--no-budget": no_budget or None, "--warm": warm,
    }  # fmt: skip
    given = [name for name, value in values.items() if value is not None]
    if method is None:
        only_fixed = set(given) - set(TAKES[DEFAULT_METHOD])
        shared = set(given) <= set(FIXED) and given
        method = "lookahead" if only_fixed or shared else DEFAULT_METHOD
    takes = TAKES.get(method, FIXED)
    for name in given:
        if name not in takes:
            other = next(
                (other for other in ("lookahead", "adaptive") if name in TAKES.get(other, FIXED)), ""
            )
            raise SettingsError(
                f"{name} has no effect with --method {method}; leave it out or use --method {other}"
            )
    sized = [name for name in given if name in FIXED and name not in ("--lookahead", "--preset")]
    if triple is not None and (sized or preset is not None):
        other = sized[0] if sized else "--preset"
        raise SettingsError(f"--lookahead and {other} cannot be given together; use one of them")
    if preset is not None and preset not in PRESETS:
        raise SettingsError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if given in ([], ["--warm"]):
        return method, None
    sizes = {"window_size": window_size, "ngram_size": ngram_size}
    if method not in OWN_SETTINGS:
        return method, LookaheadConfig.of(triple or preset, **sizes, guess_set_size=guess_set_size)
    own = sizes | {
        "max_rows": max_rows,
        "sources": None if sources is None else tuple(filter(None, sources.replace("+", ",").split(","))),
        "budget": False if no_budget else None,
    }
    return method, {name: value for name, value in own.items() if value is not None}


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


def load_model(model: str | None, **keywords: Any) -> LLM:
    """``lookahead.load`` without the progress bars and log lines of transformers."""
    if keywords.get("parallel_timeout") is not None and ranks() == 1:
        raise SettingsError(
            "--parallel-timeout is for processes that torchrun starts; leave it out without it"
        )
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from ..engine import load

    return load(model, parallel="lookahead" if ranks() > 1 else None, **keywords)


def follow(model: str | None, **keywords: Any) -> None:
    """On any rank but 0 of those that torchrun started: work for rank 0, which alone reads and writes."""
    if ranks() > 1 and os.environ["RANK"] != "0":
        load_model(model, **keywords)


def dismiss() -> None:
    """Let the ranks that follow go, where no model was needed."""
    if ranks() > 1:
        from ..parallel import dismiss as let_go
        from ..parallel import start

        let_go(start())


def ranks() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def read_text(path: Path, option: str) -> str:
    """A text file in UTF-8; "-" is stdin.

    Raises:
        SettingsError: it is not there, or not UTF-8.
    """
    try:
        if str(path) == "-":
            return typer.get_binary_stream("stdin").read().decode("utf-8")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SettingsError(
            f"{option} must be a file that can be read, got {path} ({error.strerror})"
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{option} must be UTF-8 text; {path} is not (byte {error.start}); convert it first"
        ) from None

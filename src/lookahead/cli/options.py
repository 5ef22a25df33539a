"""Options that several commands share, and how they become settings. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import METHODS, PRESETS, LookaheadConfig, SettingsError
from ..core.drafters import OWN_SETTINGS

if TYPE_CHECKING:
    from ..engine import LLM

DRAFT, SAMPLE, MACHINE = "Drafting", "Sampling", "Model and machine"

Model = Annotated[
    str | None,
    typer.Argument(help="A directory or a hub id; without it the bundled model.", metavar="[MODEL]"),
]
Method = Annotated[str, typer.Option(help="How to draft.", metavar="|".join(METHODS), rich_help_panel=DRAFT)]
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
Revision = Annotated[str | None, typer.Option(help="Of a hub id.", rich_help_panel=MACHINE)]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's own code run.", rich_help_panel=MACHINE)
]

#: Methods that (W, N, G) say nothing to, and what of it they take.
TAKES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt-lookup": (),
    "jacobi": ("--window-size",),
    **dict.fromkeys(OWN_SETTINGS, ()),
}


def settings(
    method: str,
    triple: str | None = None,
    window_size: int | None = None,
    ngram_size: int | None = None,
    guess_set_size: int | None = None,
    preset: str | None = None,
) -> LookaheadConfig | None:
    """(W, N, G) from the options, None for a method with settings of its own kind.

    What contradicts itself is refused by name.

    Raises:
        SettingsError: contradictory options, unknown names, values out of range.
    """
    if method not in METHODS:
        raise SettingsError(f"--method must be one of {', '.join(METHODS)}, got {method!r}")
    sizes = {
        "--window-size": window_size,
        "--ngram-size": ngram_size,
        "--guess-set-size": guess_set_size,
    }
    given = [name for name, value in sizes.items() if value is not None]
    whole = [name for name, value in (("--lookahead", triple), ("--preset", preset)) if value is not None]
    if triple is not None and (given or preset is not None):
        other = given[0] if given else "--preset"
        raise SettingsError(f"--lookahead and {other} cannot be given together; use one of them")
    ignored = [name for name in whole + given if name not in TAKES.get(method, (name,))]
    if ignored:
        raise SettingsError(
            f"{ignored[0]} has no effect with --method {method}; leave it out or use --method lookahead"
        )
    if preset is not None and preset not in PRESETS:
        raise SettingsError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if method in OWN_SETTINGS or not (whole or given):
        return None  # the library chooses by device
    return LookaheadConfig.of(
        triple or preset,
        window_size=window_size,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
    )


def load_model(model: str | None, **keywords: Any) -> LLM:
    """``lookahead.load`` without the progress bars and log lines of transformers."""
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

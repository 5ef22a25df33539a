"""What ``lookahead generate`` completes, and how results are shown and saved."""

# ruff: noqa: RUF009
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..core import SettingsError
from ..option import OptionSet, flag_of, option


@dataclass(frozen=True, kw_only=True)
class Task(OptionSet):
    """What to complete, and how results are shown and saved. Contradictory options are rejected by name."""

    GROUP: ClassVar[str] = "Prompt and output"

    prompt: str | None = option(None, "The prompt.", common=True)
    prompt_file: Path | None = option(
        None, "Read the prompt from a file, unchanged; - is stdin.", common=True
    )
    chat: bool = option(
        False,
        'Apply the model\'s chat template to --prompt, --prompt-file or each "prompt" of --input.',
        common=True,
    )
    input: Path | None = option(
        None,
        'JSON lines, each with "prompt", "messages" or "input_ids", and optionally an "id"; - is stdin.',
        common=True,
    )
    output: Path | None = option(None, "The file for the results of --input. [default: stdout]", common=True)
    resume: bool = option(False, "Continue the --output of an earlier run with the same settings.")
    mix_settings: bool = option(False, "Let --resume continue with different settings.")
    overwrite: bool = option(False, "Replace an existing --output or --trace.")
    batch_size: int = option(1, "Prompts of --input that share forward passes.")
    compare: bool = option(False, "Compare output, steps and seconds with plain decoding.", common=True)
    color: bool = option(False, "Show each step's tokens in one colour.")
    trace: Path | None = option(None, "Write every step to this file as JSON lines, for lookahead show.")
    json: bool = option(False, "Print one JSON object instead of text.")

    def __post_init__(self) -> None:
        given = self.keywords()
        sources = [flag_of(name) for name in ("prompt", "prompt_file", "input") if name in given]
        if len(sources) != 1:
            raise SettingsError(
                "exactly one of --prompt, --prompt-file and --input must be given, got "
                + (" and ".join(sources) or "none; an argument without a name is the model, not the prompt")
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

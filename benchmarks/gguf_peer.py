"""Shared code of other libraries as methods of the benchmark; most of them read GGUF files themselves."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from lookahead.bench.methods import Method, ModelUnderTest, Outcome, RunOptions
from lookahead.core import SettingsError, Stats

#: Maximum tokens drafted by prompt lookup in any library; the example in transformers' documentation.
LOOKUP_TOKENS = 10


def outcome_of(
    prompt_tokens: int, tokens: list[int], rows: list[int], sizes: list[int], times: list[float]
) -> Outcome:
    """The cost of another library's decoding.

    Args:
        prompt_tokens: length of the prompt.
        tokens: the new tokens.
        rows: rows of each step.
        sizes: number of tokens from the prefill, then from each step.
        times: seconds at which decoding began, the prefill's tokens arrived, and each step's tokens arrived.
    """
    prefill, *steps = sizes
    if len(steps) != len(rows) or len(tokens) != sum(sizes):
        raise AssertionError(
            f"every forward pass must give tokens once: {len(rows)} steps, {len(steps)} groups of tokens, "
            f"{sum(sizes)} tokens in groups, {len(tokens)} in the text"
        )
    stats = Stats(prompt_tokens=prompt_tokens, new_tokens=1 + sum(steps))
    for evaluated, size in zip(rows, steps, strict=True):
        stats.count_step(evaluated, evaluated - 1, size)
    first, *seconds = (b - a for a, b in pairwise(times))
    return Outcome(tokens, stats, prefill, first, steps, rows, seconds)


class MissingPackage(SettingsError):
    """A peer's package is not installed."""


class GGUFPeer(Method):
    """Greedy decoding of a GGUF file by another library, from an optional package.

    Args:
        name: ends in "-greedy" or "-lookup", for prompt lookup.
        file: a GGUF file; empty for the model's own file.
        model: the model under test.

    Attributes:
        package: name on the package index.
        installing: a note on the installation, for the error message.
        engine: the library's object for the file, loaded for the first prompt.

    Raises:
        MissingPackage: the package is not installed.
        SettingsError: the file is missing.
    """

    package: str
    installing = ""

    def __init__(self, name: str, file: str, model: ModelUnderTest) -> None:
        try:
            self.settings = {self.package: version(self.package)}
        except PackageNotFoundError:
            raise MissingPackage(
                f"{name} needs {self.package}, which is not installed: pip install {self.package}{self.installing}"
            ) from None
        gguf = file or model.gguf
        if gguf is None or not Path(gguf).is_file():
            raise SettingsError(f"{name} needs a GGUF file, got {gguf or model.name}; give it as {name}:FILE")
        self.file = Path(gguf)
        self.lookup = name.endswith("-lookup")
        self.label = f"{name}:{self.file.name}"
        self.engine: Any = None

    def comparable(self, options: RunOptions) -> bool:
        """Never, because these engines round differently, and a quantized file has other weights."""
        return False

    def check_greedy(self, options: RunOptions) -> None:
        """Raise SettingsError for options that sample."""
        if options.temperature:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")

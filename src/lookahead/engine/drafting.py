"""How to draft, as a command line says it: the options of all methods, and what they come to. Imports no torch."""

# ruff: noqa: RUF009
from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core import PRESETS, LookaheadConfig, SettingsError
from ..drafters import DEFAULT_METHOD, METHODS, OWN_SETTINGS
from .fields import documented, option

PANEL = "Drafting"
#: What a method takes of the options; one that is not named takes (W, N, G).
TRIPLE = ("lookahead", "preset", "window_size", "ngram_size", "guess_set_size")
TAKES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt-lookup": (),
    "jacobi": ("window_size",),
    "adaptive": ("window_size", "ngram_size", "max_rows", "sources", "no_budget", "warm"),
}


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How to draft: a method and its settings, for ``method=`` and ``config=`` of the Python API."""

    method: str | None = option(
        None, f"How to draft; {DEFAULT_METHOD} unless W, N or G are given.", panel=PANEL,
        metavar="|".join(METHODS),
    )  # fmt: skip
    lookahead: str | None = option(None, "Window, n-gram and guess set size.", panel=PANEL, metavar="W,N,G")
    window_size: int | None = option(None, "W: columns of the window.", panel=PANEL)
    ngram_size: int | None = option(None, "N: tokens of an n-gram.", panel=PANEL)
    guess_set_size: int | None = option(None, "G: candidates per step.", panel=PANEL)
    preset: str | None = option(
        None,
        "W, N and G by the model's size in parameters, or by name.",
        panel=PANEL,
        metavar="|".join(PRESETS),
    )
    max_rows: int | None = option(None, "Rows of a step at most (adaptive).", panel=PANEL)
    sources: str | None = option(
        None,
        "Where drafts come from (adaptive): suffix, logits, jacobi, corpus.",
        panel=PANEL,
        metavar="LIST",
    )
    no_budget: bool = option(False, "Always --max-rows, whatever they cost (adaptive).", panel=PANEL)
    warm: Path | None = option(
        None,
        "Keep what adaptive learns in this file: read first where it exists, written at the end. It holds "
        "statistics of the texts.",
        panel=PANEL,
        metavar="FILE",
    )

    def resolve(self) -> tuple[str, Any]:
        """(method, its settings); no settings where the library is to choose.

        Where no method is named, W, N or G ask for lookahead. What contradicts itself is refused by name.

        Raises:
            SettingsError: contradictory options, unknown names, values out of range.
        """
        if self.method is not None and self.method not in METHODS:
            raise SettingsError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "method"}
        given = [name for name, value in values.items() if value is not None and value is not False]
        method = self.method
        if method is None:
            asks_for_triple = set(given) - set(TAKES[DEFAULT_METHOD]) or (given and set(given) <= set(TRIPLE))
            method = "lookahead" if asks_for_triple else DEFAULT_METHOD
        for name in given:
            if name not in TAKES.get(method, TRIPLE):
                other = "lookahead" if name in TRIPLE else "adaptive"
                raise SettingsError(
                    f"{_flag(name)} has no effect with --method {method}; leave it out or use --method {other}"
                )
        beside = [name for name in given if name in TRIPLE and name != "lookahead"]
        if self.lookahead is not None and beside:
            raise SettingsError(
                f"--lookahead and {_flag(beside[0])} cannot be given together; use one of them"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise SettingsError(f"--preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if given in ([], ["warm"]):
            return method, None
        sizes = {name: values[name] for name in ("window_size", "ngram_size")}
        if method not in OWN_SETTINGS:
            return method, LookaheadConfig.of(
                self.lookahead or self.preset, **sizes, guess_set_size=self.guess_set_size
            )
        sources = self.sources
        own = sizes | {
            "max_rows": self.max_rows,
            "sources": sources and tuple(filter(None, sources.replace("+", ",").split(","))),
            "budget": False if self.no_budget else None,
        }
        return method, {name: value for name, value in own.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

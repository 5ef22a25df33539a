"""Every option of ``load`` and of a generation, declared once with its help, and checked. Imports no torch.

A new option is one field here: the Python API (types, signatures, docstrings) and the command line follow.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import TYPE_CHECKING, Any, Self

from ..core import SettingsError
from ..drafters import METHODS
from .fields import documented, option

if TYPE_CHECKING:
    import torch

    from ..sampling import Process

SAMPLING, MACHINE = "Sampling", "Model and machine"


class Given:
    """What the dataclasses of options have in common."""

    __slots__ = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From keywords.

        Raises:
            SettingsError: a name that is not an option, or a value that is not allowed.
        """
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SettingsError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**given)

    def keywords(self) -> dict[str, Any]:
        """The options that are not at their defaults, as keywords."""
        values = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return {field.name: value for field, value in values if value != field.default}


@documented
@dataclass(frozen=True, slots=True)
class LoadOptions(Given):
    """How to load a model, and how it drafts unless a call says otherwise."""

    path_or_id: str | os.PathLike[str] | None = option(
        None,
        "A directory or a hub id; without it the bundled model.",
        metavar="[MODEL]",
        keyword=False,
        kind=str,
    )
    dtype: str | torch.dtype = option(
        "auto", "auto (the checkpoint's), float32, bfloat16, float16 or float64.", panel=MACHINE, kind=str
    )
    device: str | torch.device | None = option(
        None, "cpu, cuda, cuda:1, ...; without it a GPU where there is one.", panel=MACHINE, kind=str
    )
    threads: int | None = option(None, "Threads of torch on the CPU, for the whole process.", panel=MACHINE)
    attention: str | None = option(
        None, "Attention of the model; without it transformers chooses.", panel=MACHINE, metavar="sdpa|eager"
    )
    revision: str | None = option(None, "Of a hub id.", panel=MACHINE)
    trust_remote_code: bool = option(False, "Let the model's own code run.", panel=MACHINE)
    local_files_only: bool = option(False, "Use no network.", panel=MACHINE)
    parallel_timeout: float | None = option(
        None, "Under torchrun: seconds until a silent rank counts as hung; 120 without it.", panel=MACHINE
    )
    parallel: str | None = option(
        None,
        "'lookahead' divides every step among the processes that torchrun started. load then returns on rank 0 "
        "only: the other ranks work for it and exit.",
        cli=False,
    )
    method: str | None = option(
        None, "A name in METHODS; None is 'adaptive', or 'lookahead' where config is a (W, N, G).", cli=False
    )
    config: Any = option(
        None, "(W, N, G), a preset's name or else for LookaheadConfig.of; or settings of adaptive.", cli=False
    )

    def __post_init__(self) -> None:
        threads = self.threads
        _must(threads is None or (_whole(threads) and threads >= 1), "threads must be at least 1", threads)
        rule = "parallel must be 'lookahead' or None"
        _must(self.parallel in ("lookahead", None), rule, self.parallel)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Given):
    """What one generation may be told.

    Options that are not given are neutral: the text is then the model's greedy one. Nothing is taken from the
    model's saved generation config but its end tokens. ``top_k``, ``top_p``, ``min_p`` and ``typical_p`` need a
    temperature above 0.
    """

    max_new_tokens: int = option(128, "Most tokens to generate; the model's context may end a text earlier.")
    stop: str | Sequence[str] | None = option(None, "End before this text; may be several.", kind=list[str])
    ignore_eos: bool = option(False, "Go on past the model's end tokens.")
    min_new_tokens: int | None = option(None, "No end token before that many.")
    method: str | None = option(
        None, "A name in METHODS; None for that of load, or the one that config is for.", cli=False
    )
    config: Any = option(None, "Settings of the method; None for those of load.", cli=False)
    temperature: float = option(0.0, "0 is greedy; above 0 samples.", panel=SAMPLING)
    top_k: int | None = option(None, "Draw from the k likeliest tokens.", panel=SAMPLING)
    top_p: float | None = option(None, "Draw from the nucleus of mass p.", panel=SAMPLING)
    min_p: float | None = option(
        None, "Draw from tokens with at least p of the best one's probability.", panel=SAMPLING
    )
    typical_p: float | None = option(
        None, "Draw from the locally typical tokens of mass p (Meister et al., 2023).", panel=SAMPLING
    )
    repetition_penalty: float | None = option(None, "Above 0; 1 is neutral.", panel=SAMPLING)
    no_repeat_ngram_size: int | None = option(None, "No n-gram of this size twice.", panel=SAMPLING)
    seed: int | None = option(
        None, "Of the draws; without it torch's generator chooses. Prompt i has seed + i.", panel=SAMPLING
    )
    bad_words: Sequence[str | Sequence[int]] | None = option(
        None, "Texts, or lists of token ids, that never appear.", cli=False
    )
    logits_processor: Process | Sequence[Process] | None = option(
        None, "Callables (ids (1, L), scores (1, V)) -> scores (1, V), applied before temperature.", cli=False
    )
    pool: Any = option(
        None,
        "What the method keeps across calls: an NGramPool for 'lookahead', one prompt at a time, or LLM.warm_state() "
        "for 'adaptive', which the prompts of a list share.",
        cli=False,
    )

    def __post_init__(self) -> None:
        _must(self.method in (None, *METHODS), f"method must be one of {', '.join(METHODS)}", self.method)
        for name in ("max_new_tokens", "top_k", "no_repeat_ngram_size", "min_new_tokens"):
            n = getattr(self, name)
            optional = n is None and name != "max_new_tokens"
            _must(optional or (_whole(n) and n >= 1), f"{name} must be a whole number of at least 1", n)
        low = self.min_new_tokens
        rule = f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens})"
        _must(low is None or low <= self.max_new_tokens, rule, low)
        t = self.temperature
        rule = "temperature must be a number of at least 0"
        _must(_number(t) and 0 <= t < inf, rule, t, "0 is greedy")
        for name in ("top_p", "min_p", "typical_p"):
            p = getattr(self, name)
            _must(p is None or (_number(p) and 0 < p <= 1), f"{name} must be above 0 and at most 1", p)
        penalty = self.repetition_penalty
        positive = penalty is None or (_number(penalty) and 0 < penalty < inf)
        _must(positive, "repetition_penalty must be above 0", penalty, "1 is neutral")
        _must(self.seed is None or _whole(self.seed), "seed must be a whole number or None", self.seed)
        _must(isinstance(self.ignore_eos, bool), "ignore_eos must be true or false", self.ignore_eos)
        rule = "a stop string must be a text of at least 1 character"
        for text in self.stops:
            _must(isinstance(text, str) and text != "", rule, text)
        for process in self.processors:
            _must(callable(process), "logits_processor must be a callable or a list of callables", process)
        for word in self.bad_words or ():
            _must(len(word) > 0, "a bad word must be a text or a list of token ids, not empty", word)
        for name in ("top_k", "top_p", "min_p", "typical_p"):
            if getattr(self, name) is not None and not self.sampled:
                raise SettingsError(
                    f"{name} needs a temperature above 0, got temperature {t:g} (greedy); "
                    f"set temperature or leave {name} out"
                )

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def processors(self) -> list[Process]:
        """The caller's own logits processors."""
        given = self.logits_processor
        if given is None:
            return []
        return list(given) if isinstance(given, Sequence) else [given]


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(Options):
    """Options of a list of prompts: those of each generation, and how they run together."""

    batch_size: int | None = option(
        None, "How many prompts of a list share forward passes; None is all for generate and 1 for run."
    )
    seeds: Sequence[int] | None = option(None, "One per prompt, in place of seed + i.", cli=False)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        n = self.batch_size
        _must(n is None or (_whole(n) and n >= 1), "batch_size must be a whole number of at least 1", n)


def _must(holds: bool, rule: str, given: Any, cure: str = "") -> None:
    if not holds:
        raise SettingsError(f"{rule}, got {given!r}" + (f"; {cure}" if cure else ""))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value

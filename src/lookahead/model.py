"""The interface of a model: what the rest of the library knows about it, whichever engine evaluates it.

    cpu.model.PackedModel           weights of a GGUF file, on this library's own compiled passes
    hf.model.HFModel                a transformers module, on any device
    llamacpp.model.LlamaCppModel    a GGUF file, run by llama.cpp
    testing.FakeModel               a function of the prefix, for tests

``LLM``, the server, the drafters, learning and benchmarks use only this interface. A new engine is one subclass of
``Model`` and one of ``core.Target``; ``make_target`` connects them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .core import SettingsError, Target

if TYPE_CHECKING:
    from .equivalence import Equivalence

#: The position limit of a model without one; longer than any sequence.
NO_LIMIT = 1 << 30


class Shape(NamedTuple):
    """The sizes by which files that serve several models of one shape are found, such as light heads.

    Attributes:
        family: the architecture, as in "llama".
        vocabulary: V.
        hidden: size of a hidden state; 0 if unknown.
        layers: number of layers; 0 if unknown.
    """

    family: str
    vocabulary: int
    hidden: int
    layers: int

    @property
    def name(self) -> str:
        """The name of such files, without suffix."""
        return f"v{self.vocabulary}-h{self.hidden}-l{self.layers}"


class HeadParts(NamedTuple):
    """The parts of a model with which a light head is trained and used.

    Attributes:
        vocabulary, hidden: rows and columns of the output matrix.
        embed, output: (tokens) -> their embeddings, and their rows of the output matrix; (n, hidden) fp32 arrays.
    """

    vocabulary: int
    hidden: int
    embed: Callable[[Sequence[int]], Any]
    output: Callable[[Sequence[int]], Any]


def positions_of(config: Any) -> int | None:
    """The number of positions that a model was trained for; None without a limit.

    MPT calls it ``max_seq_len``; it builds its ALiBi bias for as many positions.

    Args:
        config: the text config.
    """
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(positions) if positions else None


class Limits:
    """Properties of a model that every target needs.

    Attributes:
        vocabulary: V, the columns of the logits.
        max_positions: positions that the model was trained for; ``NO_LIMIT`` without a limit.
        rope_type, rope_boundary: the type of rotary positions whose frequencies depend on the sequence length, and
            the position at which they change; ("", ``NO_LIMIT``) if they do not change.
    """

    rope_type: str = ""
    rope_boundary: int = NO_LIMIT

    def __init__(self, vocabulary: int, max_positions: int) -> None:
        self.vocabulary = vocabulary
        self.max_positions = max_positions


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of ``paths.probe`` for a model.

    Attributes:
        mode: "tree", "batch-rows" (a tree's paths as rows of a batch), or "plain" (one row per step).
        reason: why, in one line with the figures.
        equivalence: the last completed comparison; None if there was none.
        facts: the model's facts, for targets that evaluate trees; None in the other modes.
        half: whether logits are rounded to 16 bits or less, so a path that is equal up to rounding may resolve near
            ties either way.
    """

    mode: str
    reason: str
    equivalence: Equivalence | None
    facts: Limits | None
    half: bool = False

    @property
    def drafts(self) -> bool:
        """Whether the model can evaluate drafts."""
        return self.mode != "plain"


class Model(ABC):
    """A loaded model.

    Attributes:
        description: one line about the model and its engine, for messages; the text before the first comma names it.
        weights: the dtype of the weights, as in "float32", or the types of packed weights, those with the most bytes
            first, as in "Q4_K + Q6_K".
        parameter_count: number of weights; tied weights count once.
        device: the device of the logits, in torch's notation.
        runs_on: the type of the device that evaluates the layers, as in "cuda"; "gpu" for any GPU in llama.cpp.
        gives_tensors: whether the rows of its scores are torch tensors; else they are numpy arrays.
        attention: the attention implementation, for display.
        shape: see ``Shape``.
        context: the context length in tokens, including the prompt; None for no limit.
        eos: tokens that end a completion; empty if the model does not say.
        sampling: how the model's authors suggest to sample, as fields of ``Options``; empty if they do not say.
        token_bytes: bytes of the keys and values of a token; 0 if unknown.
        tokenizer: its tokenizer, by which base tables are found; None if unknown. ``LLM`` sets it.
        state: what was measured or loaded for the model, by what measured it (cost curves, light heads). Nothing else
            keeps such results, so they end with the model; ``forget`` drops them.
    """

    description: str
    weights: str
    parameter_count: int
    device: str = "cpu"
    runs_on: str = "cpu"
    gives_tensors: bool = False
    attention: str = ""
    shape: Shape
    context: int | None
    eos: frozenset[int]
    sampling: Mapping[str, float] = MappingProxyType({})
    token_bytes: int = 0
    tokenizer: Any = None
    state: dict[str, dict[Any, Any]]

    # ------------------------------------------------------------------------------- evaluating steps

    @property
    @abstractmethod
    def probe(self) -> Probe:
        """Which steps the model can evaluate. It is checked once, and again after the model has changed.

        Raises:
            SettingsError: the model cannot be used here.
            OutOfMemory: not even the check fits in memory.
        """

    @abstractmethod
    def make_target(self, path: str = "auto", exact: bool = False) -> Target:
        """A new target. ``target.path`` is the chosen path, ``target.reason`` the reason for the choice.

        Args:
            path: the name of a path, or "auto" for the best one that works.
            exact: allow only paths on which drafting changes no bit of the logits (``Target.guarantee``).

        Raises:
            SettingsError: the path is not available for this model, or the model has no exact path.
        """

    @property
    def rope_boundary(self) -> int:
        """The position at which rotary frequencies change, so that sequences on either side cannot share a pass."""
        return NO_LIMIT

    def lock(self, target: Target | None = None) -> AbstractContextManager[Any]:
        """A context in which this thread may run the model; by default, threads share nothing and need not wait.

        Args:
            target: the target that evaluates the passes; None for ``probe`` and ``make_target``.
        """
        return nullcontext()

    def device_memory(self) -> int:
        """Free bytes of the memory of its device; 0 for a CPU, or if unknown."""
        return 0

    # ------------------------------------------------------------------------------- identity

    @property
    @abstractmethod
    def key(self) -> str:
        """What determines the cost of its steps, as a text: shape, types of the weights, device and engine options,
        but neither the weights' values nor the path."""

    @property
    def version(self) -> Hashable:
        """Differs after every change of the model. Keys and values are reused only for equal versions."""
        return None

    def forget(self) -> None:
        """Drop all results of checks and measurements, after a change that ``version`` does not show."""
        self.state.clear()

    @abstractmethod
    def checksum(self, samples: int | None = None) -> int:
        """A checksum of the bits of all weights.

        Args:
            samples: the most numbers to read of each tensor, at regular intervals; None for all.
        """

    # ------------------------------------------------------------------------------- light heads

    def head_parts(self) -> HeadParts:
        """The parts that a light head needs.

        Raises:
            SettingsError: the engine does not provide them.
        """
        name = self.description.partition(",")[0]
        raise SettingsError(
            f"a light head needs hidden states, which {name} does not provide; decode without one"
        )

    def make_head(self, weights: Any, target: Target) -> Any:
        """Make a light head run beside a target.

        Args:
            weights: a ``drafters.adaptive.sources.head_file.HeadWeights`` of this model's sizes.
            target: one of this model's targets, which provides hidden states.

        Returns:
            A ``drafters.adaptive.sources.light_head.LightHead``.

        Raises:
            SettingsError: the engine cannot run one.
        """
        self.head_parts()
        raise NotImplementedError


def path_error(model: Model, path: str, instead: str) -> SettingsError:
    """The error for a path, or for "exact=True", that an engine with a single path does not have."""
    asked = path if path == "exact=True" else f"the path {path!r}"
    return SettingsError(f"{asked} is not available for {model.description}; {instead}")


#: Checksums are below this prime.
PRIME = (1 << 61) - 1


def sums_of(bits: Any, samples: int | None = None) -> tuple[int, int]:
    """The argument of ``combined_checksum`` for one numpy array of integers, (n,).

    Args:
        samples: the most numbers to read, at regular intervals; None for all.
    """
    if samples is not None:
        bits = bits[:: len(bits) // samples + 1]
    middle = len(bits) // 2
    half = int(bits[:middle].sum(dtype="int64"))
    return half + int(bits[middle:].sum(dtype="int64")), half


def combined_checksum(sums: Sequence[tuple[int, int]]) -> int:
    """One number for the tensors of a model, whose order matters.

    Args:
        sums: of each tensor, the sum of its bits read as integers, and that of its first half, so that the order of
            the weights matters too.
    """
    total = 0
    for number, (whole, half) in enumerate(sums, 1):
        total = (total * 31 + (whole * 3 + half) * number) % PRIME
    return total

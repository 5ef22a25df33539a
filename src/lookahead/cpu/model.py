"""A model of a GGUF file on this library's own compiled passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core import Target
from ..model import NO_LIMIT, HeadParts, Limits, Model, Probe, Shape, combined_checksum, path_error, sums_of
from .blueprint import Blueprint
from .compiled_model import CompiledModel, checked
from .dense import Linear, floats
from .packed import PackedLinear
from .target import CpuTarget


class PackedModel(Model):
    """A model whose weights are quantized as in its file, or float32 or bfloat16.

    Args:
        blueprint: its parts.
        family: its architecture, for ``Shape``.
        eos, sampling, weights, parameter_count: see ``Model``.
        max_positions: positions that the model was trained for; ``NO_LIMIT`` without a limit.

    Attributes:
        compiled: its compiled pass.

    Raises:
        Unsupported: numba cannot compile here.
    """

    attention = "compiled"

    def __init__(
        self,
        blueprint: Blueprint,
        family: str,
        eos: Iterable[int],
        sampling: Mapping[str, float],
        max_positions: int,
        weights: str,
        parameter_count: int,
    ) -> None:
        self.compiled = checked(lambda: CompiledModel(blueprint))
        self.eos = frozenset(eos)
        self.sampling = sampling
        self.weights = weights
        self.parameter_count = parameter_count
        self.shape = Shape(family, blueprint.vocabulary, blueprint.hidden, blueprint.layer_count)
        self.context = max_positions if max_positions < NO_LIMIT else None
        self.description = f"{blueprint.name}, {weights} weights, {self.compiled.layout}"
        self.state = {}
        self.token_bytes = self.compiled.token_bytes
        self._limits = Limits(blueprint.vocabulary, max_positions)

    @property
    def probe(self) -> Probe:
        """Mode "tree", without a comparison: there is one kind of pass, and it is bit-identical in any tree."""
        return Probe("tree", self.description, None, self._limits)

    def make_target(self, path: str = "auto", exact: bool = False) -> Target:
        """A ``CpuTarget``, which is bit-identical in any tree."""
        if path not in ("auto", CpuTarget.path):
            raise path_error(self, path, "load the model with dtype='bfloat16' or 'float32' for other paths")
        return CpuTarget(self.compiled, self._limits, reason=self.description)

    @property
    def key(self) -> str:
        blueprint = self.compiled.blueprint
        sizes = blueprint.heads, blueprint.key_heads, blueprint.head_size, blueprint.inner
        return "|".join(map(str, ("packed", *self.shape, *sizes, self.weights)))

    def checksum(self, samples: int | None = None) -> int:
        arrays = self.compiled.memory.used, *self.compiled.unpacked
        integers = [array.reshape(-1).view(f"i{array.itemsize}") for array in arrays]
        return combined_checksum([sums_of(bits, samples) for bits in integers])

    def head_parts(self) -> HeadParts:
        blueprint = self.compiled.blueprint
        readers = [reader_of(part) for part in (blueprint.embedding, blueprint.head)]
        return HeadParts(blueprint.vocabulary, blueprint.hidden, *readers)

    def make_head(self, weights: Any, target: Target) -> Any:
        from .compiled_head import CompiledHead

        parts = self.head_parts()
        embedding = self.compiled.blueprint.embedding
        embed = embedding if isinstance(embedding, PackedLinear) else parts.embed
        return CompiledHead(weights, parts.output(weights.shortlist.tolist()), embed)


def reader_of(part: Any) -> Callable[[Sequence[int]], Any]:
    """(tokens) -> rows of packed weights, of an array, or of a ``dense.Linear``, fp32."""
    if isinstance(part, PackedLinear):
        return part.rows
    numbers = part.weight if isinstance(part, Linear) else part
    return lambda tokens: floats(numbers[list(tokens)])

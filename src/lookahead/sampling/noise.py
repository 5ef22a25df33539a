"""The noise of sampled tokens, computed from a seed and a position.

Token y at position p is argmax(s + g_p), where s are the processed scores after the true prefix and g_p is Gumbel
noise that does not depend on the draft. By the Gumbel-max trick (Gumbel, 1954), y has the distribution softmax(s).
The noise depends only on the seed and the position p in the sequence (prompt included), so continuing a sequence with
the same seed gives the same tokens as decoding it in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .draws import GOLDEN, MIX, draw

Array = np.ndarray[Any, np.dtype[Any]]
_ALL = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), for one number."""
    value = ((value ^ (value >> 30)) * MIX[0]) & _ALL
    value = ((value ^ (value >> 27)) * MIX[1]) & _ALL
    return value ^ (value >> 31)


def key_of(seed: int) -> int:
    """The hash of a seed, from which the noise of every position is computed."""
    return _mix(seed & _ALL)


def start_of(key: int, position: int) -> int:
    """The state of SplitMix64 before the noise of a position."""
    return _mix(key + position * GOLDEN & _ALL)


def splitmix(x: Any, start: int, number: Callable[[int], int], shifted: Callable[[Any, int], Any]) -> Any:
    """52 bits of the outputs x = 1, 2, ... of the generator at ``start``, computed in place.

    Args:
        x: the numbers of the outputs, in the array library's integers.
        start: the state of the generator.
        number: converts a 64-bit pattern to such an integer.
        shifted: shifts right without copying the sign.
    """
    x *= number(GOLDEN)
    x += number(start)
    for shift, factor in zip((30, 27), MIX, strict=True):
        x ^= shifted(x, shift)
        x *= number(factor)
    x ^= shifted(x, 31)
    return shifted(x, 12)


def gumbel(seed: int, position: int, vocabulary: int) -> Array:
    """The noise of one position: standard Gumbel, (V,) float32.

    Entry i is computed from output i of SplitMix64, started at a hash of (seed, position), so the integers are the
    same on every machine.

    Args:
        seed: any integer, taken modulo 2**64.
        position: the sampled token's position in the sequence, including the prompt, from 0.
        vocabulary: V.
    """
    x = np.arange(1, vocabulary + 1, dtype=np.uint64)
    start = start_of(key_of(seed), position)
    uniform = splitmix(x, start, lambda value: value, lambda x, by: x >> by).astype(np.float64)
    # Adding 0.5 before scaling keeps the numbers strictly between 0 and 1, so both logarithms are finite.
    uniform += 0.5
    uniform *= 2.0**-52
    for _ in range(2):
        np.negative(np.log(uniform, out=uniform), out=uniform)
    noise: Array = uniform.astype(np.float32)
    return noise


@dataclass
class SeededNoise:
    """The noise of one sequence, which can be computed in advance. Implements ``lookahead.core.drafter.Noise``.

    Attributes:
        seed: the sequence's seed.
        start: the position of the first sampled token, which is the prompt's length.
        vocabulary: V.
        temperature: divisor of the logits before the noise is added.
    """

    seed: int
    start: int
    vocabulary: int
    temperature: float = 1.0
    _known: dict[int, Any] = field(init=False, default_factory=dict)

    @cached_property
    def key(self) -> int:
        return key_of(self.seed)

    def at(self, index: int) -> Any:
        """Noise (V,) of emitted token ``index``; index 0 is the token after the prompt."""
        if index not in self._known:
            self._known[index] = gumbel(self.seed, self.start + index, self.vocabulary)
        return self._known[index]

    def __call__(self, index: int) -> Array:
        """``at`` as a numpy array, for drafters."""
        noise: Array = self.at(index)
        return noise

    def search(self, row: Array, peaks: Array | None, temperature: float, index: int) -> int:
        """The token with the largest row / temperature + noise, found quickly; see ``draws.draw``.

        Returns:
            The token; -1 if the sum must be computed.
        """
        return draw(row, peaks, temperature, start_of(self.key, self.start + index))

    def forget(self, index: int) -> None:
        """Drop the noise before ``index``, which is no longer needed."""
        drop_before(index, self._known)


def drop_before(index: int, by_index: dict[int, Any]) -> None:
    """Drop the entries of numbers below ``index``."""
    for old in [key for key in by_index if key < index]:
        del by_index[old]

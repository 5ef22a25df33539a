"""Choosing the target's own token, greedy or sampled: one chooser and two noise streams. Uses torch, but no model.

A sampled token is y_p = argmax(s + g_p), where s are the processed scores after the true prefix and g_p is Gumbel
noise that does not depend on the draft. By the Gumbel-max trick (Gumbel, 1954), y_p has the distribution softmax(s).
``SeededNoise`` computes g_p from a seed and the position p in the sequence (prompt included), so continuing a
sequence with the same seed gives the same tokens as decoding it in one call. ``GeneratorNoise`` uses the numbers that
``torch.multinomial`` would draw from torch's generator, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core import Choose, NumericalError, Scores, SettingsError, TokenTree, greedy
from ..threads import one_thread
from .draws import GOLDEN, MIX, draw

#: (ids (1, L) of the true prefix, scores (1, V)) -> scores (1, V)
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Device = torch.device | str | None


@dataclass(frozen=True)
class Temperature:
    """The ``Process`` that divides scores by a temperature, as transformers' warper does."""

    value: float

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / self.value


_ALL = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    value &= _ALL
    return value - (1 << 64) if value >> 63 else value


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


def gumbel(seed: int, position: int, vocabulary: int, device: Device = None) -> torch.Tensor:
    """The noise of one position: standard Gumbel, float32, shape (V,).

    Entry i is computed from output i of SplitMix64, started at a hash of (seed, position). These integers are the
    same on every device and in every version of torch, whose own CPU generator uses only 32 bits of its seed.

    Args:
        seed: any integer, taken modulo 2**64.
        position: the sampled token's position in the sequence, including the prompt, from 0.
        vocabulary: V.
        device: the device of the result; None for the CPU.
    """
    start = start_of(key_of(seed), position)
    if torch.device(device or "cpu").type == "cuda":
        return _on_cuda(start, vocabulary, device)
    return torch.from_numpy(_on_cpu(start, vocabulary)).to(device)  # other devices may lack float64


def _splitmix(x: Any, start: int, number: Callable[[int], int], shifted: Callable[[Any, int], Any]) -> Any:
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


def _on_cpu(start: int, vocabulary: int) -> Any:
    """Gumbel noise in numpy, which has unsigned integers and takes half as long as torch on a single thread."""
    x = np.arange(1, vocabulary + 1, dtype=np.uint64)
    uniform = _splitmix(x, start, lambda value: value, lambda x, by: x >> by).astype(np.float64)
    # Adding 0.5 before scaling keeps the numbers strictly between 0 and 1, so both logarithms are finite.
    uniform += 0.5
    uniform *= 2.0**-52
    for _ in range(2):
        np.negative(np.log(uniform, out=uniform), out=uniform)
    return uniform.astype(np.float32)


def _on_cuda(start: int, vocabulary: int, device: Device) -> torch.Tensor:
    """Gumbel noise in torch's signed integers, which wrap around, but whose right shift copies the sign."""
    x = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
    bits = _splitmix(x, start, _signed, lambda x, by: (x >> by) & ((1 << 64 - by) - 1))
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()  # type: ignore[no-any-return]


@dataclass
class SeededNoise:
    """The noise of one sequence, which can be computed in advance. Implements ``lookahead.core.drafter.Noise``.

    Attributes:
        seed: the sequence's seed.
        start: the position of the first sampled token, which is the prompt's length.
        vocabulary: V.
        temperature: divisor of the logits before the noise is added.
        device: the device of the scores; None for the CPU.
        overlaps: whether noise can be computed while the device evaluates a step, without added latency.
    """

    seed: int
    start: int
    vocabulary: int
    temperature: float = 1.0
    device: Device = None
    overlaps: bool = field(init=False)
    _known: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _stream: Any = field(init=False, default=None)

    @cached_property
    def key(self) -> int:
        return key_of(self.seed)

    def __post_init__(self) -> None:
        kind = torch.device(self.device or "cpu").type
        self.overlaps = kind != "cpu"
        if kind == "cuda":  # in the step's own stream, the noise would wait for the step
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def prepare(self, index: int) -> None:
        """Compute the noise of emitted token ``index``, concurrently with the device's current work."""
        if index in self._known:
            return
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._known[index] = gumbel(self.seed, self.start + index, self.vocabulary, self.device)

    def at(self, index: int) -> torch.Tensor:
        """Noise (V,) of emitted token ``index``; index 0 is the token after the prompt."""
        self.prepare(index)
        noise = self._known[index]
        if self._stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._stream)
            noise.record_stream(now)  # keeps its memory until this stream has read it
        return noise

    def __call__(self, index: int) -> Any:
        """``at`` as a numpy array, for drafters."""
        return self.at(index).cpu().numpy()

    def draw(self, scores: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest value of scores (V,) plus noise, its token), which defines the sampled token."""
        return (scores + self.at(index)).max(dim=-1)

    def search(self, row: Any, peaks: Any, temperature: float, index: int) -> int:
        """The token that ``draw`` returns for a row / temperature in CPU memory, but faster; see ``draws.draw``.

        Returns:
            The token; -1 if ``draw`` must be computed.
        """
        return draw(row, peaks, temperature, start_of(self.key, self.start + index))

    def forget(self, index: int) -> None:
        """Drop the noise before ``index``, which is no longer needed."""
        _drop_before(index, self._known)


def _drop_before(index: int, by_index: dict[int, torch.Tensor]) -> None:
    for old in [key for key in by_index if key < index]:
        del by_index[old]


class GeneratorNoise:
    """The random numbers of ``torch.multinomial`` for a batch, drawn from torch's generator in order of time steps.

    torch.multinomial(p, 1) is argmax(p / q) with exponential noise q of p's shape. The rows of a batch reach a time
    step in different forward passes, and a drafter may use noise in advance. At the end, ``settle`` sets the
    generator to the state in which plain sampling would have left it.

    Args:
        batch: B, the rows of the batch.
        vocabulary: V.
        device: the device of the noise.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (batch, vocabulary)
        self._device = device
        self._generator = torch.default_generator
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generator = torch.cuda.default_generators[index]
        self._noise: list[dict[int, torch.Tensor]] = [{} for _ in range(batch)]  # by row and time step
        self._states: dict[int, torch.Tensor] = {}  # the generator's state before the draw of each time step
        self._drawn = 0

    def at(self, step: int, row: int) -> torch.Tensor:
        """Exponential noise (V,) of a row at time step ``step``, counted from the batch's first new token."""
        while self._drawn <= step:
            self._states[self._drawn] = self._generator.get_state()
            noise = torch.empty(self._shape, dtype=torch.float32, device=self._device)
            with one_thread:  # makes the numbers independent of the number of threads
                noise.exponential_(1)
            for known, own in zip(self._noise, noise, strict=True):
                # A separate copy per row, because rows need the noise of a step at different times.
                known[self._drawn] = own.clone() if len(noise) > 1 else own
            self._drawn += 1
        return self._noise[row][step]

    def forget(self, needed: Sequence[int], furthest: int) -> None:
        """Drop noise before ``needed[row]``, the first step whose noise the row still needs.

        The longest row has emitted ``furthest`` tokens.
        """
        for known, step in zip(self._noise, needed, strict=True):
            _drop_before(step, known)
        # Plain sampling draws noise up to the longest row's step, whose state ``settle`` may still need.
        _drop_before(furthest, self._states)

    def settle(self, steps: int) -> None:
        """Set the generator to its state after ``steps`` time steps of plain sampling, if more were drawn."""
        if steps < self._drawn:
            self._generator.set_state(self._states[steps])


@dataclass
class RowNoise:
    """One row of a ``GeneratorNoise``, from time step ``start`` on. Implements ``lookahead.core.drafter.Noise``."""

    stream: GeneratorNoise
    row: int
    start: int
    temperature: float
    key: None = field(default=None, init=False)

    def at(self, index: int) -> torch.Tensor:
        """Exponential noise (V,) of emitted token ``index`` from ``start`` on."""
        return self.stream.at(self.start + index, self.row)

    def __call__(self, index: int) -> Any:
        """``at`` as Gumbel noise, for drafters: argmax(p / q) is argmax(log p - log q), so the noise is -log q."""
        with one_thread:
            return -self.at(index).log().cpu().numpy()

    def draw(self, scores: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest p / q, its token), as in torch.multinomial; NaN if all tokens are excluded."""
        return (scores.softmax(dim=-1) / self.at(index)).max(dim=-1)

    def forget(self, index: int) -> None:
        """A no-op, because all rows share the stream, whose owner calls its ``forget``."""


class Chooser(Choose):
    """``choose`` for one sequence with logits processors, sampling, or both. It keeps the true prefix itself.

    Args:
        prompt: token ids before the first choice.
        process: logits processors and warpers, applied in fp32 with the true prefix; None for none.
        noise: for sampling; None chooses the largest score.

    Calls raise:
        NumericalError: a score is NaN, or ``process`` excludes every token.
        SettingsError: ``process`` returns scores of another shape.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        process: Process | None = None,
        noise: SeededNoise | RowNoise | None = None,
    ) -> None:
        #: Divides the logits; None if ``process`` computes the scores.
        self.temperature = process.value if isinstance(process, Temperature) else None
        self.process = None if isinstance(process, Temperature) else process
        self.noise = noise
        self.position = len(prompt)
        self._start = len(prompt)
        self._ids = torch.tensor([list(prompt)]) if self.process is not None else None

    def __call__(self, scores: Scores, node: int) -> int:
        scores.best(node)  # raises on NaN
        index = self.position - self._start
        if self.noise is not None and node == 0:  # drafters have observed the last step
            self.noise.forget(index)
        token = self._searched(scores, node, index)
        if token < 0:
            with one_thread:
                token = self._computed(scores.row(node).float(), index)
        self._append(token)
        return token

    def _searched(self, scores: Scores, node: int, index: int) -> int:
        """The token sampled from logits in CPU memory with only a temperature; -1 if ``_computed`` is needed."""
        read = getattr(scores, "host", None)
        if read is None or self.process is not None or not isinstance(self.noise, SeededNoise):
            return -1
        host = read(node)
        if host is None:
            return -1
        row, peaks = host
        return self.noise.search(row, peaks, self.temperature or 1.0, index)

    def _computed(self, row: torch.Tensor, index: int) -> int:
        """The token chosen from logits (V,) after all processors, with all noise if needed."""
        # The scores.
        if self.process is not None:
            row = self._processed(self.process, row)
        elif self.temperature is not None:
            row = row / self.temperature

        # The largest score, with noise when sampling.
        if self.noise is None:
            value, best = row.max(dim=-1)
        else:
            if isinstance(self.noise, SeededNoise) and row.device.type == "cpu":
                token = self.noise.search(row.detach().float().contiguous().numpy(), None, 1.0, index)
                if token >= 0:
                    return token
            value, best = self.noise.draw(row, index)

        # Copy both from the device at once; float32 represents integers up to 2 ** 24 exactly.
        largest, token = torch.stack((value.float(), best.float())).tolist()
        if not largest > float("-inf"):
            where = f"at position {self.position}"
            raise NumericalError(
                "at least one token must have a finite score, but "
                + (
                    f"the model's logits are NaN or minus infinity {where}"
                    if self.process is None
                    else f"the logits processors returned NaN or excluded every token {where}; loosen or remove a "
                    "processor"
                )
            )
        return int(token)

    def overlap(self, tree: TokenTree) -> None:
        """Compute the noise of every token that the step may emit, while the device evaluates the step."""
        if isinstance(self.noise, SeededNoise) and self.noise.overlaps:
            first = self.position - self._start
            for index in range(first, first + max(tree.depths) + 1):
                self.noise.prepare(index)

    def _processed(self, process: Process, row: torch.Tensor) -> torch.Tensor:
        assert self._ids is not None
        self._ids = self._ids.to(row.device)
        # Processors may write in place, and the row belongs to the step's logits.
        result = process(self._ids[:, : self.position], row[None].clone())
        if result.shape != (1, row.shape[0]):
            raise SettingsError(
                f"a logits processor must return scores of shape (1, {row.shape[0]}), "
                f"got {tuple(result.shape)}"
            )
        return result[0]

    def _append(self, token: int) -> None:
        if self._ids is not None:
            if self._ids.shape[1] == self.position:  # double the capacity
                self._ids = torch.cat([self._ids, self._ids.new_zeros(1, max(1, self.position))], dim=1)
            self._ids[0, self.position] = token
        self.position += 1


def make_choose(
    prompt: Sequence[int], process: Process | None = None, noise: SeededNoise | RowNoise | None = None
) -> Choose:
    """``choose`` for one sequence. Greedy decoding without processors uses the argmax that the target computed."""
    if process is None and noise is None:
        return greedy
    return Chooser(prompt, process, noise)

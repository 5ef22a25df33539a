"""The target's own token, greedy or drawn: one chooser and two noise streams. Knows torch, no model.

A draw is y_p = argmax(s + g_p): s the processed scores under the true prefix, g_p Gumbel noise that does not
depend on the draft. By the Gumbel-max rule y_p has the probabilities softmax(s). ``SeededNoise`` makes g_p of a seed
and p, the position in the text (prompt included), so a text continued with the same seed goes on as the whole did;
``GeneratorNoise`` takes the numbers that ``torch.multinomial`` would take from torch's generator, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from .core import Choose, NumericalError, Scores, SettingsError, TokenTree, greedy
from .threads import one_thread

#: (ids (1, L) of the true prefix, scores (1, V)) -> scores (1, V)
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Device = torch.device | str | None

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds."""
    value &= _ALL
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014) on one number."""
    value = ((value ^ (value >> 30)) * _MIX[0]) & _ALL
    value = ((value ^ (value >> 27)) * _MIX[1]) & _ALL
    return value ^ (value >> 31)


def gumbel(seed: int, position: int, vocabulary: int, device: Device = None) -> torch.Tensor:
    """The noise of one position: standard Gumbel, float32, shape (V,).

    Entry i comes from output i of SplitMix64 started at a hash of (seed, position): whole numbers that are the
    same on every device and in every version of torch (whose own CPU generator keeps 32 bits of its seed only).
    ``seed`` is taken modulo 2**64; ``position`` is that of the drawn token in the text, prompt included, from 0.
    """
    start = _mix(_mix(seed & _ALL) + position * _GOLDEN & _ALL)
    if torch.device(device or "cpu").type == "cpu":
        return torch.from_numpy(_on_cpu(start, vocabulary))
    return _on_device(start, vocabulary, device)


def _splitmix(x: Any, start: int, number: Callable[[int], int], shifted: Callable[[Any, int], Any]) -> Any:
    """52 bits of outputs x = 1, 2, ... from ``start``, in place, in a library's own 64-bit ``number``."""
    x *= number(_GOLDEN)
    x += number(start)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x ^= shifted(x, shift)
        x *= number(factor)
    x ^= shifted(x, 31)
    return shifted(x, 12)


def _on_cpu(start: int, vocabulary: int) -> Any:
    """Numpy takes half of torch's time on one thread, and has unsigned numbers."""
    x = np.arange(1, vocabulary + 1, dtype=np.uint64)
    uniform = _splitmix(x, start, lambda value: value, lambda x, by: x >> by).astype(np.float64)
    # 52 bits and a half lie strictly between 0 and 1, so that both logarithms are finite.
    uniform += 0.5
    uniform *= 2.0**-52
    for _ in range(2):
        np.negative(np.log(uniform, out=uniform), out=uniform)
    return uniform.astype(np.float32)


def _on_device(start: int, vocabulary: int, device: Device) -> torch.Tensor:
    """The same in torch's signed numbers: arithmetic wraps, but a shift to the right must not copy the sign."""
    x = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
    bits = _splitmix(x, start, _signed, lambda x, by: (x >> by) & ((1 << 64 - by) - 1))
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()  # type: ignore[no-any-return]


@dataclass
class SeededNoise:
    """The noise of one sequence's draws, known ahead. Fulfils ``lookahead.core.drafter.Noise``.

    Attributes:
        seed: of the sequence.
        start: position of the first drawn token, which is the length of the prompt.
        vocabulary: V.
        temperature: by which logits are divided before the noise is added.
        device: where the scores are; None for the CPU.
        overlaps: whether noise may be drawn while the device evaluates a step, at no cost.
    """

    seed: int
    start: int
    vocabulary: int
    temperature: float = 1.0
    device: Device = None
    overlaps: bool = field(init=False)
    _known: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _stream: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.overlaps = torch.device(self.device or "cpu").type != "cpu"
        if (
            torch.device(self.device or "cpu").type == "cuda"
        ):  # on the step's own stream noise would wait for the step
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def prepare(self, index: int) -> None:
        """Draw the noise of emitted token ``index``, beside what the device does now."""
        if index in self._known:
            return
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._known[index] = gumbel(self.seed, self.start + index, self.vocabulary, self.device)

    def at(self, index: int) -> torch.Tensor:
        """Noise (V,) of emitted token ``index``, 0 being the prefill's."""
        self.prepare(index)
        noise = self._known[index]
        if self._stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._stream)
            noise.record_stream(now)  # its memory is not given to others before this stream has read it
        return noise

    def __call__(self, index: int) -> Any:
        """The same as a numpy array, for drafters."""
        return self.at(index).cpu().numpy()

    def draw(self, scores: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest value of scores (V,) under the noise, and its token."""
        return (scores + self.at(index)).max(dim=-1)

    def forget(self, index: int) -> None:
        """Nobody will ask for what is before ``index`` again."""
        _drop_before(index, self._known)


def _drop_before(index: int, kept: dict[int, torch.Tensor]) -> None:
    for old in [key for key in kept if key < index]:
        del kept[old]


class GeneratorNoise:
    """The random numbers of ``torch.multinomial`` for a batch, drawn in time order from torch's generator.

    torch.multinomial(p, 1) is argmax(p / q) with q exponential noise of p's shape. Rows of a batch reach a time
    step in different forward passes, and a drafter may look ahead; the generator still ends where plain sampling
    would have left it.

    Args:
        batch: B. vocabulary: V. device: of the noise.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (batch, vocabulary)
        self._device = device
        self._generator = torch.default_generator
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generator = torch.cuda.default_generators[index]
        self._noise: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each step's draw
        self._drawn = 0

    def at(self, step: int) -> torch.Tensor:
        """Exponential noise (B, V) of time step ``step``, which counts from the batch's first new token."""
        while self._drawn <= step:
            self._states[self._drawn] = self._generator.get_state()
            noise = torch.empty(self._shape, dtype=torch.float32, device=self._device)
            with one_thread:  # the numbers do not depend on the threads
                self._noise[self._drawn] = noise.exponential_(1)
            self._drawn += 1
        return self._noise[step]

    def forget(self, step: int, furthest: int) -> None:
        """No row asks for what is before ``step`` again; ``furthest`` steps have been emitted by some row."""
        _drop_before(step, self._noise)
        # Plain sampling draws as far as the longest row, so the state there may still be wanted.
        _drop_before(furthest, self._states)

    def settle(self, steps: int) -> None:
        """Leave the generator as after ``steps`` time steps of plain sampling, if more were drawn ahead."""
        if steps < self._drawn:
            self._generator.set_state(self._states[steps])


@dataclass
class RowNoise:
    """One row of a ``GeneratorNoise``, from time step ``start`` on. Fulfils ``lookahead.core.drafter.Noise``."""

    stream: GeneratorNoise
    row: int
    start: int
    temperature: float
    overlaps: ClassVar[bool] = False

    def at(self, index: int) -> torch.Tensor:
        """Exponential noise (V,) of emitted token ``index`` from ``start`` on."""
        return self.stream.at(self.start + index)[self.row]

    def prepare(self, index: int) -> None:
        """Nothing: it is drawn in time order, when it is needed."""

    def __call__(self, index: int) -> Any:
        """argmax(p / q) is argmax(log p - log q), so -log q is the Gumbel noise of ``torch.multinomial``."""
        with one_thread:
            return -self.at(index).log().cpu().numpy()

    def draw(self, scores: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As torch.multinomial: the largest p / q (NaN where no token has a probability), and its token."""
        return (scores.softmax(dim=-1) / self.at(index)).max(dim=-1)

    def forget(self, index: int) -> None:
        """The stream is shared by all rows: its owner tells it."""


class Chooser(Choose):
    """One sequence's ``choose``, for everything that plain greedy is not; it keeps the true prefix itself.

    Args:
        prompt: token ids before the first choice.
        process: logits processors and warpers, applied in fp32 under the true prefix; None for none.
        noise: draw with this noise; None takes the largest score.

    Raises, when asked:
        NumericalError: NaN among the scores, or every token excluded by ``process``.
    """

    def __init__(
        self, prompt: Sequence[int], process: Process | None = None, noise: SeededNoise | RowNoise | None = None,
    ) -> None:  # fmt: skip
        self.process = process
        self.noise = noise
        self.position = len(prompt)
        self._start = len(prompt)
        self._ids = torch.tensor([list(prompt)]) if process is not None else None

    def __call__(self, scores: Scores, node: int) -> int:
        scores.best(node)  # raises on NaN, with the cure
        index = self.position - self._start
        if self.noise is not None and node == 0:  # drafters have observed the last step
            self.noise.forget(index)
        with one_thread:
            row = scores.row(node).float()
            if self.process is not None:
                row = self._processed(self.process, row)
            value, best = row.max(dim=-1) if self.noise is None else self.noise.draw(row, index)
            # One read of the device for both; floats hold whole numbers up to 2 ** 24.
            largest, token = torch.stack((value.float(), best.float())).tolist()
        if not largest > float("-inf"):
            raise NumericalError(
                "at least one token must keep a finite score, but the logits processors gave NaN or excluded "
                f"every token at position {self.position}; loosen or remove a processor"
            )
        self._append(int(token))
        return int(token)

    def overlap(self, tree: TokenTree) -> None:
        """Draw the noise of every position that the step may emit, while a device evaluates it."""
        if self.noise is not None and self.noise.overlaps:
            first = self.position - self._start
            for index in range(first, first + max(tree.depths) + 1):
                self.noise.prepare(index)

    def _processed(self, process: Process, row: torch.Tensor) -> torch.Tensor:
        assert self._ids is not None
        self._ids = self._ids.to(row.device)
        # Processors may write in place, and the row belongs to the step's table.
        result = process(self._ids[:, : self.position], row[None].clone())
        if result.shape != (1, row.shape[0]):
            raise SettingsError(
                f"a logits processor must return scores of shape (1, {row.shape[0]}), "
                f"got {tuple(result.shape)}"
            )
        return result[0]

    def _append(self, token: int) -> None:
        if self._ids is not None:
            if self._ids.shape[1] == self.position:  # room by doubling
                self._ids = torch.cat([self._ids, self._ids.new_zeros(1, max(1, self.position))], dim=1)
            self._ids[0, self.position] = token
        self.position += 1


def make_choose(
    prompt: Sequence[int], process: Process | None = None, noise: SeededNoise | RowNoise | None = None
) -> Choose:
    """``choose`` for one sequence; without processors greedy reads the argmax that the target has taken."""
    if process is None and noise is None:
        return greedy
    return Chooser(prompt, process, noise)

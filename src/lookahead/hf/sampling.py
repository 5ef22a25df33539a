"""Choosing tokens from tensors: the chooser, noise and logits processors of transformers models.

``SeededTensors`` is the noise of ``sampling.noise`` on a device. ``GeneratorNoise`` uses the numbers that
``torch.multinomial`` would draw from torch's generator, in the same order, for ``model.generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import Choose, Scores, TokenTree, greedy
from ..options import Options, Process
from ..sampling.choose import Chooser
from ..sampling.noise import SeededNoise, drop_before, gumbel, key_of, splitmix, start_of
from ..sampling.processors import Temperature, make_process, of_shape
from ..threads import one_thread


@dataclass
class SeededTensors(SeededNoise):
    """``SeededNoise`` as tensors on a device, which computes them while it evaluates a step.

    Attributes:
        device: the device of the scores.
    """

    device: torch.device | str = field(kw_only=True)
    _stream: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if (
            torch.device(self.device).type == "cuda"
        ):  # in the step's own stream, the noise would wait for the step
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def prepare(self, index: int) -> None:
        """Compute the noise of emitted token ``index``, concurrently with the device's current work."""
        if index in self._known:
            return
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._known[index] = gumbel_tensor(self.seed, self.start + index, self.vocabulary, self.device)

    def at(self, index: int) -> torch.Tensor:
        """Noise (V,) of emitted token ``index``; index 0 is the token after the prompt."""
        self.prepare(index)
        noise: torch.Tensor = self._known[index]
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


def gumbel_tensor(seed: int, position: int, vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """``sampling.noise.gumbel`` on a device. CUDA computes it itself; other devices may lack float64."""
    if torch.device(device).type == "cuda":
        return _on_cuda(start_of(key_of(seed), position), vocabulary, device)
    return torch.from_numpy(gumbel(seed, position, vocabulary)).to(device)


def _on_cuda(start: int, vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """Gumbel noise in torch's signed integers, which wrap around, but whose right shift copies the sign."""
    x = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
    bits = splitmix(x, start, _signed, lambda x, by: (x >> by) & ((1 << 64 - by) - 1))
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()  # type: ignore[no-any-return]


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


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
            drop_before(step, known)
        # Plain sampling draws noise up to the longest row's step, whose state ``settle`` may still need.
        drop_before(furthest, self._states)

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


class TensorChooser(Chooser):
    """``Chooser`` on the device of the logits: for noise that is a tensor, and for processors that take tensors."""

    def _token(self, scores: Scores, node: int, index: int) -> int:
        with one_thread:
            row = torch.as_tensor(scores.row(node)).float()
            if self.process is not None:
                row = self._processed(self.process, row[None].clone())  # processors may write in place
            elif self.temperature is not None:
                row = row / self.temperature
            value, best = row.max(dim=-1) if self.noise is None else self.noise.draw(row, index)
            # Copy both from the device at once; float32 represents integers up to 2 ** 24 exactly.
            largest, token = torch.stack((value.float(), best.float())).tolist()
        self._check(largest)
        return int(token)

    def overlap(self, tree: TokenTree) -> None:
        """Compute the noise of every token that the step may emit, while the device evaluates the step."""
        if isinstance(self.noise, SeededTensors):
            first = self.position - self._start
            for index in range(first, first + max(tree.depths) + 1):
                self.noise.prepare(index)

    def _processed(self, process: Process, scores: torch.Tensor) -> torch.Tensor:
        assert self._ids is not None
        shape = scores.shape
        ids = torch.from_numpy(self._ids[:, : self.position]).to(scores.device)
        result: torch.Tensor = of_shape(shape, process(ids, scores))[0]
        return result


def as_torch(process: Process) -> Process:
    """A logits processor for arrays from one that was written for tensors, such as those of transformers."""

    def adapted(ids: Any, scores: Any) -> Any:
        if isinstance(scores, torch.Tensor):
            return process(ids, scores)
        with one_thread:
            result: torch.Tensor = process(torch.from_numpy(ids), torch.from_numpy(scores))
            return result.detach().float().numpy()

    return adapted


def _warper(name: str) -> Callable[..., Process]:
    def make(*arguments: Any) -> Process:
        # Imported here, because it takes half a second and plain greedy decoding does not need it.
        from transformers.generation import logits_process

        made: Process = getattr(logits_process, name)(*arguments)
        return made

    return make


#: Makes the processor of each option that has one, as ``sampling.processors.ARRAYS``.
TENSORS: Mapping[str, Callable[..., Process]] = {
    "repetition_penalty": _warper("RepetitionPenaltyLogitsProcessor"),
    "no_repeat_ngram_size": _warper("NoRepeatNGramLogitsProcessor"),
    "bad_words": _warper("NoBadWordsLogitsProcessor"),
    "min_new_tokens": _warper("MinNewTokensLengthLogitsProcessor"),
    "logits_processor": lambda process: process,
    "temperature": Temperature,
    "top_k": _warper("TopKLogitsWarper"),
    "top_p": _warper("TopPLogitsWarper"),
    "min_p": _warper("MinPLogitsWarper"),
    "typical_p": _warper("TypicalLogitsWarper"),
}


def make_choose(
    options: Options,
    prompt: Sequence[int],
    seed: int | None,
    eos: frozenset[int],
    tokenizer: Any,
    vocabulary: int,
    device: str,
) -> tuple[Choose, SeededNoise | None]:
    """``sampling.choose.make_choose`` with transformers' own logits processors, on the device of the logits."""
    process = make_process(TENSORS, options, len(prompt), eos, tokenizer, vocabulary)
    on_cpu = device == "cpu"
    noise: SeededNoise | None = None
    if seed is not None:
        given = seed, len(prompt), vocabulary, options.temperature
        noise = SeededNoise(*given) if on_cpu else SeededTensors(*given, device=device)
    if process is None and noise is None:
        return greedy, None
    if not on_cpu:
        return TensorChooser(prompt, process, noise), noise
    if process is not None and not isinstance(process, Temperature):
        process = as_torch(process)
    return Chooser(prompt, process, noise), noise

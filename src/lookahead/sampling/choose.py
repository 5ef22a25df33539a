"""Choosing the target's own token from logits in CPU memory: greedy or sampled, with logits processors.

``hf.sampling`` has the same for the tensors of transformers models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import Choose, NumericalError, Scores, greedy
from ..options import Options, Process
from .noise import SeededNoise
from .processors import ARRAYS, Temperature, make_process, of_shape
from .scores import host_row


class Chooser(Choose):
    """``choose`` for one sequence with logits processors, sampling, or both. It keeps the true prefix itself.

    Args:
        prompt: token ids before the first choice.
        process: logits processors, applied in float32 with the true prefix; None for none.
        noise: for sampling; None chooses the largest score.

    Calls raise:
        NumericalError: a score is NaN, or ``process`` excludes every token.
        SettingsError: ``process`` returns scores of another shape.

    Attributes:
        replaces_nan: whether ``process`` replaces logits that are NaN.
    """

    replaces_nan = False

    def __init__(self, prompt: Sequence[int], process: Process | None = None, noise: Any = None) -> None:
        #: Divides the logits; None if ``process`` computes the scores.
        self.temperature = process.value if isinstance(process, Temperature) else None
        self.process = None if isinstance(process, Temperature) else process
        self.noise = noise
        self.position = len(prompt)
        self._start = len(prompt)
        self._ids = np.array([prompt], np.int64) if self.process is not None else None

    def __call__(self, scores: Scores, node: int) -> int:
        if not self.replaces_nan:
            scores.best(node)  # raises on NaN
        index = self.position - self._start
        if self.noise is not None and node == 0:  # drafters have observed the last step
            self.noise.forget(index)
        token = self._token(scores, node, index)
        if self._ids is not None:
            if self._ids.shape[1] == self.position:  # double the capacity
                more = np.zeros((1, max(1, self.position)), np.int64)
                self._ids = np.concatenate([self._ids, more], axis=1)
            self._ids[0, self.position] = token
        self.position += 1
        return token

    def _token(self, scores: Scores, node: int, index: int) -> int:
        """The token of emitted token number ``index``."""
        row, peaks = host_row(scores, node)
        divisor = self.temperature or 1.0
        if self.process is not None:
            row = self._processed(self.process, row[None].copy())  # processors may write in place
            peaks = None
        if self.noise is not None:
            token: int = self.noise.search(row, peaks, divisor, index)
            if token >= 0:
                return token
        with np.errstate(over="ignore"):
            row = row / np.float32(divisor)
        if self.noise is not None:
            row += self.noise.at(index)
        token = int(row.argmax())  # to numpy NaN is the largest
        self._check(float(row[token]))
        return token

    def _processed(self, process: Process, scores: Any) -> Any:
        """The scores (V,) after ``process``, from logits (1, V)."""
        assert self._ids is not None
        shape = scores.shape
        result = of_shape(shape, process(self._ids[:, : self.position], scores))
        return np.ascontiguousarray(result[0], np.float32)

    def _check(self, largest: float) -> None:
        """Raise NumericalError unless the largest score is a number."""
        if largest > float("-inf"):
            return
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


def make_choose(
    options: Options,
    prompt: Sequence[int],
    seed: int | None,
    eos: frozenset[int],
    tokenizer: Any,
    vocabulary: int,
    device: str = "cpu",
) -> tuple[Choose, SeededNoise | None]:
    """``choose`` for one sequence, and its noise if it is sampled.

    Greedy decoding without processors uses the argmax that the target computed.

    Args:
        options: the options of the generation.
        prompt: token ids before the first choice.
        seed: sampling seed; None for greedy decoding.
        eos: end tokens.
        tokenizer: for bad words given as strings.
        vocabulary: V of the model; a tokenizer may have more tokens.
        device: always the CPU, where arrays are.

    Raises:
        SettingsError: a bad word is a string but there is no tokenizer, or it has a token outside the vocabulary.
    """
    process = make_process(ARRAYS, options, len(prompt), eos, tokenizer, vocabulary)
    noise = None if seed is None else SeededNoise(seed, len(prompt), vocabulary, options.temperature)
    if process is None and noise is None:
        return greedy, None
    return Chooser(prompt, process, noise), noise

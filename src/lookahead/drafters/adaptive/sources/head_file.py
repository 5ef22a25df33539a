"""The file of a light head, a small trained network that guesses the tokens after the next one from a hidden state.

    z  = [norm(h); norm(e)]                       h: hidden state under which the token was emitted; e: its embedding
    h' = h + down(silu(gate z) * up z)            the predicted next hidden state, which the next level reads as h
    logits over the shortlist = scale * rows of the model's own output matrix * h'

The file has the norms, gate, up and down, and the shortlist: the most frequent tokens of the model's own
output. Output rows and embeddings come from the model, so the file takes 2 or 3 MB for a model of 135M parameters. It
is a safetensors file with matrices as in GGUF's Q8_0 or Q4_0: blocks of 32 numbers of 8 or 4 bits, each with an fp16
scale.

It also has the counts of correct guesses on held-out output, greedy and sampled, by level and kind. A drafter starts
from these counts (``drafters.adaptive.calibration``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ....core import SettingsError
from ....core.errors import first_line
from ....records import read_arrays, replacing, require

FORMAT = "lookahead light head 1"
#: What to do about a file that cannot be used.
REMEDY = "train one with lookahead train-head, or give another path"
#: Numbers per block, and bytes per block by the bits of a number.
BLOCK = 32
BLOCK_BYTES = {4: 18, 8: 34}
#: Limits of a file: levels, sizes, and bytes.
MAX_LEVELS, MAX_SIZE, MAX_BYTES = 8, 1 << 20, 1 << 30

#: The counts, and the parts of each.
COUNTS, PARTS = ("greedy", "sampled"), ("hits", "trials")
#: Fields of ``HeadWeights`` that are single numbers.
NUMBERS = ("vocabulary", "hidden", "levels", "scale", "bits")

Array = np.ndarray[Any, np.dtype[Any]]


def as_q8_0(rows: Array) -> Array:
    """Rows (n, inner) as blocks, uint8 (n, inner / 32 * 34): x is rounded to scale * q with scale = max |x| / 127."""
    blocks = np.asarray(rows, np.float32).reshape(len(rows), -1, BLOCK)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    used = scales.astype(np.float32)
    quants = np.rint(blocks / np.where(used > 0, used, 1)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], -1).reshape(len(rows), -1)


def as_q4_0(rows: Array) -> Array:
    """Rows as blocks, uint8 (n, inner / 32 * 18): the number of largest magnitude becomes -8."""
    blocks = np.asarray(rows, np.float32).reshape(len(rows), -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    scales = (largest / -8).astype(np.float16)
    used = scales.astype(np.float32)
    quants = np.clip(np.rint(blocks / np.where(used != 0, used, 1)) + 8, 0, 15).astype(np.uint8)
    both = quants[..., :16] | quants[..., 16:] << 4
    return np.concatenate([scales.view(np.uint8), both], -1).reshape(len(rows), -1)


#: The storage format of matrices and its quantizer, by the bits of a number.
QUANTIZE: dict[int, tuple[str, Callable[[Array], Array]]] = {4: ("Q4_0", as_q4_0), 8: ("Q8_0", as_q8_0)}


def from_blocks(raw: Array, bits: int) -> Array:
    """The inverse of ``as_q8_0`` and ``as_q4_0``, up to rounding: fp32 (n, inner)."""
    blocks = raw.reshape(len(raw), -1, BLOCK_BYTES[bits])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    quants = blocks[..., 2:]
    if bits == 8:
        values = quants.view(np.int8)
    else:
        values = np.concatenate([quants & 15, quants >> 4], -1).astype(np.int8) - np.int8(8)
    numbers: Array = (values * scales).reshape(len(raw), -1)
    return numbers


@dataclass(frozen=True)
class HeadWeights:
    """A light head.

    Attributes:
        vocabulary, hidden: V and the size of a hidden state of the model.
        shortlist: the tokens that it can guess, ascending, int32 (S,).
        hidden_norm, embedding_norm: weights of the two RMS norms, fp32 (hidden,).
        gate, up: fp32 (width, 2 * hidden).
        down: fp32 (hidden, width).
        scale: factor of the logits; a substitute for the model's own scaling.
        levels: the number of levels that it was trained for.
        counts: "greedy" and "sampled" -> (hits, trials) of its guesses, each fp32 (levels, kinds).
        about: figures of the training, for display.
        bits: 4 or 8; matrices are stored, and multiplied by the compiled head, with this many bits.
    """

    vocabulary: int
    hidden: int
    shortlist: Array
    hidden_norm: Array
    embedding_norm: Array
    gate: Array
    up: Array
    down: Array
    scale: float
    levels: int
    counts: Mapping[str, tuple[Array, Array]]
    about: Mapping[str, Any] = field(default_factory=dict)
    bits: int = 4

    @property
    def width(self) -> int:
        """Numbers between the gate and down."""
        return len(self.gate)

    @property
    def parameter_count(self) -> int:
        """The number of weights that a call reads, including the output rows."""
        return self.gate.size + self.up.size + self.down.size + len(self.shortlist) * self.hidden

    def check(self, vocabulary: int, hidden: int, name: str = "this model") -> None:
        """Raise SettingsError unless the head fits a model of these sizes."""
        if (self.vocabulary, self.hidden) != (vocabulary, hidden):
            raise SettingsError(
                f"the light head must match a vocabulary of {vocabulary} and a hidden size of {hidden} ({name}), "
                f"but it has {self.vocabulary} and {self.hidden}; {REMEDY}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, with matrices rounded to ``bits``.

        Raises:
            OSError: the file cannot be written, or the disk is full. An older file is then kept.
        """
        from safetensors.numpy import save

        tensors = {
            "shortlist": self.shortlist.astype(np.int32),
            "hidden_norm": self.hidden_norm.astype(np.float32),
            "embedding_norm": self.embedding_norm.astype(np.float32),
            **{name: QUANTIZE[self.bits][1](getattr(self, name)) for name in ("gate", "up", "down")},
        }
        for name in COUNTS:
            for part, array in zip(PARTS, self.counts[name], strict=True):
                tensors[f"{name}_{part}"] = np.ascontiguousarray(array, np.float32)
        numbers = {name: getattr(self, name) for name in NUMBERS}
        texts = {"format": FORMAT, "numbers": json.dumps(numbers), "about": json.dumps(dict(self.about))}
        with replacing(Path(path)) as temporary:
            # ``save_file`` raises no OSError, and makes a file that other users cannot read.
            temporary.write_bytes(save(tensors, texts))


def load_head(path: str | os.PathLike[str]) -> HeadWeights:
    """Read a light head.

    Raises:
        SettingsError: there is no such file, or it is not a light head of this format.
    """
    if not Path(path).is_file():
        raise SettingsError(f"the light head must be a file, and {os.fspath(path)} is not one; {REMEDY}")
    try:
        texts, arrays = read_arrays(Path(path), MAX_BYTES)
        if texts.get("format") != FORMAT:
            raise ValueError(f"its format is {texts.get('format', 'not given')!r:.40}, not {FORMAT!r}")
        return _checked(json.loads(texts["numbers"]), arrays, json.loads(texts.get("about", "{}")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingsError(f"{os.fspath(path)} is not a light head: {first_line(error)}; {REMEDY}") from None


def _checked(numbers: Any, arrays: Mapping[str, Array], about: Any) -> HeadWeights:
    """The head described by these parts. Raises ValueError if they contradict each other."""
    vocabulary, hidden, levels, scale, bits = (numbers[name] for name in NUMBERS)
    # Numbers.
    shortlist = arrays["shortlist"]
    width = len(arrays["gate"])
    whole = all(isinstance(size, int) and 0 < size <= MAX_SIZE for size in (vocabulary, hidden, width))
    require(whole and hidden % BLOCK == width % BLOCK == 0, "its sizes must be multiples of 32")
    require(isinstance(levels, int) and 1 <= levels <= MAX_LEVELS, f"levels must be 1 to {MAX_LEVELS}")
    require(bits in BLOCK_BYTES, "its bits must be 4 or 8")
    require(isinstance(scale, float) and 0 < scale < 1e4, "its scale must be a positive number")
    require(isinstance(about, dict), "its report must be an object")
    # Shapes and dtypes.
    block_bytes = BLOCK_BYTES[bits]
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "hidden_norm": ((hidden,), np.float32),
        "embedding_norm": ((hidden,), np.float32),
        "gate": ((width, 2 * hidden // BLOCK * block_bytes), np.uint8),
        "up": ((width, 2 * hidden // BLOCK * block_bytes), np.uint8),
        "down": ((hidden, width // BLOCK * block_bytes), np.uint8),
    }
    for name, (shape, kind) in shapes.items():
        array = arrays[name]
        right = array.shape == shape and array.dtype == kind
        require(right, f"{name} must be {shape} {np.dtype(kind)}, got {array.shape} {array.dtype}")
    require(
        shortlist.ndim == 1 and shortlist.dtype == np.int32 and len(shortlist) > 0, "its shortlist is empty"
    )
    ascending = bool((np.diff(shortlist) > 0).all())
    require(ascending and shortlist[0] >= 0 and shortlist[-1] < vocabulary, "its shortlist is not ascending")
    # Values.
    weights = {name: arrays[name] for name in ("hidden_norm", "embedding_norm")}
    weights |= {name: from_blocks(arrays[name], bits) for name in ("gate", "up", "down")}
    require(all(np.isfinite(array).all() for array in weights.values()), "its weights must be finite")
    counts = {name: (arrays[f"{name}_hits"], arrays[f"{name}_trials"]) for name in COUNTS}
    for hits, trials in counts.values():
        right = hits.dtype == trials.dtype == np.float32 and hits.ndim == 2 and len(hits) == levels
        right = right and hits.shape == trials.shape and bool(np.isfinite(trials).all())
        require(
            right and bool(((hits >= 0) & (hits <= trials)).all()),
            "its counts must be hits and trials by level",
        )
    return HeadWeights(
        vocabulary,
        hidden,
        shortlist,
        scale=scale,
        levels=levels,
        counts=counts,
        about=about,
        bits=bits,
        **weights,
    )

"""Steps on a GPU: one captured CUDA graph per step size, and the check of captured passes against a model's own.

A single-row pass through a 7B model launches a few hundred small kernels, and launching them from Python takes longer
than running them. So the pass is captured once per size (a bucket of sequences and a bucket of rows per sequence) and
replayed. Everything that changes from step to step (slots, numbers of committed tokens, token ids, depths, ancestor
bits) is in an int32 buffer that is copied to the device once per step, and what the host needs for most rows is
copied back at once. A step smaller than its buckets is padded with rows that see only their root and with copies of
the first sequence, which write the same keys and values to the same place. Attention gets the whole cache and reads
slots and numbers of committed tokens on the device, so one graph serves all sequences.

Example: a step of one sequence in slot 2, with 3 rows (root 7, its chain 9, 4) after T = 20 tokens, in the buckets 1
and 4. Each part begins at a multiple of four numbers, so that kernels see the same alignment in all buckets:

    slots    | lengths  | token ids | depths  | ancestor bits, one word per row
    2 - - -  | 20 - - - | 7 9 4 7   | 0 1 2 0 | 0b0001 0b0011 0b0111 0b0001       row 3 is padding

The first step of a size sets up libraries and compiles kernels, so it runs uncaptured, on the stream on which the
second one is captured. Cache and graphs outlive their target (``graph_store``).

On a CPU, the same code runs without captures, for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import inf, prod
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..core import OutOfMemory, Scores, SettingsError, TokenTree
from ..core.errors import summary
from ..core.memory import memory_errors, out_of_memory
from ..core.target import MOST_ROWS, MOST_SEQUENCES, UP_TO_ROUNDING
from ..sampling.scores import LogitsRows
from .attention import IN_PLACE, Attend, get, sdpa
from .attention.bits import pack_bits, word_count
from .attention_hook import TreeAttention
from .cuda import HostCopy, is_gpu, noticed_waits, pinned, to_device
from .equivalence import compare
from .facts import ModelFacts
from .fingerprint import forget, remember
from .graph_store import GraphTarget, uncapturable
from .logits import TensorLogits, packed
from .target import head_inputs, run_model
from .tree_cache import Placement

#: Row buckets of captured passes. Padding is cheap as long as a step is bound by reading the weights.
BUCKETS = (1, 4, 8, 16, 32, 64, 128, MOST_ROWS)
#: Sequence buckets of captured passes. A step that would be padded to more than ``MOST_ROWS`` rows is divided into
#: several passes.
BATCHES = (1, 2, 4, 8, 16, 32, MOST_SEQUENCES)
#: Minimum columns for an attention that reads every column it is given; the width is a power of two.
NARROWEST = 256
#: How often the check evaluates each pass: the second one of each size is captured, and the third one replays it.
REPEATS = 3


def bucket_of(number: int, buckets: Sequence[int] = BUCKETS) -> int | None:
    """The smallest bucket for ``number`` rows or sequences; None if there is none."""
    return next((bucket for bucket in buckets if bucket >= number), None)


class SlotStep(NamedTuple):
    """One sequence's part of a step: its slot, its number of committed tokens T, and its tree."""

    slot: int
    length: int
    tree: TokenTree


class Parts(NamedTuple):
    """The parts of a pass's buffer, for B sequences of Q rows; the example above shows them."""

    slots: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    depths: torch.Tensor
    words: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor, sequences: int, rows: int) -> Parts:
        """Views of a buffer of ``buffer_size`` numbers: (B,), (B,), (B, Q), (B, Q), (B, Q, W)."""
        shapes = _shapes(sequences, rows)
        starts = accumulate((_aligned(prod(shape)) for shape in shapes), initial=0)
        return cls(
            *(buffer[at : at + prod(shape)].view(shape) for at, shape in zip(starts, shapes, strict=False))
        )

    def fill(self, steps: Sequence[SlotStep]) -> None:
        """Write a step, padded to the bucket sizes."""
        sequences, rows = self.ids.shape
        steps = [*steps, *[steps[0]] * (sequences - len(steps))]
        trees = [step.tree for step in steps]
        ids = [[*tree.tokens, *[tree.tokens[0]] * (rows - len(tree))] for tree in trees]
        depths = [[*tree.depths, *[0] * (rows - len(tree))] for tree in trees]
        numbers = [[step.slot for step in steps], [step.length for step in steps], ids, depths]
        for part, values in zip(self, numbers, strict=False):
            part[:] = torch.tensor(values, dtype=torch.int32)
        self.words[:] = pack_bits([tree.ancestors for tree in trees], rows)


def _shapes(sequences: int, rows: int) -> list[tuple[int, ...]]:
    each = sequences, rows
    return [(sequences,), (sequences,), each, each, (*each, word_count(rows))]


def _aligned(numbers: int) -> int:
    return -(-numbers // 4) * 4


def buffer_size(sequences: int, rows: int) -> int:
    """The number of integers that describe a step of ``rows`` rows for each of ``sequences`` sequences."""
    return sum(_aligned(prod(shape)) for shape in _shapes(sequences, rows))


class CapturedPass:
    """The forward pass for one step size; captured on a GPU.

    Args:
        sequences, rows: the buckets of the size.
        width: the number of cache columns passed to attention.
        device: the model's device.

    Attributes:
        bytes: memory taken by the captured pass.
    """

    def __init__(self, sequences: int, rows: int, width: int, device: torch.device) -> None:
        self.sequences = sequences
        self.rows = rows
        self.width = width
        self.device = device
        self.numbers = torch.zeros(buffer_size(sequences, rows), dtype=torch.int32, device=device)
        self.columns = torch.arange(rows, device=device)
        self.graph: Any = None
        self.results: list[torch.Tensor] = []
        self.bytes = 0
        self._warm = self._refused = False

    def describe(self, steps: Sequence[SlotStep]) -> None:
        """Copy a step to the device."""
        numbers = torch.zeros(len(self.numbers), dtype=torch.int32)
        Parts.of(numbers, self.sequences, self.rows).fill(steps)
        self.numbers.copy_(pinned(numbers, torch.int32, self.device), non_blocking=True)

    def run(self, target: CudaGraphTarget, steps: Sequence[SlotStep]) -> TensorLogits:
        """The logits (B, Q, V) of the steps' trees, and the hidden states if any tree needs them, in memory that the
        next step does not overwrite."""
        self.describe(steps)
        checked = self.sequences * self.rows <= target.attention.most_rows
        if target.graphs.on_gpu and checked and self._warm and not self._refused and self.graph is None:
            self._capture(target)
        self._warm = True
        if self.graph is None:
            logits, best, *states = self.evaluate(target)
        else:
            self.graph.replay()
            logits, best, *states = self.results
        sequences, rows = len(steps), max(len(step.tree) for step in steps)
        hidden = states[0] if states and any(step.tree.needs_hidden for step in steps) else None
        # Clone, because the next replay overwrites the results.
        kept = [None if x is None else x[:sequences, :rows].clone() for x in (logits, hidden)]
        assert kept[0] is not None
        return TensorLogits(kept[0], kept[1], HostCopy(best))

    def _capture(self, target: CudaGraphTarget) -> None:
        try:
            captured = target.graphs.capture(lambda: self.evaluate(target))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            # A graph keeps its memory allocated, so a pass may fit in memory even if its graph does not.
            target.graphs.drop_passes(kept=self)
            self._refused = True
            warnings.warn(
                f"not enough memory to capture steps of {self.sequences} x {self.rows} rows; they run uncaptured and "
                "slower, with the same result",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self.graph, self.results, self.bytes = captured

    def evaluate(self, target: CudaGraphTarget) -> list[torch.Tensor]:
        """The captured part of the pass, which neither reads nor creates values on the host.

        Returns:
            the logits (B, Q, V); what the host needs of them (``logits.packed``); and, if the model has an output
            matrix, its inputs.
        """
        parts = Parts.of(self.numbers, self.sequences, self.rows)
        cache = target.cache
        lengths = parts.lengths[:, None]
        cache.placement = Placement(
            parts.slots[:, None].long(), (lengths + self.columns).long(), slice(None), self.width
        )
        visible = target.attention.installed(
            target.model, parts.lengths, parts.words, parts.depths, parts.slots
        )
        with visible, head_inputs(target.model, True) as states:
            positions = (lengths + parts.depths).long()
            logits = run_model(target.model, target.facts, cache, parts.ids.long(), positions)
        return [target.graphs.shared(logits), packed(logits), *states]


class CudaGraphTarget(GraphTarget):
    """``TransformersTarget`` with captured passes and the tree attention; logits are equal up to rounding."""

    path = "cuda-graph"
    guarantee = UP_TO_ROUNDING
    captures = True

    @property
    def passes(self) -> dict[tuple[int, int, int], CapturedPass]:
        """Captured passes by (sequences, rows, cache columns passed to attention)."""
        return self.graphs.passes

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Evaluate all trees in one pass, or in several if there are many."""
        most = max(len(tree) for _, tree in trees)
        # Padding rows are written too, so there must be room for the whole bucket.
        room = [(slot, self.lengths[slot] + (bucket_of(most) or most)) for slot, _ in trees]
        scores: dict[int, Scores] = {}
        with self.with_room(f"a step of {most} rows for {len(trees)} sequences", room):
            for members in division([len(tree) for _, tree in trees]):
                scores.update(zip(members, self._evaluate([trees[i] for i in members]), strict=True))
        return [scores[index] for index in range(len(trees))]

    def _evaluate(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Evaluate trees in one pass."""
        steps = [SlotStep(slot, self.lengths[slot], tree) for slot, tree in trees]
        most = max(len(tree) for _, tree in trees)
        sequences, rows = bucket_of(len(trees), BATCHES), bucket_of(most)
        if sequences is None or rows is None:
            return super().forward(trees)
        for step in steps:
            self.cache.occupy(step.slot, step.length + rows)
        size = sequences, rows, self._width(max(step.length for step in steps) + rows)
        with memory_errors(f"a step of {rows} rows for {len(trees)} sequences"):
            one = self.graphs.find(size, lambda: CapturedPass(*size, self.model.device))
            logits = one.run(self, steps)
        return [LogitsRows(logits, b * most) for b in range(len(trees))]

    def _width(self, longest: int) -> int:
        """The number of columns passed to attention for sequences that end at column ``longest``."""
        if self.attention.backend in IN_PLACE:
            return self.cache.capacity
        return min(self.cache.capacity, max(NARROWEST, 1 << (longest - 1).bit_length()))

    @contextmanager
    def _visibility(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], positions: torch.Tensor
    ) -> Iterator[Any]:
        """Install the tree attention, which reads ancestor bits, so the model needs no mask."""
        committed = torch.tensor(lengths)
        words = pack_bits([tree.ancestors for tree in trees], positions.shape[1])
        arguments = (committed, words, positions - committed[:, None])
        on_device = [to_device(numbers, torch.int32, self.model.device) for numbers in arguments]
        with self.attention.installed(self.model, *on_device):
            yield None


def division(rows: Sequence[int]) -> list[list[int]]:
    """Assign the sequences of a step to passes: their indices, by pass, given the rows of each sequence.

    Each sequence of a pass is padded to the same number of rows, so sequences of similar size share a pass.
    """
    passes: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: -rows[index]):
        if passes:
            largest = rows[passes[-1][0]]
            sequences = len(passes[-1]) + 1
            if (bucket_of(sequences, BATCHES) or inf) * (bucket_of(largest) or inf) <= MOST_ROWS:
                passes[-1].append(index)
                continue
        passes.append([index])
    return passes


def captured_attention(
    model: PreTrainedModel, facts: ModelFacts, backend: str = "auto"
) -> tuple[TreeAttention | None, str]:
    """The attention for ``CudaGraphTarget`` on this model. The result is cached.

    Args:
        model: a causal language model.
        facts: from a probe with the mode "tree".
        backend: the attention backend; "auto" is triton on an NVIDIA GPU if it is installed, and sdpa elsewhere.

    Returns:
        the attention, or None if passes cannot be captured or their logits differ; and the reason, in one line.
    """

    def check() -> tuple[TreeAttention | None, str]:
        if why := uncapturable(model, facts):
            return None, why
        attend = get(backend, model.device)
        attention, reason = _check_captures(model, facts, attend)
        if attention is None and attend is not sdpa.attend:
            # Possibly only the kernel is wrong.
            kernel = reason
            attention, reason = _check_captures(model, facts, sdpa.attend)
            if attention is not None:
                warnings.warn(
                    f"the attention kernel cannot be used here ({kernel}); using sdpa, with the same result",
                    RuntimeWarning,
                    stacklevel=2,
                )
        forget(model, "trial")
        return attention, reason

    return remember(model, f"cuda-graph {backend}", check)


def _check_captures(
    model: PreTrainedModel, facts: ModelFacts, attend: Attend
) -> tuple[TreeAttention | None, str]:
    """Whether the model accepts the attention, reads no values on the host in a pass, and replays give its own
    logits."""
    name = type(model).__name__
    try:
        attention = TreeAttention(model, attend)
        if reads := host_reads(CudaGraphTarget(model, facts, attention)):
            return None, f"{name} reads values on the host in its pass ({reads[0]})"
        result = compare(model, facts, lambda: CudaGraphTarget(model, facts, attention), repeats=REPEATS)
    except SettingsError as error:
        return None, str(error)
    except OutOfMemory:
        raise
    # A model or a compiler may fail in any way on a pass that it was not designed for.
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            torch.cuda.synchronize(model.device)  # raises if the device can no longer be used
        return None, f"{name} cannot be captured ({summary(error)})"
    if not result.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({result.reason})"
    how = "captured passes" if is_gpu(model.device) else "passes in buckets of rows, without capture"
    where = f"{name} on {model.device.type}: {how}, attention by {attention.backend}"
    return attention, f"{where} ({result.reason})"


def host_reads(target: CudaGraphTarget) -> list[str]:
    """File and line of each host read in a pass, which a graph cannot contain; [] on a CPU.

    Call it before any capture, because a failed capture leaves the device's random generator unusable. Every bucket
    of rows is evaluated once before the check, so kernels compile, or fail to, before the first request. Sizes with
    at least as many rows as one that runs out of memory are left out; ``TreeAttention.most_rows`` is then the limit.
    """
    device = target.model.device
    sizes = [*((1, rows) for rows in BUCKETS), (2, BUCKETS[1])]
    if not target.graphs.on_gpu:
        return []
    with target.with_room("a step", [(0, BUCKETS[-1])]):
        passes = [CapturedPass(*size, target.cache.capacity, device) for size in sizes]
        for one in passes:
            one.describe([SlotStep(0, 0, TokenTree(0))])
        fit = _evaluate_all(target, passes)
        with noticed_waits(device) as found:
            fit = _evaluate_all(target, fit)
    if left_out := [one.sequences * one.rows for one in passes if one not in fit]:
        target.attention.most_rows = min(left_out) - 1
        warnings.warn(
            f"not enough memory to check passes of {min(left_out)} rows or more; they run uncaptured and slower, "
            "with the same result",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _evaluate_all(target: CudaGraphTarget, passes: Sequence[CapturedPass]) -> list[CapturedPass]:
    """Evaluate passes, except those with as many rows as one that runs out of memory. Returns those that fit."""
    fit: list[CapturedPass] = []
    too_many = inf
    for one in passes:
        rows = one.sequences * one.rows
        if rows >= too_many:
            continue
        try:
            one.evaluate(target)
            fit.append(one)
        except (MemoryError, RuntimeError) as error:
            if rows == 1 or not out_of_memory(error):
                raise
            too_many = rows
            target.graphs.drop_passes()
    return fit

"""Check that a target computes what its model computes. One check for all engines and paths.

A target evaluates a fixed trial, and each row x of its logits is compared with a row r of a reference, the engine's
own evaluation of the same tokens without trees. The error of a row is the relative L2 distance. Both rows are
centred first, because softmax does not change when a constant is added to all logits:

    e(x, r) = |(x - mean x) - (r - mean r)| / |r - mean r|

- If the reference is accurate (float32 and float64), e must stay below ``TOLERANCE``.
- If it is not (16 bits, quantized weights), rounding alone makes e large, and ten times larger in some rows than in
  others. So e is divided by the reference's own error, row by row. In each row the target may be at most
  ``MAX_ROW_FACTOR`` times as far away as that, and ``MAX_MEAN_FACTOR`` times over all rows. Two means must meet the
  latter limit: the root mean square reveals a large error in some rows, the geometric mean a small error in all rows,
  which a few large rounding errors would hide.

The negative control is evaluated on the same target. It is a tree in which two rows have a wrong ancestor and one is
off by one position. The errors of these rows must be at least ``CONTROL_MARGIN`` times the largest error of the
correct rows; otherwise the trial could not detect such a fault. A failed trial is repeated with different prompts,
and one success is enough: rounding may flip the choice of an expert router for one prompt, but a faulty target fails
for all.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from .core import SettingsError, Target, TokenTree

#: Logits (rows, V) float32, or one number per row.
Array = np.ndarray[Any, np.dtype[Any]]

#: Largest error of a row if the reference is accurate.
TOLERANCE = 1e-3
#: Largest error of a row otherwise, as a multiple of the reference's own error.
MAX_ROW_FACTOR = 3.0
#: The same for the means over all rows.
MAX_MEAN_FACTOR = 1.5
#: Smallest error of the negative control, as a multiple of the largest error of the correct rows.
CONTROL_MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The result of a comparison. Errors are relative L2 distances, or multiples of the reference's own error.

    Attributes:
        ok: whether the target may be used.
        difference: the largest error of a row.
        control: the error of the negative control (its weaker fault), which must be at least ``CONTROL_MARGIN`` times
            ``difference``.
        limit: the largest ``difference`` allowed.
        noise: the reference's own relative error, root mean square; 0 if it is accurate.
        reason: these figures as a phrase.
    """

    ok: bool
    difference: float
    control: float
    limit: float
    noise: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reference:
    """What a target is compared with.

    Attributes:
        rows: logits (rows, V), in the order of ``Trial.texts``.
        errors: the relative error of each row, from rounding in the engine's own evaluation; None if it is accurate.
    """

    rows: Array
    errors: Array | None = None


# ------------------------------------------------------------------------------------------------ the trial

#: Prompt lengths of slots 0 and 1, for each trial.
PROMPT_LENGTHS = ((6, 4), (9, 5), (14, 3))


def trial_tree(token: int, vocabulary: int) -> TokenTree:
    """A tree of eight rows that branches at two depths, so that a row's column is not its position.

    0 ─┬─ 1 ─┬─ 2 ── 3
       │     └─ 6 ── 7
       └─ 4 ── 5
    """
    ids = [(token * (i + 3) + 11 * i + 5) % vocabulary for i in range(9)]
    return _tree(ids, vocabulary, [0, 1, 2, 0, 4, 1, 6])


def _tree(ids: Sequence[int], vocabulary: int, parents: Sequence[int]) -> TokenTree:
    if vocabulary < 2:
        raise SettingsError("a model must have a vocabulary of at least two tokens, got one")
    tree = TokenTree(ids[0])
    for row, parent in enumerate(parents, 1):
        token = ids[row]
        while tree.child(parent, token) is not None:
            token = (token + 1) % vocabulary
        tree.add(token, parent, needs_logits=True)
    return tree


#: Rows of ``Trial.control_tree`` with a wrong ancestor and with a wrong position.
WRONG_ANCESTOR, WRONG_POSITION = (5, 7), (3,)
#: The path that a trial commits. Its last rows are neither adjacent to the first ones nor in place.
PATH = (0, 1, 6, 7)


class Trial:
    """Prompts and trees of one comparison.

    Each of two prompts is followed by two trees, with a commit after each; slot 0 then takes two single-row steps.
    Before the first trees, the control tree of slot 0 is evaluated. Slot 1's trees have a row more than those of slot
    0, so a pass of both pads the smaller one.

    Args:
        vocabulary: V.
        number: the trial's number; trials differ in tokens and prompt lengths.
        window: a number of tokens that the first prompt must exceed.
        positions: whether the target can evaluate a row at a wrong position, and the model notices it.
        repeats: how often each pass of trees is evaluated; the last time counts.
    """

    def __init__(
        self, vocabulary: int, number: int = 0, window: int = 0, positions: bool = True, repeats: int = 1
    ) -> None:
        self.number = number
        self.positions = positions
        self.repeats = repeats
        first, second = PROMPT_LENGTHS[number]
        first = max(first, window + 2 if window else 0)
        random = np.random.default_rng(number)
        low = min(3, vocabulary - 1)  # the first tokens of a vocabulary are often special
        self.prompts = [random.integers(low, vocabulary, length).tolist() for length in (first, second)]
        self.trees = [
            [trial_tree(13 + 4 * number + 2 * turn + slot, vocabulary) for slot in (0, 1)] for turn in (0, 1)
        ]
        for _, tree in self.trees:
            tree.add(1, 3, needs_logits=True)
        self.singles = [(17 + number) % vocabulary, (29 + number) % vocabulary]

    def texts(self) -> list[tuple[int, ...]]:
        """The token sequence up to and including each row, in the order of the rows of ``run``."""
        prefixes = [tuple(prompt) for prompt in self.prompts]
        texts = list(prefixes)
        for trees in self.trees:
            for slot, tree in enumerate(trees):
                texts += [(*prefixes[slot], *tree.path_tokens(node)) for node in range(len(tree))]
            prefixes = [
                (*prefix, *(tree.tokens[node] for node in PATH))
                for prefix, tree in zip(prefixes, trees, strict=True)
            ]
        return texts + [(*prefixes[0], *self.singles[: i + 1]) for i in range(len(self.singles))]

    def run(self, target: Target) -> tuple[Array, Array]:
        """Evaluate the trial on a fresh target.

        Both sequences share the pass of the first trees; each of the second trees has a separate pass.

        Returns:
            logits (rows, V) in the order of ``texts``, and the logits of slot 0's control tree, (8, V).
        """
        prompts = list(enumerate(self.prompts))
        rows = [host_row(scores, 0) for scores in target.prefill(prompts)]
        control = forward(target, [(0, self.control_tree())], self.repeats)
        first, second = (list(enumerate(trees)) for trees in self.trees)
        rows += forward(target, first, self.repeats)
        target.commit([(slot, PATH) for slot, _ in prompts])
        rows += [row for pair in second for row in forward(target, [pair], self.repeats)]
        target.commit([(slot, PATH) for slot, _ in prompts])
        for token in self.singles:
            rows += forward(target, [(0, TokenTree(token))], self.repeats)
            target.commit([(0, [0])])
        for slot, _ in prompts:
            target.release(slot)
        return np.stack(rows), np.stack(control)

    def control_tree(self) -> TokenTree:
        """The negative control of slot 0's first tree: two rows have another parent at the same depth, and one row is
        off by one position, if ``positions``."""
        tokens = self.trees[0][0].tokens
        # A small vocabulary has no third child, so the rows are made with other tokens first.
        wrong = _tree(range(len(tokens)), len(tokens), [0, 1, 2, 0, 1, 1, 2])
        wrong.tokens = list(tokens)
        wrong.depths[3] += self.positions
        return wrong

    def control_error(self, logits: Array, reference: Array, unit: Array) -> float:
        """The error of the negative control, that is, of its weaker fault.

        Args:
            logits: logits of the control tree.
            reference, unit: reference logits and units of all rows; a row's error is divided by its unit.
        """
        first_tree = slice(len(self.prompts), len(self.prompts) + len(logits))
        errors = distance(logits, reference[first_tree]) / unit[first_tree]
        faults = (WRONG_ANCESTOR, WRONG_POSITION) if self.positions else (WRONG_ANCESTOR,)
        return min(float(errors[list(rows)].max()) for rows in faults)


def forward(target: Target, trees: list[tuple[int, TokenTree]], repeats: int = 1) -> list[Array]:
    """The logits (V,) of all rows of all trees, from the last of several passes over them."""
    slots, given = zip(*trees, strict=True)
    for _ in range(repeats - 1):  # swap the trees, so that the last time has other slots and lengths
        target.forward(list(zip(slots, given[::-1], strict=True)))
    rows = []
    for scores, (_, tree) in zip(target.forward(trees), trees, strict=True):
        rows += [host_row(scores, node) for node in tree.needs_logits_nodes()]
    return rows


def host_row(scores: Any, node: int) -> Array:
    """A copy of the logits (V,) under a node as float32 on the host, without torch where the target has arrays."""
    read = getattr(scores, "host", None)
    return np.array(read(node)[0], np.float32) if read is not None else floats(scores.row(node))


def floats(row: Any) -> Array:
    """A row of logits as float32 on the host, from an array, a list or a tensor."""
    return np.asarray(row.float().cpu() if hasattr(row, "cpu") else row, np.float32)


def single_rows(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> list[Array]:
    """The logits (V,) after the prompt and after each token, evaluated one row per step in slot 0."""
    rows = [host_row(target.prefill([(0, prompt)])[0], 0)]
    for token in tokens:
        rows += forward(target, [(0, TokenTree(token))])
        target.commit([(0, [0])])
    target.release(0)
    return rows


# ------------------------------------------------------------------------------------------ the comparison


def compare(
    make_target: Callable[[], Target],
    trials: Iterable[Trial],
    reference_of: Callable[[Trial], Reference],
    tolerance: float = TOLERANCE,
) -> Equivalence:
    """Compare a target with a reference, in one trial after another until one succeeds.

    Args:
        make_target: makes a fresh target; called once per trial.
        trials: the trials, at least one.
        reference_of: what a trial is compared with.
        tolerance: largest error of a row if the reference is accurate.

    Returns:
        the result of the last trial. Errors of the target are not caught.
    """
    for trial in trials:
        result = _compare(make_target(), trial, reference_of(trial), tolerance)
        if result.ok:
            break
    return result


def _compare(target: Target, trial: Trial, reference: Reference, tolerance: float) -> Equivalence:
    errors = reference.errors
    accurate = errors is None
    noise = 0.0
    if errors is None:
        own = unit = np.ones(len(reference.rows))
    else:
        noise = float(np.sqrt(np.square(errors).mean()))
        # A row may be accurate by chance.
        own = np.maximum(errors, max(1e-6, 0.1 * float(np.median(errors))))
        unit = np.maximum(own, np.median(own))
    # The errors of the target's rows, and of the negative control.
    logits, control_logits = trial.run(target)
    absolute = distance(logits, reference.rows)
    relative = absolute / unit
    control = trial.control_error(control_logits, reference.rows, unit)
    difference = float(relative.max())
    root_mean_square = float(np.sqrt(np.square(relative).mean()))
    geometric_mean = float(np.exp(np.log(np.maximum(absolute / own, 0.1)).mean()))
    mean = max(root_mean_square, geometric_mean)
    # The criteria, and the figures as a phrase.
    limit = tolerance if accurate else MAX_ROW_FACTOR
    stands_out = control >= CONTROL_MARGIN * difference
    ok = difference <= limit and stands_out and (accurate or mean <= MAX_MEAN_FACTOR)
    reason = f"difference {difference:.2g}, {limit:g} allowed"
    if not accurate:
        reason = (
            f"difference {difference:.2g} times the model's own error of {noise:.1e}, {limit:g} allowed, "
            f"{mean:.2g} over all rows, {MAX_MEAN_FACTOR:g} allowed"
        )
    fault = "a wrong ancestor or position" if trial.positions else "a wrong ancestor"
    return Equivalence(ok, difference, control, limit, noise, f"{reason}; {fault} shows as {control:.2g}")


def distance(rows: Any, reference: Any) -> Array:
    """e(x, r) of each row, (rows,) float64; infinite for a row with NaN. Both arguments are (rows, V)."""
    size = np.asarray(reference, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # infinities become NaN
        difference = np.asarray(rows, np.float64) - size
        difference, size = (x - x.mean(axis=-1, keepdims=True) for x in (difference, size))
        errors = np.linalg.norm(difference, axis=-1) / np.maximum(np.linalg.norm(size, axis=-1), 1e-30)
    return np.where(np.isnan(errors), np.inf, errors)


def differ(equivalence: Equivalence | None, ours: Any, theirs: Any) -> str:
    """Whether two evaluations of one row of logits, (V,) each, differ by more than rounding.

    Each may be as far from the reference as ``compare`` allows, so they may be twice as far from each other.

    Args:
        equivalence: the result of ``compare`` for the model; None applies the limit of float32.

    Returns:
        "" if the difference is within the limit, else a phrase with both figures.
    """
    noise = equivalence.noise if equivalence is not None else 0.0
    limit = 2 * max(TOLERANCE, MAX_ROW_FACTOR * noise)
    error = float(distance(floats(theirs), floats(ours)))
    return "" if error <= limit else f"relative distance {error:.2g}, {limit:.2g} is allowed"


def bit_equal_rows(target: Target) -> tuple[int, int]:
    """Compare the rows of a tree, bit for bit, with single-row steps over the same tokens.

    Args:
        target: any target whose slot 0 is free.

    Returns:
        (number of equal rows, number of rows).
    """
    vocabulary = target.vocabulary
    prompt = np.random.default_rng(0).integers(min(3, vocabulary - 1), vocabulary, 40).tolist()
    target.prefill([(0, prompt)])
    drafts = target.depth_limit(0) >= 3
    tree = trial_tree(13, vocabulary) if drafts else TokenTree(13 % vocabulary)
    rows = forward(target, [(0, tree)])
    target.release(0)
    alone = [single_rows(target, prompt, tree.path_tokens(node))[-1] for node in range(len(tree))]
    return sum(map(np.array_equal, rows, alone)), len(rows)


@dataclass(frozen=True, slots=True)
class RowComparison:
    """How steps with several rows differ from single-row steps, bit by bit, by their number of rows.

    Attributes:
        vocabulary: V, the number of logits of a row.
        values: how many logits of the chain have another bit.
        bits: how many bits of these logits are different.
        layer: the first layer whose keys or values differ: an operation before them does. None if there is none, so
            only what follows the last keys and values can differ, or if the target does not show them.
    """

    vocabulary: int
    values: dict[int, int]
    bits: dict[int, int]
    layer: dict[int, int | None]


def compare_rows(
    target: Target,
    counts: Sequence[int],
    watch: Callable[[int], AbstractContextManager[None]] = lambda count: nullcontext(),
) -> RowComparison:
    """Compare steps with several rows, bit by bit, with single-row steps over the same tokens.

    A step is a chain that starts at the root, as deep as the target allows; leaves of the root fill it up.

    Args:
        target: any target whose slot 0 is free.
        counts: numbers of rows.
        watch: number of rows -> a context for the step.
    """
    vocabulary = target.vocabulary
    random = np.random.default_rng(0)
    low = min(3, vocabulary - 1)
    prompt = random.integers(low, vocabulary, 40).tolist()
    target.prefill([(0, prompt)])
    depth = min(target.depth_limit(0), max(counts) - 1)
    chain = random.integers(low, vocabulary, depth + 1).tolist()
    alone = []
    for token in chain:
        alone += forward(target, [(0, TokenTree(token))])
        target.commit([(0, [0])])
    kept = _kept(target)
    target.release(0)
    found = RowComparison(vocabulary, {}, {}, {})
    for count in counts:
        tree = TokenTree(chain[0])
        for row, token in enumerate(chain[1:count]):
            tree.add(token, row, needs_logits=True)
        path = len(tree)
        others = (token for token in range(vocabulary) if token not in chain[1:2])
        while len(tree) < count:
            tree.add(next(others), 0, needs_logits=True)
        target.prefill([(0, prompt)])
        with watch(count):
            rows = forward(target, [(0, tree)])[:path]
        target.commit([(0, range(path))])
        changed = [a.view("u4") ^ b.view("u4") for a, b in zip(rows, alone, strict=False)]
        found.values[count] = sum(int(np.count_nonzero(row)) for row in changed)
        found.bits[count] = sum(int(np.unpackbits(row.view("u1")).sum()) for row in changed)
        found.layer[count] = next(
            (
                layer
                for layer, (ours, theirs) in enumerate(zip(_kept(target), kept, strict=True))
                if any(
                    not np.array_equal(a, b[:, :, : a.shape[2]]) for a, b in zip(ours, theirs, strict=True)
                )
            ),
            None,
        )
        target.release(0)
    return found


def _kept(target: Target) -> list[tuple[Array, ...]]:
    """The keys and values of slot 0, per layer, each (1, K, T, D); empty where the target does not show them."""
    read: Any = getattr(target, "read", None)
    if read is None:
        return []
    return [() if layer is None else tuple(map(floats, layer)) for layer in read(0)]

"""Does a path compute what the model computes? One check for every path: tree steps, compiled, captured, ranks.

A path evaluates a fixed trial (two prompts, two token trees each with a commit between them, single rows), and each
row of logits x is compared with the model's own causal pass over the same text. The distance is the relative L2
distance, both sides centred, since softmax knows no constant:

    e(x, r) = |(x - mean x) - (r - mean r)| / |r - mean r|

- float32, float64: r is the model's own pass, and e must stay below ``STRICT``.
- bfloat16, float16: rounding alone makes e large, and how large differs by a factor of ten from row to row. So r is
  the model evaluated in float32, and each row's e is divided by that of the model's own passes in the working dtype
  over the same text: the path must be at most ``FACTOR`` times as far from float32 as the model itself in any row,
  and ``FACTOR_OF_ALL`` times over all rows.

Beside it stands a negative control, through the same path: a tree in which two rows have one wrong ancestor and one
row is one position off. These rows must stand out by ``MARGIN`` times the difference found, or the trial could not
have shown such an error. Where a trial does not settle it, more trials with longer prompts are run, and each row's
median counts: a router of experts that tips over in one text is no error of the path, an error of the path is in all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..core import Target
from .attention_hook import with_masks
from .facts import ModelFacts
from .fingerprint import fingerprint
from .float32 import HALF, in_float32
from .trial import LENGTHS, WRONG_ANCESTOR, WRONG_POSITION, Trial

#: Largest relative distance in float32 and float64.
STRICT = 1e-3
#: Largest distance from float32 in 16 bits, in those of the model's own passes.
FACTOR = 3.0
#: The same for the root mean square over all rows, which a wrong weight or kernel raises.
FACTOR_OF_ALL = 1.5
#: How far the control must stand out, in differences.
MARGIN = 2.0

_Found = TypeVar("_Found")
_memo: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def remember(model: Any, name: str, key: Any, find: Callable[[], _Found]) -> _Found:
    """What ``find`` returns, found once per model and name as long as ``key`` stays the same."""
    known = _memo.setdefault(model, {})
    if name not in known or known[name][0] != key:
        known[name] = key, find()
    found: _Found = known[name][1]
    return found


def forget(model: Any, names: str = "") -> None:
    """Drop what is remembered of a model; with ``names`` only what begins so."""
    known = _memo.get(model, {})
    for name in [name for name in known if name.startswith(names)]:
        del known[name]


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What a comparison found.

    Attributes:
        ok: the path may be used.
        difference: of the worst row: in 16 bits the factor over the model's own error, else the relative L2
            distance. NaN where nothing could be compared.
        control: the same of the weaker of the two deliberate errors.
        limit: what ``difference`` may be.
        noise: the model's own relative error against float32, root mean square; 0 in float32 and float64.
        reason: the figures in words.
    """

    ok: bool
    difference: float
    control: float
    limit: float
    noise: float
    reason: str

    @property
    def margin(self) -> float:
        """How far the control stands out; ``MARGIN`` is asked for."""
        return self.control / max(self.difference, 1e-12)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A trial's right logits (rows, V), and the distance that counts as 1 for each row."""

    rows: torch.Tensor
    unit: torch.Tensor
    noise: float


def _reference(model: PreTrainedModel, trial: Trial, half: bool) -> _Reference:
    own = trial.causal(model)
    if not half:
        return _Reference(own, torch.ones(len(own), dtype=torch.float64), 0.0)
    other = trial.causal(model, halves=True)
    try:
        with in_float32(model):
            exact = trial.causal(model)
        errors = torch.maximum(distance(own, exact), distance(other, exact))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # Quantised weights, say: what is left is how far two right evaluations are apart.
        exact = own
        errors = 2 * distance(other, own)
        errors = errors.new_full(errors.shape, float(errors.max()))
    unit = torch.maximum(errors, errors.median()).clamp(min=1e-6)
    return _Reference(exact, unit, float(errors.pow(2).mean().sqrt()))


def distance(rows: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """e of each row, (rows,) float64; infinite where a logit is NaN."""
    found = []
    for x, r in zip(rows, exact, strict=True):
        apart, size = (x - r).double(), r.double()
        apart, size = apart - apart.mean(), size - size.mean()
        found.append(apart.norm() / size.norm().clamp(min=1e-30))
    return torch.stack(found).nan_to_num(nan=torch.inf)


def compare(
    model: PreTrainedModel,
    facts: ModelFacts,
    make_target: Callable[[], Target],
    together: bool = True,
    widened: bool = False,
) -> Equivalence:
    """Compare a path with the model's own causal passes.

    Args:
        make_target: a fresh target of the path, for each trial.
        together: see ``Trial.run``.
        widened: the model is inside ``in_float32``, so it is judged as in float32.

    Raises:
        OutOfMemory: a pass did not fit. Other errors are those of the path.
    """
    half = model.dtype in HALF and not widened
    limit = FACTOR if half else STRICT
    rows: list[torch.Tensor] = []
    controls: list[torch.Tensor] = []
    noise = 0.0
    for number in range(len(LENGTHS)):
        trial = Trial(facts, number, model.device.type)
        name = f"trial {number}{' widened' if widened else ''}"
        with with_masks(model):
            reference = remember(model, name, fingerprint(model), partial(_reference, model, trial, half))
        noise = max(noise, reference.noise)
        found, wrong = trial.run(make_target(), together)
        rows.append(distance(found, reference.rows) / reference.unit)
        behind = slice(len(trial.prompts), len(trial.prompts) + len(wrong))
        controls.append(distance(wrong, reference.rows[behind]) / reference.unit[behind])
        # The median of two or four is a smaller one: only odd numbers of trials settle it.
        both = [torch.stack(several).median(dim=0).values for several in (rows, controls)]
        difference = float(both[0].max())
        control = min(float(both[1][list(wrong)].max()) for wrong in (WRONG_ANCESTOR, WRONG_POSITION))
        of_all = float(both[0].square().mean().sqrt())
        ok = difference <= limit and control >= MARGIN * difference and (of_all <= FACTOR_OF_ALL or not half)
        if ok and number % 2 == 0:
            break
    unit = " times the model's own error" if half else ""
    beside = f" of {noise:.1e} in {str(model.dtype).removeprefix('torch.')}" if half else ""
    reason = (
        f"difference {difference:.2g}{unit}{beside}, {limit:g} allowed"
        f"{f', {of_all:.2g} over all rows, {FACTOR_OF_ALL:g} allowed' if half else ''}; "
        f"a wrong ancestor or position shows as {control:.2g}"
    )
    return Equivalence(ok, difference, control, limit, noise, reason)


def compare_rows(ours: torch.Tensor, theirs: torch.Tensor, noise: float | None = None) -> Equivalence:
    """Compare two right evaluations of one row of logits (V,), those of two ranks for instance.

    Args:
        noise: ``Equivalence.noise`` of the model; where it is not known, 16 bits are allowed 0.25.
    """
    half = ours.dtype in HALF
    limit = STRICT if not half else 0.25 if noise is None else 2 * FACTOR * noise
    apart = float(distance(ours[None], theirs[None].to(ours.device)))
    reason = f"relative distance {apart:.2g}, {limit:.2g} allowed"
    return Equivalence(apart <= limit, apart, float("nan"), limit, noise or 0.0, reason)


def first_line(error: BaseException) -> str:
    """An error's type and first line, for a reason in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"

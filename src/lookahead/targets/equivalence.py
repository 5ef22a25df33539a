"""Does a path compute what the model computes? One check for every path: tree steps, compiled and captured passes.

A path evaluates a fixed trial (two prompts, two token trees each with a commit between them, single rows), and each
row of logits x is compared with the model's own causal pass over the same text. The distance is the relative L2
distance, both sides centred, since softmax knows no constant:

    e(x, r) = |(x - mean x) - (r - mean r)| / |r - mean r|

- float32, float64: r is the model's own pass, and e must stay below ``Trial.strict``.
- bfloat16, float16: rounding alone makes e large, and how large differs by a factor of ten from row to row. So r is
  the model evaluated in float32, and each row's e is divided by that of the model's own passes in the working dtype
  over the same text: the path must be at most ``FACTOR`` times as far from float32 as the model itself in any row,
  and ``FACTOR_OF_ALL`` times over all rows. Over all rows means both the root mean square and the geometric mean:
  the one is raised by an error in some rows, the other by a small one in all of them, which the root mean square
  does not show where a few rows of a text round ten times as much as the rest.

Beside it stands a negative control, through the same path: a tree in which two rows have one wrong ancestor and one
row is one position off. These rows must stand out by ``MARGIN`` times the difference found, or the trial could not
have shown such an error. Where a trial fails, others with longer prompts are run, and one that passes is enough: a
router of experts that tips over in one text is no error of the path, an error of the path is in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core import Target
from .attention_hook import with_masks
from .facts import PassFacts
from .fingerprint import remember
from .trial import LENGTHS, Trial

#: Largest distance from float32 in 16 bits, in those of the model's own passes.
FACTOR = 3.0
#: The same for the means over all rows, which a wrong weight or kernel raises.
FACTOR_OF_ALL = 1.5
#: How far the control must stand out, in differences.
MARGIN = 2.0
#: Dtypes that are judged by the model's own rounding error.
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What a comparison found.

    Attributes:
        ok: the path may be used.
        difference: of the worst row: in 16 bits the factor over the model's own error, else the relative L2
            distance.
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


def compare(
    model: PreTrainedModel,
    facts: PassFacts,
    make_target: Callable[[], Target],
    widened: bool = False,
    kind: type[Trial] = Trial,
) -> Equivalence:
    """Compare a path with the model's own causal passes.

    Args:
        make_target: a fresh target of the path, for each trial.
        widened: the model is inside ``in_float32``, so it is judged as in float32.
        kind: of trial.

    Raises:
        OutOfMemory: a pass did not fit. Other errors are those of the path.
    """
    half = model.dtype in HALF and not widened
    limit = FACTOR if half else kind.strict
    for number in range(len(LENGTHS)):
        trial = kind(facts, number, model.device.type)
        name = f"{kind.name} {number}{' widened' if widened else ''}"
        with with_masks(model):
            exact, own, noise = remember(model, name, partial(_reference, model, trial, half))
        unit = torch.maximum(own, own.median())  # a row may be right by chance
        found, wrong = trial.run(make_target())
        apart = distance(found, exact)
        errors = apart / unit
        behind = slice(len(trial.prompts), len(trial.prompts) + len(wrong))
        controls = distance(wrong, exact[behind]) / unit[behind]
        control = min(float(controls[list(rows)].max()) for rows in kind.controls)
        means = errors.square().mean().sqrt(), (apart / own).clamp(min=0.1).log().mean().exp()
        difference, of_all = float(errors.max()), float(max(means))
        ok = difference <= limit and control >= MARGIN * difference and (of_all <= FACTOR_OF_ALL or not half)
        if ok:
            break
    reason = f"difference {difference:.2g}, {limit:g} allowed"
    if half:
        dtype = str(model.dtype).removeprefix("torch.")
        reason = (
            f"difference {difference:.2g} times the model's own error of {noise:.1e} in {dtype}, {limit:g} allowed, "
            f"{of_all:.2g} over all rows, {FACTOR_OF_ALL:g} allowed"
        )
    reason += f"; a wrong ancestor or position shows as {control:.2g}"
    return Equivalence(ok, difference, control, limit, noise, reason)


def _reference(model: PreTrainedModel, trial: Trial, half: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A trial's right logits (rows, V), the model's own distance from them by row, and ``Equivalence.noise``."""
    own = trial.causal(model)
    if not half:
        return own, torch.ones(len(own), dtype=torch.float64), 0.0
    other = trial.causal(model, halves=True)
    try:
        with in_float32(model):
            exact = trial.causal(model)
        errors = torch.maximum(distance(own, exact), distance(other, exact))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # Quantised weights, say: what is left is how far two right evaluations are apart.
        exact, errors = own, 2 * distance(other, own)
        errors = errors.new_full(errors.shape, float(errors.max()))
    noise = float(errors.square().mean().sqrt())
    return exact, errors.clamp(min=max(1e-6, 0.1 * float(errors.median()))), noise


def distance(rows: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """e of each row, (rows,) float64; infinite where a logit is NaN."""
    apart, size = (rows - exact).double(), exact.double()
    apart, size = (x - x.mean(dim=-1, keepdim=True) for x in (apart, size))
    found: torch.Tensor = apart.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-30)
    return found.nan_to_num(nan=torch.inf)


def differ(found: Equivalence | None, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """What is wrong where two evaluations of one row of logits, (V,) each, cannot both be right; "" where they can.

    Each may be as far from float32 as ``compare`` allows a path, so they may be twice that apart.

    Args:
        found: what ``compare`` found of the model; None allows what float32 does.
    """
    noise = found.noise if found is not None else 0.0
    limit = 2 * max(Trial.strict, FACTOR * noise)
    apart = float(distance(theirs.to(ours), ours.double()))
    return "" if apart <= limit else f"relative distance {apart:.2g}, {limit:.2g} is allowed"


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its own weights in float32, without a second copy of it. One thread at a time.

    Each module's weights are widened for the length of its own call and then dropped. Embeddings look up in their
    own dtype, and the rows are widened after.
    """
    narrow: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []

    def widen(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        narrow.append((module, dict(module._parameters)))
        for name, weight in narrow[-1][1].items():
            if weight is not None and weight.dtype in HALF:
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
        return tuple(map(_float, args)), {name: _float(value) for name, value in named.items()}

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        # Modules return in the reverse order of their calls.
        module._parameters.update(narrow.pop()[1])

    with ExitStack() as hooks:
        # Where a call raised: last of all, and the outermost module last.
        hooks.callback(lambda: [module._parameters.update(weights) for module, weights in reversed(narrow)])
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_hook(lambda module, args, output: _float(output)))
            elif any(weight is not None for weight in module._parameters.values()):
                hooks.enter_context(module.register_forward_pre_hook(widen, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(restore))
        yield


def _float(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.dtype in HALF else value


def first_line(error: BaseException) -> str:
    """An error's type and first line, for a reason in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"

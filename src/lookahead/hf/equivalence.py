"""The reference of a transformers model: its own causal passes, and in 16 bits their rounding error.

A path's logits are compared with these rows by ``lookahead.equivalence``. In bfloat16 and float16, the reference is
evaluated in float32 with the model's own weights, and the model's own error is its distance from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .. import equivalence
from ..core import Target
from ..equivalence import PROMPT_LENGTHS, TOLERANCE, Array, Equivalence, Reference, Trial, distance, floats
from .attention_hook import mask_compatible_attention
from .facts import PassFacts
from .fingerprint import remember

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Dtypes judged by the model's own rounding error.
HALF_DTYPES = (torch.bfloat16, torch.float16)
#: The first prompt of every trial exceeds sliding windows and chunks up to this size.
LONGEST_WINDOW = {"cpu": 128, "cuda": 8192}


def compare(
    model: PreTrainedModel,
    facts: PassFacts,
    make_target: Callable[[], Target],
    widened: bool = False,
    rows_of: Callable[[PreTrainedModel, Sequence[tuple[int, ...]]], Array] | None = None,
    tolerance: float = TOLERANCE,
    **of_trial: Any,
) -> Equivalence:
    """Compare a path with the model's own passes.

    Args:
        make_target: makes a fresh target of the path; called once per trial.
        widened: whether the model runs inside ``InFloat32`` and is judged as float32.
        rows_of: (model, token sequences) -> the reference logits after each sequence; ``causal_rows`` by default.
        tolerance: largest error in float32 and float64.
        of_trial: further arguments of the trials.

    Raises:
        OutOfMemory: a pass did not fit in memory. Other errors of the path are not caught.
    """
    rows_of = rows_of or causal_rows
    half = model.dtype in HALF_DTYPES and not widened

    def reference(trial: Trial) -> Reference:
        """Computed once per model and trial."""
        name = f"trial {trial.number} {rows_of.__name__}{' widened' if widened else ''}"
        with mask_compatible_attention(model):
            return remember(model, name, lambda: _reference(model, trial.texts(), half, rows_of))

    window = max(facts.layer_types.sliding_window, facts.layer_types.chunk)
    longest = min(
        LONGEST_WINDOW.get(model.device.type, 8192), facts.max_positions - 16, facts.rope_boundary - 16
    )
    window = window if window <= longest else 0
    trials = (Trial(facts.vocabulary, number, window, **of_trial) for number in range(len(PROMPT_LENGTHS)))
    return equivalence.compare(make_target, trials, reference, tolerance)


def _reference(
    model: PreTrainedModel,
    texts: Sequence[tuple[int, ...]],
    half: bool,
    rows_of: Callable[[PreTrainedModel, Sequence[tuple[int, ...]]], Array],
) -> Reference:
    own = rows_of(model, texts)
    if not half:
        return Reference(own)
    other = causal_rows(model, texts, in_two_passes=True)
    try:
        with InFloat32():
            exact = rows_of(model, texts)
        return Reference(exact, np.maximum(distance(own, exact), distance(other, exact)))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # The weights cannot be widened, for example because they are quantized. Estimate the error by two
        # evaluations.
        errors = 2 * distance(other, own)
        return Reference(own, np.full(len(errors), errors.max()))


def causal_rows(
    model: PreTrainedModel, texts: Sequence[tuple[int, ...]], in_two_passes: bool = False
) -> Array:
    """The logits (rows, V) after each token sequence, from the model's causal passes, without cache and mask.

    Shorter sequences are padded at the end, which causal attention does not see.

    Args:
        in_two_passes: use two passes instead of one, because other widths and batch sizes round differently.
    """
    prefixes = {text[:end] for text in texts for end in range(len(text))}
    longest = sorted(set(texts) - prefixes, key=lambda text: (len(text), text))
    middle = len(longest) // 2
    rows: dict[tuple[int, ...], Array] = {}
    for batch in [longest[:middle], longest[middle:]] if in_two_passes else [longest]:
        width = max(map(len, batch))
        ids = torch.tensor([text + text[-1:] * (width - len(text)) for text in batch], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        for text in texts:
            for whole, of_whole in zip(batch, logits, strict=True):
                if whole[: len(text)] == text:
                    rows[text] = floats(of_whole[len(text) - 1])
    return np.stack([rows[text] for text in texts])


class InFloat32(TorchFunctionMode):
    """A context in which this thread evaluates 16-bit tensors in float32, without a second copy of the weights.

    Every operation gets its 16-bit operands widened, and float32 for a 16-bit dtype. Reading an attribute or an
    element widens nothing, so that an expert's weights are widened alone.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.__name__ in ("__get__", "__getitem__"):
            result = function(*args, **kwargs)
            return torch.float32 if isinstance(result, torch.dtype) and result in HALF_DTYPES else result
        args, kwargs = tree_map(_widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALF_DTYPES else value
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES else value

"""Whether two ranks computed the same logits for the same tokens, up to rounding."""

from __future__ import annotations

import torch

#: Largest relative distance (L2, over one row of logits) that counts as rounding. bfloat16: about three times
#: the largest that 30 layers showed between right evaluations of 1 to 64 rows (0.034); one wrong token in a cache
#: of 40 moved a row by 0.05 to 0.5, the last one by 0.2 or more. float16 rounds eight times finer.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.0125}


def logits_differ(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """What is wrong where two rows of logits, shape (V,), differ by more than rounding; "" where they do not.

    The distance is ``|a - b| / |a|`` over the whole row, each less its mean (a constant changes no probability):
    unlike the largest difference it does not grow with V.
    """
    a, b = ours.double(), theirs.double().to(ours.device)
    a, b = a - a.mean(), b - b.mean()
    distance = float((a - b).norm() / a.norm().clamp_min(1e-30))
    tolerance = TOLERANCE.get(ours.dtype, 0.1)
    if distance <= tolerance:  # not where it is NaN
        return ""
    return f"relative distance {distance:.2g}, {tolerance} is allowed for {str(ours.dtype).removeprefix('torch.')}"

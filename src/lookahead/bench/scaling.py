"""The paper's scaling law (arXiv 2402.02057, section 4): equations 4, 5 and 7, and their fit to measurements.

Letters: alpha, chance that a drafted token is accepted; gamma, drafted tokens of one speculation (N - 1 here);
b, speculations verified at a time (G = W here); f, steps per good speculation; S, tokens per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import SettingsError


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 4: tokens that one speculation yields on average, bonus token included.

    E = (1 - alpha^(gamma + 1)) / (1 - alpha), the sum of alpha^i for i = 0..gamma.
    """
    return sum(alpha**i for i in range(gamma + 1))


def expected_tokens_batched(alpha: float, gamma: int, b: float) -> float:
    """Equation 5: the same for the best of b independent speculations.

    E = (gamma + 1) - sum_{i=1..gamma} (1 - alpha^i)^b: all of b miss depth i with chance (1 - alpha^i)^b.
    For b = 1 it is equation 4.
    """
    return gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1))


def compression_ratio(alpha: float, f: float, gamma: int, b: float) -> float:
    """Equation 7: S = (f - 1 + E) / f, where on average one step of f has a good speculation."""
    return (f - 1 + expected_tokens_batched(alpha, gamma, b)) / f


@dataclass(frozen=True, slots=True)
class Fit:
    """alpha and f of least squares, and the share of the variance that they explain."""

    alpha: float
    f: float
    r2: float


def fit(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Fit alpha and f to measured (W = G, N, S) by least squares.

    Raises:
        SettingsError: fewer than three points, or scipy is missing.
    """
    if len(points) < 3:
        raise SettingsError(f"at least 3 points are needed to fit alpha and f, got {len(points)}")
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise SettingsError('the fit needs scipy: pip install "lookahead-decoding[bench]"') from None

    def residuals(x: Sequence[float]) -> list[float]:
        return [compression_ratio(x[0], x[1], n - 1, w) - s for w, n, s in points]

    # The surface has flat parts, so several starts; the best one counts.
    starts = [(alpha, f) for alpha in (0.1, 0.3, 0.6) for f in (1.5, 3.0, 8.0)]
    best = min(
        (least_squares(residuals, start, bounds=([1e-6, 1.0], [1 - 1e-6, 1e4])) for start in starts),
        key=lambda result: result.cost,
    )
    values = [s for *_, s in points]
    mean = sum(values) / len(values)
    total = sum((s - mean) ** 2 for s in values)
    return Fit(float(best.x[0]), float(best.x[1]), 1 - 2 * float(best.cost) / total if total else 1.0)

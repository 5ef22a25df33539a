"""Cost curves without measuring: other work seems to disturb each measurement, so models have the typical curve.

A measurement takes two seconds for each model, and is nearly always disturbed while several tests run in parallel.
"""

from threading import Lock

import pytest

from lookahead.drafters.adaptive import measure, model_curves

load_or_measure = model_curves._load_or_measure
_lock = Lock()


def _disturbed(target, device):
    measured = measure.Measurement()
    for rows in (1, 2):
        measured.add((1, 64, rows), [1.0])
    measured.unsteady = {(1, 64, 2)}
    return measured


def _load(*given):
    # Only here: the commands "tune" and "bench step-cost" call measure() directly.
    with _lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "measure", _disturbed)
        return load_or_measure(*given)


def use():
    """Use typical curves in this process."""
    model_curves._load_or_measure = _load

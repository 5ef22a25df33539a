"""Cost curves without measuring, which takes two seconds for each model: models have the assumed curve."""

from lookahead.drafters.adaptive import model_curves
from lookahead.drafters.adaptive.cost import CostCurve

load_or_measure = model_curves.load_or_measure


def _assumed(target, name, notice, on_gpu):
    return CostCurve.assumed(on_gpu)


def use():
    """Use assumed curves in this process."""
    model_curves.load_or_measure = _assumed

"""Cost curves without measuring, which takes two seconds for each model: models have the assumed curve."""

from lookahead.drafters.adaptive import model_curves
from lookahead.drafters.adaptive.cost import CostCurve

REAL = {name: getattr(model_curves, name) for name in ("load_curve", "measured")}


def _unknown(name, notice):
    return None


def _assumed(target, name, notice, on_gpu):
    return CostCurve.assumed(on_gpu)


def use():
    """Use assumed curves in this process."""
    model_curves.load_curve, model_curves.measured = _unknown, _assumed

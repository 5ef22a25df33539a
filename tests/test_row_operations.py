"""``lookahead verify --rows`` names the operations whose bits depend on the number of rows."""

import pytest
import torch

from families import tiny_model
from lookahead.cli.verify_rows import described
from lookahead.equivalence import compare_rows
from lookahead.hf.paths import make_target
from lookahead.hf.row_operations import RowOperations


class Dependent(torch.nn.Module):
    """An activation whose rows affect each other from three rows on."""

    def forward(self, given):
        out = torch.nn.functional.relu(given)
        return out + 1e-2 * given.mean(1, keepdim=True) if given.shape[1] > 2 else out


@pytest.mark.parametrize("fault", [False, True])
def test_a_faulty_operation_is_named(fault):
    model = tiny_model("llama")
    layers = model.model.layers
    target = make_target(model, "transformers")
    for layer in layers:  # rows of this activation have the same bits on every processor
        layer.mlp.act_fn = torch.nn.ReLU()
    if fault:
        layers[0].mlp.act_fn = Dependent()
    operations = RowOperations(model)
    found = compare_rows(target, (2, 3, 4), operations.watched)
    by_name = {each["operation"]: each for each in operations.found()}
    sound = {"of": len(layers) - fault, "differ": 0, "from_rows": None}
    assert by_name["ReLU act_fn"] == {"operation": "ReLU act_fn", **sound}
    assert by_name["attention (sdpa)"]["of"] == len(layers)
    assert by_name["Linear q_proj"]["of"] == len(layers)
    assert not any(each["differ"] for name, each in by_name.items() if "MLP" in name)  # the innermost counts
    assert not model._forward_hooks
    if not fault:
        return
    assert by_name["Dependent act_fn"] == {
        "operation": "Dependent act_fn",
        "of": 1,
        "differ": 1,
        "from_rows": 3,
    }
    assert found.values[3] > 0
    assert found.bits[3] > found.values[3]
    assert found.layer[3] in (0, 1)  # 1, the keys after the faulty layer, unless products differ too
    path = {"from_rows": 3, "first_layer": 1, "bits": {64: 12}, "operations": operations.found()}
    assert "1 of 1 Dependent act_fn (from 3 rows)" in described(path)


def test_words_without_operations():
    path = {"from_rows": 2, "first_layer": None, "bits": {64: 1200}, "operations": None}
    assert described(path) == (
        "1,200 bits differ with 64 rows; with 2, first after the last keys and values; "
        "operations are not seen separately"
    )

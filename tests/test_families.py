"""Equality with model.generate on tiny random models of every family that the target supports.

Greedy and sampled, with and without penalties, for a left-padded batch of two. On each path, the same comparison is
run once more with one wrong node accepted on purpose, and must then fail.
"""

import functools

import pytest
import torch

import lookahead.hf
from families import FAMILIES, NO_TREES, tiny_model
from lookahead.core import SettingsError
from lookahead.hf.paths import probe

# Models of compiled architectures with a setting that the compiled path lacks.
pytestmark = pytest.mark.filterwarnings("ignore:lookahead.generate runs this model on the slower")
#: Decoded one row per step; other recurrent families draft in batch rows.
ONE_ROW = ("mamba",)
MODES = {
    "greedy": {},
    "greedy-penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 4},
    "sampled": {"do_sample": True, "top_k": 4},
    "sampled-penalties": {"do_sample": True, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.1},
}
NEW = 24
#: Families that run in every mode: on the compiled path, on transformers', by batch rows, and without drafts. Modes
#: differ only in how tokens are chosen, which does not depend on the family.
ALL_MODES = ("llama", "phi", "lfm2", "mamba")
CASES = [
    (family, mode)
    for family in FAMILIES
    for mode in MODES
    if family in ALL_MODES or mode in ("greedy", "sampled-penalties")
]
#: Their rotary base depends on the longest sequence in the batch (also in transformers): run one at a time.
ALONE = ("llama-dynamic-ntk",)


@functools.cache
def model_of(family):
    model = tiny_model(family, initializer_range=0.1)
    model.generation_config.eos_token_id = None
    return model


def prompts(family):
    generator = torch.Generator().manual_seed(1)
    half = torch.randint(3, 96, (2, 7), generator=generator)
    ids = torch.cat([half, half], dim=1)  # repetitive, so that there is something to draft
    mask = torch.ones_like(ids)
    if family in ALONE:
        return ids[:1], mask[:1]
    mask[0, :4] = 0
    ids[0, :4] = 0
    return ids, mask


def run(family, mode, **ours):
    ids, mask = prompts(family)
    model = model_of(family)
    torch.manual_seed(5)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **MODES[mode], **ours)
    return out, torch.random.get_rng_state()


@functools.cache
def reference(family, mode):
    return run(family, mode)


@pytest.mark.filterwarnings("ignore:lookahead.generate runs this model with plain decoding")
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_same_tokens_and_same_generator_state(family, mode):
    stats = []
    ours, state = run(family, mode, custom_generate=lookahead.generate, drafter="5,4,7", stats=stats)
    plain, plain_state = reference(family, mode)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(state, plain_state)
    accepted = sum(s.accepted for s in stats)
    if family in ONE_ROW:
        assert accepted == 0
    elif mode == "greedy":
        assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("family", [f for f in ALL_MODES if f not in ONE_ROW])
def test_the_comparison_fails_when_a_wrong_node_is_accepted(family, accept_a_wrong_node):
    ours, _ = run(family, "greedy", custom_generate=lookahead.generate, drafter="5,4,7")
    assert ours.tolist() != reference(family, "greedy")[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_chooses_and_says_why(family):
    found = probe(model_of(family))
    if family in ONE_ROW:
        assert found.mode == "plain"
        assert "one row per step" in found.reason
    else:
        assert found.mode == ("tree" if family not in NO_TREES else "batch-rows")
        assert found.equivalence.difference < 1e-4


@pytest.mark.filterwarnings("ignore:lookahead.generate runs this model with plain decoding")
@pytest.mark.parametrize("family", ONE_ROW)
def test_settings_of_a_method_where_nothing_is_drafted(family):
    """With one row per step, settings of any method are checked and then ignored."""
    model = model_of(family)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **options)
    for settings in ({"rows": 16}, "5,3,5", None):
        ours = model.generate(ids, custom_generate=lookahead.generate, drafter=settings, **options)
        assert ours.tolist() == plain.tolist()
    with pytest.raises(SettingsError, match="max_rows must be a whole number"):
        model.generate(ids, custom_generate=lookahead.generate, drafter={"max_rows": 0}, **options)

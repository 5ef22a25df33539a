"""Names and settings of GGUF files, compared with the gguf package's tables and with our specs."""

import gguf
import pytest
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

from lookahead.gguf.families import GGUF_NAMES
from lookahead.hf.module_families import REGISTRY

ARCHITECTURES = {name: number for number, name in MODEL_ARCH_NAMES.items()}


@pytest.mark.parametrize("architecture", GGUF_NAMES)
def test_tensors_are_those_of_the_package_gguf(architecture):
    theirs = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[ARCHITECTURES[architecture]]}
    ours = {name.replace("{layer}", "{bid}") for name in GGUF_NAMES[architecture].tensors.values()}
    if "output" not in theirs:  # such models always use the embedding as head
        ours.remove("output")
    assert ours <= theirs


@pytest.mark.parametrize("architecture", GGUF_NAMES)
def test_parts_are_those_of_the_spec(architecture):
    """Names exist for exactly those parts of the Spec that the class has."""
    names = GGUF_NAMES[architecture]
    spec = REGISTRY[names.model_class]
    for part in names.tensors:
        assert getattr(spec, part), part
    parts = (
        "positions",
        "attention_norm",
        "query_norm",
        "key_norm",
        "attention_post_norm",
        "feed_forward_norm",
    )
    for part in (*parts, "feed_forward_post_norm", "qkv", "gate_up"):
        assert bool(getattr(spec, part)) == (part in names.tensors), part


def test_keys_are_those_of_the_package_gguf():
    keys = {
        value.removeprefix("{arch}.")
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    for names in GGUF_NAMES.values():
        assert set(names.settings.values()) <= keys

"""docs/gpu.md matches what the model computes, and the model matches its docstring and hand calculations."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_model
from benchmarks.gpu_model import CARDS, MODELS, cache_bytes, page, speed_up, step_seconds, weight_bytes
from lookahead.hf.tree_cache import TreeCache

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
SMALL, LARGE = MODELS
A100 = CARDS[2]


def test_the_tables_are_what_the_model_computes():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m benchmarks.results --readme"
    assert re.findall(r"<!-- computed: (\S+) -->\n\S", text) == list(gpu_model.TABLES)


def test_the_title_and_every_caption_say_that_it_is_a_model():
    text = PAGE.read_text(encoding="utf-8")
    assert "a model, not a measurement" in text.splitlines()[0]
    for after in text.split("<!-- end -->")[1:]:
        caption = " ".join(after.strip().split("\n\n")[0].split())
        assert re.match(r"\*Model,.*`python.*\*$", caption), caption[:80]


def test_the_example_in_the_module_is_right():
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    assert weight_bytes(LARGE, "bf16") == 2 * weights == pytest.approx(13.2e9, rel=0.01)
    cache = 2 * 2 * 32 * 4096 * 513
    one = (2 * weights + cache) / (0.8 * 2039e9) + 27 * 32 * 2e-6
    assert step_seconds(A100, LARGE, "bf16", 1) == pytest.approx(one)
    assert one == pytest.approx(10.0e-3, rel=0.01)
    many = 2 * 128 * weights + 4 * 128 * 640 * 4096 * 32
    both = many / (0.6 * 312e12) + 27 * 32 * 2e-6
    assert step_seconds(A100, LARGE, "bf16", 128) == pytest.approx(both)
    assert both / one == pytest.approx(1.10, abs=0.01)
    assert speed_up(A100, LARGE, "bf16", 2.0, 66) == pytest.approx(2.0 * one / both)
    assert speed_up(A100, LARGE, "bf16", 2.0, 66, padded=False) > 2.0 * one / both


def test_models_have_their_number_of_weights():
    """Llama-2 7B: 6.74 billion with both vocabulary matrices and without norms; Llama-3.2 1B: 1.24."""
    assert LARGE.layer_weights + 2 * LARGE.output_weights == pytest.approx(6.74e9, rel=0.002)
    assert SMALL.layer_weights + SMALL.output_weights == pytest.approx(1.236e9, rel=0.002)


def test_cards_between_the_paper_and_the_model():
    """With the paper's S, the model exceeds each speed-up measured there by at most a sixth."""
    for line in gpu_model.published_table().splitlines()[2:]:
        measured, _, modelled = re.findall(r"\d\.\d+", line)[:3]
        assert float(measured) <= float(modelled) <= 7 / 6 * float(measured)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 30), (1, 1024), (1, 1025), (3, 100), (5, 3000)])
def test_the_cache_has_its_computed_size(sequences, tokens):
    shapes = [(2, 4, 8), None, (1, 4, 4)]
    cache = TreeCache(shapes, torch.bfloat16, torch.device("cpu"), 1024)
    for slot in range(sequences):
        cache.make_room(slot, tokens)
    assert cache.bytes == cache_bytes(shapes, 2, sequences, tokens)

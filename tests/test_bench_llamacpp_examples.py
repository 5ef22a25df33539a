"""Passes and tokens, parsed from the output of llama.cpp's examples."""

import pytest

from benchmarks.llamacpp_build import build_of
from benchmarks.llamacpp_examples import cost_of, program, tables
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


def record(method, repeat, seconds, equal=None, prompt="0"):
    cost = {"new_tokens": 65, "prefill_tokens": 1, "steps": 32, "decode_seconds": seconds}
    about = {"workload": "code", "method": method, "repeat": repeat, "prompt": prompt}
    return about | cost | {"equal": equal}


def test_a_rate_is_the_median_over_repeats_with_its_range():
    records = [record("ours, plain", repeat, s, True) for repeat, s in enumerate((0.5, 0.25, 1.0))]
    records += [record("ours, plain", 0, 0.5, False, prompt="1")]
    records += [record("llama-lookup", 0, 0.5)]
    assert tables(records) == {
        "code": [
            ["ours, plain", "128", "2.00", "128.0 (64–256)", "3 of 4"],
            ["llama-lookup", "64", "2.00", "128.0", "not compared"],
        ]
    }


def test_a_build_is_described_by_the_program_and_cmakes_cache(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "llama-server"
    path.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\necho 'built with GNU 12' >&2\n")
    path.chmod(0o755)
    assert build_of(path) == "7 (abc); built with GNU 12"
    build_of.cache_clear()
    (tmp_path / "CMakeCache.txt").write_text("GGML_NATIVE:BOOL=ON\nCMAKE_C_FLAGS:STRING=\nGGML_X:BOOL=ON\n")
    assert build_of(path) == "7 (abc); built with GNU 12; GGML_NATIVE=ON"
    build_of.cache_clear()
    source = "/build/llama_cpp_python-0.3.36/vendor/llama.cpp"
    (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\nGGML_NATIVE:BOOL=ON\n")
    given = "7 (abc); the source in llama-cpp-python 0.3.36; built with GNU 12; GGML_NATIVE=ON"
    assert build_of(path) == given

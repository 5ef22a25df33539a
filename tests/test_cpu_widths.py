"""The compiled path for other processors: numba compiles for the one that its settings name; the text is the same."""

import json
import os
import subprocess
import sys

import pytest

import lookahead
from lookahead.targets.cpu.llvm import HALVES, LANES, VNNI

AVX2 = "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = f"{AVX2},+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512cd"
#: Numbers in a vector -> the processor that stands for this width, and its features for numba.
PROCESSORS = {4: ("generic", None), 8: ("haswell", AVX2), 16: ("skylake-avx512", AVX512)}
PROMPT = "def is_prime(n):\n"
PROGRAM = """
import json, lookahead
from lookahead.targets.cpu.llvm import LANES
llm = lookahead.load("tiny")
texts = [
    llm.generate(PROMPT, max_new_tokens=24, drafter=method).tokens for method in ("prompt-lookup", "autoregressive")
]
print(json.dumps({"lanes": LANES, "path": llm.path, "texts": texts}))
"""


def permitted(features):
    """Whether this machine can run code for a processor."""
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    return features is None or ("avx512f" if "avx512f" in features else "avx2") in flags


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the processor's flags from /proc")
@pytest.mark.parametrize("lanes", PROCESSORS)
def test_each_width_gives_the_same_text(lanes):
    if lanes == LANES:
        pytest.skip("all other tests run at this width")
    name, features = PROCESSORS[lanes]
    if not permitted(features):
        pytest.skip(f"this processor cannot run code for {name}")
    environment = os.environ | {"NUMBA_CPU_NAME": name, "OMP_NUM_THREADS": "1"}
    if features is not None:
        environment["NUMBA_CPU_FEATURES"] = features
    program = PROGRAM.replace("PROMPT", repr(PROMPT))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    here = lookahead.load("tiny").generate(PROMPT, max_new_tokens=24, drafter="off").tokens
    assert report == {"lanes": lanes, "path": "cpu", "texts": [here, here]}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the processor's flags from /proc")
@pytest.mark.parametrize("lanes", [4, 8])
def test_products_of_packed_weights_for_each_width(lanes, tmp_path):
    """Without VNNI, and without F16C: the tests of the kernels themselves, compiled for such a processor."""
    if lanes == LANES and not VNNI and HALVES:
        pytest.skip("test_packed.py runs the same code on this processor")
    name, features = PROCESSORS[lanes]
    if not permitted(features):
        pytest.skip(f"this processor cannot run code for {name}")
    environment = os.environ | {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    if features is not None:
        environment["NUMBA_CPU_FEATURES"] = features
    tests = os.path.join(os.path.dirname(__file__), "test_packed.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", tests]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

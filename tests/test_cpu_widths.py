"""The compiled path on other processors: numba's settings name the processor; completions are equal."""

import json
import os
import subprocess
import sys

import pytest

from lookahead.cpu.kernels.processor import HALVES, VNNI, WIDTH
from width_and_text import texts

AVX2 = "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = f"{AVX2},+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512cd"
#: Numbers per vector -> a representative processor of this width, and its features for numba.
PROCESSORS = {4: ("generic", None), 8: ("haswell", AVX2), 16: ("skylake-avx512", AVX512)}
#: Each number of bits, with and without a zero point, offsets, superblocks and two scales in a block; the other five
#: kinds combine the same parts. Compiling a kind takes a second per width.
SOME = "Q4_1 Q5_0 Q6_K Q8_0 Q4_K BF16"
#: Run at each width: a completion, and the tests of packed-weight kernels and their vector operations.
FILES = [
    os.path.join(os.path.dirname(__file__), name)
    for name in ("width_and_text.py", "test_packed.py", "test_cpu_vectors.py")
]


def permitted(features):
    """Whether this machine has these features."""
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    return features is None or ("avx512f" if "avx512f" in features else "avx2") in flags


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the processor's flags from /proc")
@pytest.mark.parametrize("lanes", PROCESSORS)
def test_each_width_gives_the_same_text_and_passes_the_tests_of_packed_weights(lanes):
    """One process per width, each with a start of seconds. Widths 4 and 8 lack VNNI, and 4 lacks F16C."""
    if lanes == WIDTH and (lanes == 16 or (not VNNI and HALVES)):
        pytest.skip("all other tests run the same code on this processor")
    name, features = PROCESSORS[lanes]
    if not permitted(features):
        pytest.skip(f"this processor cannot run code for {name}")
    expected = {"lanes": lanes, "tokens": texts()[1][0]}
    environment = os.environ | {
        "EXPECTED": json.dumps(expected),
        "KINDS": SOME,
        "NUMBA_CPU_NAME": name,
        "OMP_NUM_THREADS": "1",
    }
    if features is not None:
        environment["NUMBA_CPU_FEATURES"] = features
    # Without tests of code that Python runs: it is the same at every width.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    words += ["-k", "not where_python_runs_it"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

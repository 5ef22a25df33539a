"""The compiled path on other processors: LOOKAHEAD_LEVEL names them; completions are equal."""

import json
import os
import subprocess
import sys

import pytest

from lookahead import processor
from lookahead.processor import fits, level
from width_and_text import texts

#: Numbers per vector -> the level of processors of this width.
LEVELS = {4: "x86-64", 8: "x86-64-v3", 16: "x86-64-v4"}
#: Each number of bits, with and without a zero point, offsets, superblocks and two scales in a block; the other five
#: types combine the same parts. Compiling a type takes a second per width.
SOME = "Q4_1 Q5_0 Q6_K Q8_0 Q4_K BF16"
#: Run at each width: a completion, and the tests of packed-weight kernels and their vector operations.
FILES = [
    os.path.join(os.path.dirname(__file__), name)
    for name in ("width_and_text.py", "test_packed.py", "test_cpu_vectors.py")
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the processor's flags from /proc")
@pytest.mark.parametrize("lanes", LEVELS)
def test_each_width_gives_the_same_text_and_passes_the_tests_of_packed_weights(lanes):
    """One process per width, each with a start of seconds. Widths 4 and 8 lack VNNI, and 4 lacks F16C."""
    name = LEVELS[lanes]
    if name == level().name:
        pytest.skip("all other tests run the same code on this processor")
    if not fits(next(each for each in (*processor.LEVELS, *processor.OTHERS) if each.name == name)):
        pytest.skip(f"this processor cannot run code for {name}")
    expected = {"lanes": lanes, "tokens": texts()[1][0]}
    environment = os.environ | {
        "EXPECTED": json.dumps(expected),
        "TENSOR_TYPES": SOME,
        "LOOKAHEAD_LEVEL": name,
        "OMP_NUM_THREADS": "1",
    }
    # Without tests of code that Python runs: it is the same at every width.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES]
    words += ["-k", "not where_python_runs_it"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

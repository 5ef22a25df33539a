"""Model-written programs run under limits; a pass rate counts successes."""

import pytest

from benchmarks import pass_rate

PROBLEM = {
    "prompt": "import math\n\n\ndef add(a, b):\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


HEAD = "def add(a, b):\n"


def test_the_first_code_block_of_an_answer_counts():
    assert pass_rate.code_of("Here:\n```python\nx = 1\n```\nand\n```\ny\n```") == "x = 1\n"
    assert pass_rate.code_of("```\ncut off") == "cut off"
    assert pass_rate.code_of("x = 2") == "x = 2"


@pytest.mark.parametrize(
    ("completion", "passed"),
    [
        ("    return a + b\n", True),
        ("    return a - b\n", False),
        ("    return a +\n", False),
        ("    import os\n    open('large', 'wb').write(bytes(1 << 21))\n    return a + b\n", False),
        ("    bytearray(1 << 31)\n    return a + b\n", False),
        ("    import os\n    return a + b if not os.environ.get('HOME') else 0\n", True),
    ],
    ids=["right", "wrong", "syntax", "large file", "memory", "environment"],
)
def test_a_completion_passes_if_its_tests_do_within_the_limits(completion, passed):
    assert pass_rate.passes(PROBLEM, HEAD + completion) is passed


def test_a_completion_that_does_not_end_fails(monkeypatch):
    monkeypatch.setattr(pass_rate, "SECONDS", 1)
    assert not pass_rate.passes(PROBLEM, HEAD + "    while True:\n        pass\n")


def test_no_network_is_reachable_where_the_system_can_take_it_away():
    if not pass_rate.without_network():
        pytest.skip("no network namespaces here")
    dial = "    import socket\n    socket.create_server(('127.0.0.1', 0)).close()\n    return a + b\n"
    names = "    import socket\n    return a + b if [n for _, n in socket.if_nameindex()] == ['lo'] else 0\n"
    assert pass_rate.passes(PROBLEM, HEAD + names)
    assert pass_rate.passes(
        PROBLEM, HEAD + dial
    )  # the loopback interface is down, and has no route out anyway

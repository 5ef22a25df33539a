"""The vector width and a completion: test_cpu_widths.py runs this in processes compiling for other CPUs."""

import json
import os

import lookahead
from lookahead.processor import level

PROMPT = "def is_prime(n):\n"


def texts():
    """The path, and the text with and without drafting."""
    llm = lookahead.load("tiny", drafter="off")
    drafters = ("off", "prompt-lookup")
    return llm.path, [llm.generate(PROMPT, max_new_tokens=24, drafter=each).tokens for each in drafters]


def test_the_width_is_the_one_asked_for_and_the_text_is_the_same():
    expected = json.loads(os.environ["EXPECTED"])
    assert expected["lanes"] == level().width
    assert texts() == ("cpu", [expected["tokens"]] * 2)

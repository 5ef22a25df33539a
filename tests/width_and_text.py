"""The vector width and a completion: test_cpu_widths.py runs this in processes compiling for other CPUs."""

import json
import os

import lookahead
from lookahead.targets.cpu.processor import WIDTH

PROMPT = "def is_prime(n):\n"


def text(drafter):
    llm = lookahead.load("tiny")
    return llm.path, llm.generate(PROMPT, max_new_tokens=24, drafter=drafter).tokens


def test_the_width_is_the_one_asked_for_and_the_text_is_the_same():
    expected = json.loads(os.environ["EXPECTED"])
    assert expected["lanes"] == WIDTH
    for drafter in ("prompt-lookup", "off"):
        assert text(drafter) == ("cpu", expected["tokens"])

"""The differential fuzzer in its short form, and the proof that it can fail."""

import fuzz


def test_no_case_differs():
    report = fuzz.fuzz(seconds=20)
    assert not report.found, "\n".join(report.found)
    assert report.cases > 20


def test_it_finds_a_wrong_token(accept_a_wrong_node):
    assert fuzz.fuzz(seconds=6, first=10_000).found

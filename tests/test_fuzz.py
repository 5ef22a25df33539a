"""A short run of the differential fuzzer, and proof that it can fail."""

import pytest

import fuzz

pytestmark = pytest.mark.filterwarnings("ignore:lookahead.generate runs this model with plain decoding")


def test_no_case_differs():
    report = fuzz.fuzz(least=48)
    assert not report.found, "\n".join(report.found)
    assert report.engine >= 6
    assert report.tokens >= 2000


def test_it_finds_a_wrong_token(accept_a_wrong_node):
    cases = [fuzz.Case.of(number) for number in range(10_000, 10_016) if number % 4 != 3]
    assert any(case.difference()[0] for case in cases)


def test_a_case_follows_from_its_number_alone():
    for number in (3, 4, 7):
        one, other = fuzz.case_of(number), fuzz.case_of(number)
        assert str(one) == str(other)
        assert one.difference() == other.difference()


def test_it_finds_a_wrong_token_of_the_engine(accept_a_wrong_node):
    wrong = [fuzz.EngineCase.of(number).difference()[0] for number in range(3, 63, 4)]
    assert any(" of prompt " in each for each in wrong)

"""A short run of the differential fuzzer, and proof that it can fail."""

import copy
import functools
import time
from collections import Counter

import pytest
import torch

import fuzz
import lookahead
from lookahead import Adaptive, Plain
from lookahead.core import Stats
from lookahead.drafters.adaptive.sources.light_head import HeadSource
from lookahead.server.grammar import GrammarProcess

pytestmark = pytest.mark.filterwarnings("ignore:lookahead.generate runs this model")


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_case_differs(first):
    report = fuzz.fuzz(least=50, first=first)
    assert not report.found, "\n".join(report.found)
    assert report.engine == 25
    assert report.families["gguf"] >= 5
    assert report.tokens >= 2000


def test_drafts_are_accepted(monkeypatch):
    """Otherwise, the comparison would show nothing."""
    steps = Counter()
    count_step = Stats.count_step
    monkeypatch.setattr(
        Stats,
        "count_step",
        lambda stats, *given: (steps.update([given[2] > 1]), count_step(stats, *given))[1],
    )
    fuzz.fuzz(least=12, first=1)
    assert steps[True] > 50


@pytest.mark.parametrize("number", [2, 3])
def test_a_case_is_printed_as_a_script(number, capsys):
    script = fuzz.case_of(number).script()
    assert len(script.splitlines()) <= 20
    exec(script, {})
    assert capsys.readouterr().out.splitlines()[-1] == "equal"


def test_the_script_of_a_finding_shows_it(capsys, accept_a_wrong_node):
    cases = (fuzz.EngineCase.of(number) for number in range(3, 63, 4))
    found = next(case for case in cases if case.difference()[0])
    exec(found.script(), {})
    assert "differ" in capsys.readouterr().out.splitlines()


@pytest.mark.filterwarnings("error:.*drafting continues without a base table")
def test_cases_use_the_files_of_learning(monkeypatch):
    """The head is called, and the table is accepted, in both kinds of case."""
    calls = []
    serve = HeadSource.serve

    def counted(source, memory):
        calls.append(source)
        return serve(source, memory)

    monkeypatch.setattr(HeadSource, "serve", counted)
    for kind in (fuzz.Case, fuzz.EngineCase):
        case = next(case for case in map(kind.of, range(3, 2000, 4)) if is_long(case))
        for drafter in (Adaptive(rows=8, head=fuzz.HEAD), Adaptive(rows=8, table=fuzz.TABLE)):
            assert drafter in [method.get("drafter") for method in fuzz.DRAFTING]
            assert drafter in fuzz.ENGINE_DRAFTERS
            case.method = case.method | {"drafter": drafter}
            calls.clear()
            assert case.difference()[0] == ""
            assert bool(calls) == (drafter.head is not None)


def is_long(case):
    """Whether a case of the compiled path has enough tokens for a head."""
    ends = {"stop", "eos_token_id"} & case.options.keys() or not case.options.get("ignore_eos", True)
    return case.family.split()[0] in fuzz.COMPILED and case.options["max_new_tokens"] > 15 and not ends


def test_it_finds_a_wrong_token(accept_a_wrong_node):
    numbers = [number for number in range(10_000, 10_016) if number % 4 != 3]
    assert any(fuzz.Case.of(number).difference()[0] for number in numbers)


def test_a_case_follows_from_its_number_alone():
    for number in (3, 4):  # of the engine, and of ``model.generate``
        one, other = fuzz.case_of(number), fuzz.case_of(number)
        assert str(one) == str(other)
        assert one.difference() == other.difference()


def test_it_finds_a_wrong_token_of_the_engine(accept_a_wrong_node):
    assert any("prompt " in fuzz.EngineCase.of(number).difference()[0] for number in range(3, 63, 4))


def swap(scores, logits):
    """Swap the last token that a filter kept with the first that it did not keep."""
    kept = scores != -torch.inf
    last = logits.where(kept, torch.inf).argmin()
    first = logits.where(~kept, -torch.inf).argmax()
    scores[first], scores[last] = scores[last].clone(), -torch.inf


FILTERED = {
    "max_new_tokens": 8,
    "do_sample": True,
    "top_k": 5,
    "temperature": 1.3,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}


@pytest.mark.parametrize("tied", [True, False])
def test_only_ties_excuse_other_tokens_of_a_filter(tied, monkeypatch):
    """In one model, the logits are pairs that differ by less than rounding: the fifth and the sixth are a pair.

    They differ by 5e-7 of their size, four times the spacing of floats, so that no rounding makes a pair equal:
    top-k would keep both. The largest difference between its logits with and without a KV cache is 1.3e-6.
    """
    model = copy.deepcopy(fuzz.model_of("llama", 0, 0.1))
    if tied:
        with torch.no_grad():
            model.lm_head.weight[1::2] = model.lm_head.weight[::2] * (1 + 5e-7)
    monkeypatch.setattr(fuzz.Case, "model", model)
    case = fuzz.Case.of(2)
    case.options = FILTERED
    out, _ = case.run()
    scores = torch.stack(out.scores)
    swap(scores[3, 0], out.logits[3][0])
    assert case.wrong_scores(scores, torch.stack(out.scores)) == (not tied)


def test_it_finds_a_token_that_a_filter_should_not_keep(monkeypatch):
    case = fuzz.Case.of(2)
    case.options = FILTERED
    assert case.difference()[0] == ""
    generate = lookahead.generate

    @functools.wraps(generate)
    def wrong(*args, **kwargs):
        out = generate(*args, **kwargs)
        swap(out.scores[3][0], out.logits[3][0])
        return out

    monkeypatch.setattr(lookahead, "generate", wrong)
    assert case.difference()[0] == "scores"


@pytest.mark.parametrize("drafter", [Plain(), Adaptive(rows=8)])
def test_a_mask_that_takes_long_changes_no_token(drafter, monkeypatch):
    """Targets that process single rows in place cannot evaluate a row again."""
    llm = fuzz.engine_of("falcon-alibi", 1, "float32")
    advance = GrammarProcess._advance
    texts = []
    for seconds in (0, 0.01):
        monkeypatch.setattr(
            GrammarProcess,
            "_advance",
            lambda *given, seconds=seconds: (time.sleep(seconds), advance(*given))[1],
        )
        with fuzz.Forced():
            texts.append(
                fuzz.decode(
                    llm,
                    [[5, 6, 7]],
                    drafter,
                    {"max_new_tokens": 15, "temperature": 1.0},
                    constraint=fuzz.CONSTRAINTS[0],
                )
            )
    assert len(texts[0][0][0]) > 5
    assert texts[0] == texts[1]

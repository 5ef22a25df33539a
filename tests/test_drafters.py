"""Drafters as settings: string and mapping forms, presets, and drafters from other packages."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from importlib.metadata import EntryPoint

import pytest

from lookahead import Adaptive, Jacobi, Lookahead, NGramPool, Plain, PromptLookup, SettingsError, as_drafter
from lookahead.core import Drafter, DraftState, Request, Start, TokenTree
from lookahead.drafters import PRESETS, names
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.testing import FakeTarget, assert_same_as_autoregressive, run


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("adaptive", Adaptive()),
        ("lookahead", Lookahead()),
        ("jacobi", Jacobi()),
        ("prompt-lookup", PromptLookup()),
        ("prompt_lookup", PromptLookup()),
        ("plain", Plain()),
        ("off", Plain()),
        ("autoregressive", Plain()),
        ("7,4,3", Lookahead(7, 4, 3)),
        (" 7, 4, 3 ", Lookahead(7, 4, 3)),
        ("1,1,0", Plain()),
        ("lookahead:1,1,0", Plain()),
        ({"W": 1, "N": 1, "G": 0}, Plain()),
        ("7b", Lookahead(15, 5, 15)),
        ("13b", Lookahead(10, 5, 10)),
        ("34b", Lookahead(7, 5, 7)),
        ("code", Lookahead.preset("code")),
        ("code:seed=3", Lookahead.preset("code", seed=3)),
        ("7,4,3:pool_from_prompt=0", Lookahead(7, 4, 3, pool_from_prompt=False)),
        ("lookahead:7,4,3:max_pool_keys=50", Lookahead(7, 4, 3, max_pool_keys=50)),
        ("lookahead:max_pool_keys=none", Lookahead()),
        ("adaptive:rows=8:sources=suffix+", Adaptive(rows=8, sources=("suffix",))),
        ("adaptive:sources=suffix+logits", Adaptive(sources=("suffix", "logits"))),
        ({"WINDOW_SIZE": 7, "LEVEL": 4, "GUESS_SET_SIZE": 3, "POOL_FROM_PROMPT": 1}, Lookahead(7, 4, 3)),
        ({"WINDOW_SIZE": 7, "LEVEL": 4, "ALWAYS_FWD_ONE": 1}, Lookahead(7, 4)),
        (
            {"max_window_size": 7, "max_ngram_size": 4, "max_verification_set_size": 3},
            Lookahead(7, 4, 3),
        ),
        ({"n_gram_size": 4, "lookahead_window": 7, "max_candidates": 3}, Lookahead(7, 4, 3)),
        ({"window_size": 7, "ngram_size": 3}, Lookahead(7, 3)),
        ({"pool_from_prompt": False}, Lookahead(pool_from_prompt=False)),
        ({"top": 7, "rows": 4}, Adaptive(top=7, rows=4)),
        ({"drafter": "adaptive", "rows": 7, "top": 8}, Adaptive(rows=7)),
        ({"max_rows": 8}, Adaptive(8)),
        ({"sources": "suffix,logits"}, Adaptive(sources=("suffix", "logits"))),
        ({"drafter": "jacobi", "block_size": 4}, Jacobi(4)),
        ({"drafter": "jacobi", "WINDOW_SIZE": 4}, Jacobi(4)),
        ({"drafter": "prompt-lookup", "prompt_lookup_num_tokens": 5}, PromptLookup(max_drafted=5)),
        ({"drafter": "code", "guess_set_size": 4}, Lookahead.preset("code", guess_set_size=4)),
        ({"drafter": "text"}, Lookahead.preset("text")),
        ({"drafter": "7,4,3", "seed": 2}, Lookahead(7, 4, 3, seed=2)),
        ({}, Adaptive()),
        (None, Adaptive()),
    ],
    ids=str,
)
def test_what_reads_as_which_drafter(value, expected):
    assert as_drafter(value) == expected
    assert as_drafter(str(expected)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("poem", "drafter must be one of lookahead, .*, code, .* or W,N,G as in 15,5,15, got 'poem'"),
        ("15,5", "drafter must be one of"),
        ("lookahead:15,5", "must be NAME=VALUE, or W,N,G"),
        ("lookahead:1,5,1:2,5,2", "given twice"),
        ("7,4,3:5,5,5", "given twice"),
        ("adaptive:15,5,15", "adaptive has no setting 'window_size'; it has max_rows"),
        (
            "prompt-lookup:window_size=3",
            "prompt-lookup has no setting 'window_size'; it has max_ngram, max_drafted",
        ),
        ("prompt-lookup:max_ngram=33", "max_ngram must be a whole number between 1 and 32, got 33"),
        ("prompt-lookup:max_drafted=513", "max_drafted must be a whole number between 1 and 512, got 513"),
        ("plain:seed=1", "plain has no setting 'seed'; it has none"),
        ({"drafter": "jacobi", "ngram_size": 4}, "jacobi has no setting 'ngram_size'"),
        ({"maxrows": 3}, r"has no setting 'maxrows' \(did you mean 'max_rows'\?\); it has"),
        ({"method": "jacobi"}, "adaptive has no setting 'method'"),
        ({"max_rows": 8, "guess_set_size": 3}, "has no setting"),
        ({"W": 3, "WINDOW_SIZE": 3}, "window_size is given twice"),
        ({"drafter": "code", "preset": "text"}, "lookahead has no setting 'preset'"),
        ({"ALWAYS_FWD_ONE": 0}, "ALWAYS_FWD_ONE must be 1"),
        ({"DIST_WORKERS": 4}, "start the processes with torchrun"),
        ({"pool": NGramPool(1)}, "has no setting 'pool'"),
        (3.5, "drafter must be a Drafter such as .* got 3.5"),
        (Lookahead, "drafter must be a Drafter such as"),
        ((15, 5, 15), r"drafter must be a Drafter .* got \(15, 5, 15\)"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(value, message):
    with pytest.raises(SettingsError, match=message):
        as_drafter(value)


def test_presets_are_those_of_the_design_and_of_the_paper():
    rows = {
        name: (p.ngram_size, p.window_size, p.guess_set_size, p.max_jacobi_iterations, p.max_pool_keys)
        for name, p in PRESETS.items()
        if name in ("code", "text", "creative")
    }
    assert rows == {
        "code": (6, 8, 15, 12, 10_000),
        "text": (5, 7, 10, 16, 10_000),
        "creative": (4, 5, 8, 20, 10_000),
    }
    sizes = {7e9: (15, 5, 15), 1.5e9: (15, 5, 15), 13e9: (10, 5, 10), 34e9: (7, 5, 7), 70e9: (7, 5, 7)}
    assert {size: Lookahead.for_model(size).triple for size in sizes} == sizes


def test_settings_are_frozen_values_and_what_is_kept_is_no_part_of_them():
    pool, state = NGramPool(7), AdaptiveState()
    for plain, keeping in ((Lookahead(), Lookahead(pool=pool)), (Adaptive(), Adaptive(state=state))):
        assert plain == keeping
        assert hash(plain) == hash(keeping)
        assert str(plain) == str(keeping)
        assert pickle.loads(pickle.dumps(plain)) == copy.deepcopy(plain) == plain
        with pytest.raises(FrozenInstanceError):
            plain.window_size = 3
    assert Lookahead() != Lookahead(seed=1)
    assert as_drafter(keeping) is keeping


def test_one_drafter_serves_many_sequences_at_once():
    drafter, prompts = Lookahead(5, 4, 5), [[1, 2, 3], [4, 5, 6], [7]]
    together = run(FakeTarget(40), [Request(prompt, drafter, 40) for prompt in prompts])
    for ours, prompt in zip(together, prompts, strict=True):
        (alone,) = run(FakeTarget(40), [Request(prompt, drafter, 40)])
        assert (ours.tokens, ours.stats.rows) == (alone.tokens, alone.stats.rows)


class Recorder(Drafter):
    """A third-party drafter that records what it receives."""

    name = "recorder"

    def start(self, sequence):
        return RecorderState(sequence)


class RecorderState(DraftState):
    def __init__(self, sequence):
        self.sequence, self.last, self.batches = sequence, sequence.first, []

    def draft(self, max_depth, max_rows=1 << 20, batch=1):
        self.batches.append(batch)
        return TokenTree(self.last)

    def observe(self, tree, scores, path, tokens):
        self.last = tokens[-1]

    def stats(self):
        return {"batch": max(self.batches)}


def test_a_state_starts_with_all_that_is_known_and_each_draft_is_told_its_batch():
    target = FakeTarget(40)
    requests = [
        Request([1, 2], Recorder(), 5, eos=frozenset({39}), predicted=(7, 8), noise=None) for _ in range(3)
    ]
    first = run(target, requests)[0]
    start = first.drafting.sequence
    assert start == Start([1, 2], first.tokens[0], frozenset({39}), 40, None, (7, 8))
    assert start.text == [1, 2, 7, 8, 1, 2, first.tokens[0]]
    assert first.stats.drafter == {"batch": 3}


def test_a_drafter_of_another_package_joins_by_being_passed_or_by_an_entry_point(monkeypatch):
    assert_same_as_autoregressive(FakeTarget(40), [[1, 2]], Recorder(), 10)
    here = __name__
    points = [
        EntryPoint("recorder", f"{here}:Recorder", names.GROUP),
        EntryPoint("bad", "os:sep", names.GROUP),
    ]

    def entry_points(group, name=None):
        assert group == "lookahead.drafters"
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(names, "entry_points", entry_points)
    assert isinstance(as_drafter("recorder"), Recorder)
    with pytest.raises(SettingsError, match=r"entry point 'bad' of lookahead\.drafters must be a Drafter"):
        as_drafter("bad")
    with pytest.raises(SettingsError, match="recorder, bad, or W,N,G"):
        as_drafter("nix")


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("adaptive", True),
        ("adaptive:sources=logits+", False),
        ("lookahead", True),
        ("lookahead:pool_from_prompt=0", False),
        ("7,4,0", False),
        ("prompt-lookup", True),
        ("jacobi", False),
        ("plain", False),
    ],
)
def test_whether_a_drafter_uses_a_prediction(text, uses):
    assert as_drafter(text).uses_prediction is uses

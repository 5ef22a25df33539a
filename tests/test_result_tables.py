"""The tables of docs/results that have no records are those of the figures beside them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import (
    batch_size,
    dynamics,
    exact_text,
    packed_step,
    page,
    quoted,
    rows,
    serve,
    startup,
    trained,
)
from benchmarks.blocks import with_block
from benchmarks.quiet import WHOSE_LOAD, processor
from lookahead.bench.record import environment

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def of_dynamics(facts):
    pools, blocks = facts["figures"]["pool"], facts["figures"]["convergence"]
    yield dynamics.convergence_table(blocks, dynamics.AGES)
    if all("emitted" in text for each in blocks.values() for text in each):  # a page of this program
        yield dynamics.pool_table(pools)
        yield dynamics.block_table(blocks, dynamics.AGES)
    for name, size in facts["figures"]["memory"].items():
        yield f"| {name} | {size:.2f} |"


def of_exact(facts):
    yield from exact_text.body(facts["figures"])


def of_packed_step(facts):
    # JSON has the numbers of rows as texts.
    lines = [line | {"t": {int(k): each for k, each in line["t"].items()}} for line in facts["figures"]]
    yield from packed_step.page(lines)


def of_batch_size(facts):
    yield from batch_size.body(facts["figures"], facts["memory"])


def of_rows(facts):
    line = {"equal": True, "options": {"new_tokens": 128, "rounds": 2, "fixed": "2"}}
    (table,) = [part for part in rows.body([line], facts["figures"]) if part.startswith("|")]
    yield table


def of_startup(facts):
    for row in startup.table(facts["figures"])[1:]:
        yield f"| {' | '.join(row)} |"


def of_pass_rate(facts):
    for line in facts["figures"]:
        count, total = sum(line["passed"]), len(line["passed"])
        equal = f"{total} of {total}" if line["equal"] else ""
        yield f"| {line['drafter']} | {count} of {total} ({count / total:.1%}) | {equal}"


def of_packed_accuracy(facts):
    for name, line in facts["figures"].items():
        kl = " | ".join(f"{line[f'kl_{what}']:.2e}" for what in ("mean", "median"))
        yield f"| {name} | {kl} | {line['kl_largest']:.3f} | {line['top1']:.4f} | {line['perplexity']:.4f} |"


def of_llamacpp_examples(facts):
    for lines in facts["figures"].values():
        for cells in lines:
            yield f"| {' | '.join(cells)} |"


def of_vllm(facts):
    for line in facts["figures"]:
        each = " | ".join(f"{s:.2f}" for s in line["S"].values())
        tokens, seconds = line["decoding"]
        yield f"| {line['method']} | {each} | {line['all']:.2f} | "
        yield f" | {tokens / seconds:.1f} | {1000 * line['step']:.0f} | "


def of_trained(facts):
    lines = facts["figures"]
    methods, numbers = (list(dict.fromkeys(line[key] for line in lines)) for key in ("method", "rows"))
    given = SimpleNamespace(new_tokens=lines[0]["new_tokens"], prompts=lines[0]["prompts"])
    given.methods, given.rows = methods, numbers
    yield from trained.body(lines, given)


MAKERS = {
    name.removeprefix("of_").replace("_", "-"): make for name, make in globals().items() if name[:3] == "of_"
}


@pytest.mark.parametrize("name", [name for name in MAKERS if (RESULTS / f"{name}.json").is_file()])
def test_the_tables_of_a_page_are_those_of_its_figures(name):
    text = (RESULTS / f"{name}.md").read_text()
    found = "\n".join(MAKERS[name](json.loads((RESULTS / f"{name}.json").read_text()))).splitlines()
    lines = [line for line in found if line.startswith(("|", " |")) and "---" not in line]
    assert len(lines) >= 2
    for line in lines:
        assert line in text, f"{name}.md must have: {line}"


def test_the_table_of_the_server_is_that_of_its_figures():
    """The rates in its JSON are rounded to hundredths, so a median may round to the next tenth."""
    text = (RESULTS / "serve.md").read_text()
    figures = json.loads((RESULTS / "serve.json").read_text())["figures"]
    assert len(figures) >= 2
    for line in figures:
        rates, first = line["tokens_per_second_by_round"], 1000 * line["first_token_p50"]
        own = f"| {line['clients']} | {line['method']} | {first:.0f} | {1000 * line['per_token_p50']:.1f} | "
        shown = {serve.with_range([rate + off for rate in rates]) for off in (-0.005, 0.0, 0.005)}
        assert any(f"{own}{each} |" in text for each in shown), f"serve.md must have: {own}{shown}"


def test_a_page_shows_the_processor_and_the_load(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    record = environment() | {"model": "tiny", "dtype": "float32"}
    for loads, shown in (([1.0, 2.0, None], "1.0 to 2.0"), (None, "0.5 to 3.2")):
        text = page.write_page(tmp_path / "x", "Title", record | {"load": 0.5}, {}, ["body"], loads)
        assert f"in float32. Processor: {processor()}. Load average: {shown}, {WHOSE_LOAD}.\n" in text
        assert json.loads((tmp_path / "x.json").read_text())["processor"] == processor()


def test_memory_is_given_in_mb(capsys):
    """Linux counts KiB."""
    status = ["VmHWM:\t 2000 kB", "VmRSS:\t 1000 kB"]
    exec("pass" + packed_step.MEMORY, {"open": lambda path: status})
    assert packed_step.eval_numbers(capsys.readouterr().out) == [1.024, 2.048]


def test_every_page_is_recounted():
    """From its records (tests/test_paper.py) or here."""
    pages = {path.stem for path in RESULTS.glob("*.json")}
    with_records = {path.name.removesuffix(".jsonl.gz") for path in (RESULTS / "records").glob("*.jsonl.gz")}
    assert pages - with_records <= {*MAKERS, "serve"}


# ---------------------------------------------------------------- what docs/cpu.md and docs/engines.md quote


@pytest.mark.parametrize("name", quoted.BLOCKS)
def test_a_page_quotes_what_the_figures_say(name):
    text = (quoted.DOCS / name).read_text()
    assert quoted.with_blocks(name, text) == text, "run python -m benchmarks.results --readme"


def test_a_run_of_vllm_that_failed_has_no_figures(tmp_path, monkeypatch):
    facts = json.loads((quoted.RESULTS / "vllm.json").read_text())
    monkeypatch.setattr(quoted, "RESULTS", tmp_path)
    facts["figures"] = [
        line for line in facts["figures"] if (line["method"], line["clients"]) != ("suffix", 1)
    ]
    (tmp_path / "vllm.json").write_text(json.dumps(facts))
    text = quoted.vllm()
    assert re.search(r"\| suffix \| – \| \d\.\d\d, \d+ \|", text)
    assert "On a GPU" not in text
    assert re.search(r"ours decodes up to \d\.\d\d times .* own methods up to \d\.\d\d times", text)


def test_a_block_is_replaced_and_others_stay():
    page = "a\n<!-- measured: one -->\n<!-- end -->\nb\n<!-- measured: two -->\nold\n<!-- end -->\n"
    assert with_block(page, "x.md", "one", "new") == page.replace("one -->\n", "one -->\nnew\n")
    assert with_block(page, "x.md", "two", "new") == page.replace("old", "new")
    for text in (page * 2, "", page.replace("measured", "computed")):
        with pytest.raises(SystemExit, match=r"x\.md must have one block <!-- measured: one -->"):
            with_block(text, "x.md", "one", "new")

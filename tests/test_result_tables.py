"""The tables of docs/results that have no records are those of the figures beside them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import batch_size, dynamics, exact_text, packed_step, page, rows, startup, trained
from benchmarks.quiet import processor
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
    for name, own in startup.cells(facts["figures"]).items():
        cells = (own.get(what, "–") for what in ("start", "memory", "first use"))
        yield f"| {name} | {' | '.join(cells)} |"


def of_serve(facts):
    for line in facts["figures"]:
        first = 1000 * line["first_token_p50"]
        yield (
            f"| {line['clients']} | {line['method']} | {first:.0f} | {1000 * line['per_token_p50']:.1f} | "
            f"{line['tokens_per_second']:.1f} |"
        )


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


def test_a_page_shows_the_processor_and_the_load(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (3.25, 0.0, 0.0))
    record = environment() | {"model": "tiny", "dtype": "float32"}
    for loads, shown in (([1.0, 2.0, None], "1.0 to 2.0"), (None, "0.5 to 3.2")):
        text = page.write_page(tmp_path / "x", "Title", record | {"load": 0.5}, {}, ["body"], loads)
        assert f"in float32. Processor: {processor()}. Load average: {shown}.\n" in text
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
    assert pages - with_records <= set(MAKERS)


# ---------------------------------------------------------------- tables that docs/engines.md copies


def rows_of(text):
    """First cell -> the other cells, of all table lines."""
    lines = (line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|"))
    return {name.strip(" |"): [cell.strip(" |") for cell in cells] for name, *cells in lines}


def test_the_table_of_the_compiled_path_is_copied_right():
    figures = json.loads((RESULTS / "packed-step.json").read_text())["figures"]
    files = {
        line["weights"].split()[0] if line["type"] != "Q4_K_M" else "Q4_K_M": line for line in figures[:3]
    }
    table = rows_of((RESULTS.parent / "cpu.md").read_text())
    numbers = {"one": "1", "four": "4", "16": "16"}
    copied = 0
    for name, cells in table.items():
        what, _, kind = name.rpartition(", ")
        if kind not in files:
            continue
        prompt = what.startswith("a prompt")
        times = files[kind]["prompt" if prompt else "t"]
        times = times if prompt else times[numbers[what.split()[0]]]
        assert cells[:2] == [f"{times[by]:.{0 if prompt else 1}f}" for by in ("ours", "llama.cpp")], name
        copied += 1
    assert copied == 6


ENGINES = rows_of((RESULTS.parent / "engines.md").read_text())


def same(cell, s, rate):
    """Whether a cell has these tokens per step and tokens/s."""
    written = cell.split(", ")
    return abs(float(written[0]) - s) < 0.0051 and abs(float(written[1]) - rate) < 0.51


def test_the_table_of_llama_cpps_examples_is_copied_right():
    figures = json.loads((RESULTS / "llamacpp-examples.json").read_text())["figures"]
    names = {"llama-bench, plain": "llama-bench, plain", "llama-server, plain": "llama-server, none"}
    ours = ("plain", "adaptive", "CPU path, plain", "CPU path, adaptive")
    names |= {f"ours, {name}": f"ours, {name}" for name in ours}
    names |= {"llama-lookahead, the same settings": "llama-lookahead", "llama-lookup": "llama-lookup"}
    for place, lines in enumerate(figures.values()):
        found = {line[0]: (float(line[2]), float(line[3].split()[0])) for line in lines}
        for name, method in names.items():
            assert same(ENGINES[name][place], *found[method]), (name, place, found[method])
        (fixed,) = [cells for name, cells in ENGINES.items() if name.startswith("ours, `15,5,15`")]
        assert same(fixed[place], *found["ours, 15,5,15"])
        modes = [each for name, each in found.items() if name.startswith("llama-server, ngram")]
        best = max(modes, key=lambda each: each[1])
        assert same(ENGINES["llama-server, the best of eight ngram settings"][place], *best)


def test_the_tables_of_vllm_are_copied_right():
    figures = json.loads((RESULTS / "vllm.json").read_text())["figures"]
    clients = sorted({line["clients"] for line in figures})
    for line in figures:
        if line["method"] != "plain, a second run":
            tokens, seconds = line["decoding"]
            cell = ENGINES[line["method"]][clients.index(line["clients"])]
            assert same(cell, line["all"], tokens / seconds), (line["method"], line["clients"])
    own_engine = (RESULTS / "vllm.md").read_text().partition("own engine")[2]
    copied = {
        name: cells for name, cells in rows_of(own_engine).items() if name in ENGINES and name[0].isalpha()
    }
    assert len(copied) >= 5
    for name, cells in copied.items():
        assert ENGINES[name] == [cells[-1]], name

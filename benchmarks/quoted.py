"""The tables and sentences of docs/cpu.md and docs/engines.md that quote measured pages.

Each is a block of its page, computed from the figures in docs/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from lookahead.bench.report import figures, plain_of

from .blocks import made, with_block
from .paper import committed
from .report import markdown_table

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results"
#: Columns of the table of passes -> rows.
PASSES = {"one row": "1", "four rows": "4", "16 rows": "16"}
#: The methods of llamacpp-examples that are quoted, under their names there -> names in the table.
EXAMPLES = {
    "llama-bench, plain": "llama-bench, plain",
    "llama-server, none": "llama-server, plain",
    "ours, plain": "ours, plain",
    "ours, adaptive": "ours, adaptive",
    "ours, 15,5,15": "ours, `15,5,15`",
    "llama-lookahead": "llama-lookahead, the same settings",
    "llama-lookup": "llama-lookup",
    "llama-lookup 8": "llama-lookup, 8 drafted tokens",
    "ours, CPU path, plain": "ours, CPU path, plain",
    "ours, CPU path, adaptive": "ours, CPU path, adaptive",
}
#: Beginning of the names of the server's modes.
MODES = "llama-server, ngram"
#: Methods of the page of vLLM.
ALWAYS, SUFFIX, PLAIN, SECOND = "ours, always drafting", "suffix", "plain", "plain, a second run"


def write() -> None:
    """Write all blocks."""
    for name in BLOCKS:
        path = DOCS / name
        path.write_text(with_blocks(name, path.read_text(encoding="utf-8")), encoding="utf-8")


def with_blocks(name: str, text: str) -> str:
    """The text of a page with new blocks; a block stays as it is if one of its measured pages does not exist."""
    for block, (pages, make) in BLOCKS[name].items():
        if all((RESULTS / f"{page}.json").is_file() for page in pages):
            text = with_block(text, name, block, make())
    return text


def _facts(page: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RESULTS / f"{page}.json").read_text(encoding="utf-8"))
    return facts


def _where(page: str) -> str:
    """The machine, the commit and a link."""
    machine, commit = made(_facts(page))
    return f"{machine}, commit {commit[:7]} ([the page](results/{page}.md))"


def accuracy() -> str:
    """Packed weights and llama.cpp compared with the same weights in fp32."""
    facts = _facts("packed-accuracy")
    names = {"packed (ours)": "this library", "llama.cpp": "llama.cpp"}
    each = [line for name, line in facts["figures"].items() if name in names]

    def row(name: str, key: str, form: str) -> list[str]:
        return [name, *(f"{line[key]:{form}}".replace("e-0", "e-") for line in each)]

    head = [f"{facts['tokens']:,} positions", *(names[name] for name in facts["figures"] if name in names)]
    rows = [
        row("mean KL divergence", "kl_mean", ".2e"),
        row("largest KL divergence", "kl_largest", ".3f"),
        row("top-1 agreement", "top1", ".4f"),
    ]
    return f"{_where('packed-accuracy')}:\n\n{markdown_table(head, rows)}"


def passes() -> str:
    """Passes of packed weights compared with llama.cpp's."""
    lines = {line["type"]: line for line in _facts("packed-step")["figures"]}
    own, large = lines["own"], lines["1B"]

    def name(kind: str) -> str:
        if kind.endswith("B"):
            return f"{kind}, {lines[kind]['weights']}"
        return f"SmolLM2, {own['weights'].split()[0] if kind == 'own' else kind}"

    def cell(times: dict[str, float], digits: int) -> str:
        return " / ".join(f"{times[by]:.{digits}f}" for by in ("ours", "llama.cpp"))

    rows = [
        [name(kind), *(cell(line["t"][rows], 1) for rows in PASSES.values()), cell(line["prompt"], 0)]
        for kind, line in lines.items()
    ]
    table = markdown_table(["ours / llama.cpp, ms", *PASSES, "a prompt of 512 tokens"], rows)
    floors = [large["t"]["1"][by] / large["floor"] for by in ("ours", "llama.cpp")]
    return (
        f"{_where('packed-step')}:\n\n{table}\n\n"
        f"The 1B model has random weights in the shape of Llama 3.2 1B; one row takes {floors[0]:.2f} times as long "
        f"as reading the weights (llama.cpp: {floors[1]:.2f}). Start and memory of both are on "
        "[their page](results/startup.md)."
    )


def examples() -> str:
    """Our drafters on llama.cpp compared with its own examples."""
    figures = _facts("llamacpp-examples")["figures"]
    sets = [{line[0]: line for line in lines} for lines in figures.values()]

    def speed(line: list[str]) -> float:
        return float(line[3].split()[0])

    def cell(line: list[str]) -> str:
        return f"{line[2]}, {speed(line):.0f}"

    rows = [[name, *(cell(lines[method]) for lines in sets)] for method, name in EXAMPLES.items()]
    modes = [[line for name, line in lines.items() if name.startswith(MODES)] for lines in sets]
    best = [cell(max(lines, key=speed)) for lines in modes]
    rows.insert(-2, [f"llama-server, the best of {len(modes[0])} ngram settings", *best])

    def against(method: str) -> str:
        ratios = [speed(lines["ours, plain"]) / speed(lines[method]) for lines in sets]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times the speed of {method.partition(',')[0]}"

    counts = [lines["ours, 15,5,15"][4].split(" of ") for lines in sets]
    equal, compared = (sum(int(count[place]) for count in counts) for place in (0, 1))
    table = markdown_table(["tokens per step (S), tokens/s", *figures], rows)
    return (
        f"{_where('llamacpp-examples')}:\n\n{table}\n\n"
        f"Plain decoding through this library's loop reaches {against('llama-bench, plain')}, which neither samples "
        f"nor detokenizes, and {against('llama-server, none')}. With `15,5,15`, {equal} of {compared} completions "
        "equal plain decoding."
    )


def vllm() -> str:
    """Our drafting on vLLM compared with its own methods."""
    lines = {(line["method"], line["clients"]): line for line in _facts("vllm")["figures"]}
    clients = sorted({number for _, number in lines})
    methods = dict.fromkeys(name for name, _ in lines if name != SECOND)
    rates = {run: line["decoding"][0] / line["decoding"][1] for run, line in lines.items()}

    def cell(run: tuple[str, int]) -> str:
        return f"{lines[run]['all']:.2f}, {rates[run]:.0f}" if run in lines else "–"

    rows = [[name, *(cell((name, number)) for number in clients)] for name in methods]
    table = markdown_table(["clients", *map(str, clients)], rows)
    text = f"S and tokens/s of decoding steps by number of clients; {_where('vllm')}:\n\n{table}"
    if (ALWAYS, 1) in lines and (SUFFIX, 1) in lines:
        always, suffix = (lines[name, 1]["all"] for name in (ALWAYS, SUFFIX))
        text = (
            f'On a GPU, where rows are nearly free, expect the S of "always drafting": {always:.2f} with one client, '
            f"against {suffix:.2f} for vLLM's suffix decoding on the same prompts.\n\n{text}"
        )
    best: dict[bool, float] = {}  # whether a method is ours -> its largest ratio to plain decoding
    for (name, number), rate in rates.items():
        if name not in (PLAIN, SECOND) and (PLAIN, number) in rates:
            ours = name.startswith("ours")
            control = fmean(rates[run, number] for run in (PLAIN, SECOND) if (run, number) in rates)
            best[ours] = max(best.get(ours, 0), rate / control)
    if len(best) == 2:
        text += (
            f"\n\nOn vLLM's CPU backend, ours decodes up to {best[True]:.2f} times as many tokens/s as plain "
            f"decoding (the mean of its two runs), and vLLM's own methods up to {best[False]:.2f} times."
        )
    return text


def chains() -> str:
    """How much lower S is for chains than for trees, over all data sets, from the last table of the page of vLLM."""
    text = (RESULTS / "vllm.md").read_text(encoding="utf-8").partition("own engine")[2]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return markdown_table(["", "S"], [[name, every] for name, *_, every in cells[2:]])


#: Kinds of text -> their data sets.
KINDS = {"prose": ("mt-bench",), "code": ("humaneval", "mbpp", "classeval")}
QUOTED_SETS = tuple(name for sets in KINDS.values() for name in sets)
#: Pages of the default and the light head -> methods, with their names.
WORTH = {
    "bench-packed-head": {"adaptive": "the default", "adaptive:head=auto": "with the light head"},
    "bench-packed-sampled": {"adaptive": "the default at temperature 0.7"},
}
CHINESE = {
    "tokens per step (S), times plain (95 %)": "每步 token 数 (S)，相对普通解码 (95 %)",
    "prose": "散文",
    "code": "代码",
    "the default at temperature 0.7": "默认方法，温度 0.7",
    "the default": "默认方法",
    "with the light head": "加上轻量头",
    "All completions equal those of plain decoding.": "所有文本都与普通解码一致。",
    "Not all completions equal those of plain decoding.": "并非所有文本都与普通解码一致。",
}


def worth(words: Mapping[str, str] = MappingProxyType({})) -> str:
    """S and speed of the default, of the light head, and of sampling, by kind of text.

    Args:
        words: translations.
    """
    rows = []
    equal = True
    for page, methods in WORTH.items():
        _, records = committed.read(RESULTS / "records" / f"{page}.jsonl.gz")
        records = [record for record in records if "skipped" not in record]
        plain = plain_of(records)
        for method, name in methods.items():
            row = [name]
            for sets in KINDS.values():
                own = [x for x in records if x["method"] == method and x["workload"] in sets]
                found = figures(own, plain)
                row.append(f"{found.s_steps:.2f}, {found.total:.2f} ({found.low:.2f}–{found.high:.2f})")
                equal &= found.equal == found.compared == len(own)
            rows.append(row)
    table = markdown_table(["tokens per step (S), times plain (95 %)", *KINDS], rows)
    verdict = f"{'All' if equal else 'Not all'} completions equal those of plain decoding."
    text = f"{table}\n\n{verdict}"
    for english, other in words.items():
        text = text.replace(english, other)
    machine, commit = made(_facts("bench-packed-head"))
    link = "../results" if words else "results"
    pages = ", ".join(f"[{page.removeprefix('bench-packed-')}]({link}/{page}.md)" for page in WORTH)
    return f"{machine}, commit {commit[:7]} ({pages}):\n\n{text}"


#: Page -> block -> (measured pages, the function that makes it).
BLOCKS: dict[str, dict[str, tuple[tuple[str, ...], Callable[[], str]]]] = {
    "cpu.md": {
        "accuracy": (("packed-accuracy",), accuracy),
        "passes": (("packed-step",), passes),
    },
    "engines.md": {
        "examples": (("llamacpp-examples",), examples),
        "vllm": (("vllm",), vllm),
        "chains": (("vllm",), chains),
    },
    "adaptive.md": {"worth": (tuple(WORTH), worth)},
    "zh/adaptive.md": {"worth": (tuple(WORTH), partial(worth, CHINESE))},
}

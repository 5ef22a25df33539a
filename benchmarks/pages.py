"""The pages of docs/results, one question each, and the blocks of README, all from the records beside them.

``python -m benchmarks.results --readme`` writes them. A page is a function that returns an ``Answer``: one sentence,
one chart, short tables. What it was measured with (definitions, machine, command, records) is added at its end. The
charts are drawn by ``chart``; no figure is typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lookahead.bench.record import Record
from lookahead.bench.report import Figures, figures, plain_of

from . import chart, startup
from .llamacpp_server import LLAMA_SERVER
from .paper import ablation, committed, end_to_end, scaling_law
from .report import markdown_table
from .trained import ABOUT, DRAFT_MODEL

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
PLAIN, DEFAULT, FIXED, PAPERS = "plain", "adaptive", "adaptive:rows=4", "lookahead:15,5,15"
NO_TABLE = "adaptive:sources=suffix+logits+jacobi"
#: Kinds of text -> their data sets.
KINDS = {"prose": ("mt-bench",), "code": ("humaneval", "mbpp", "classeval")}
#: Sizes without records of their own on the first page -> the records that stand in for them.
INSTEAD = {"0.5B": "bench-larger", "135M": "bench-packed"}
#: English -> Chinese, in the README's blocks and in the chart of speeds. Longer phrases come first.
CHINESE = {
    "Times plain decoding, and tokens per second": "相对普通解码的倍数，以及每秒 token 数",
    "llama.cpp at its best": "llama.cpp 最快时",
    "the default, without a table": "默认（无基础表）",
    "plain decoding": "普通解码",
    "the default": "默认",
    ", prose": "，散文",
    ", code": "，代码",
    "prose": "散文",
    "code": "代码",
    " cores": " 核",
    " threads": " 线程",
    "model": "模型",
}


@dataclass(frozen=True)
class Answer:
    """What a page says: a sentence, a chart with its alternative text, and parts in Markdown."""

    sentence: str
    svg: str
    alt: str
    parts: Sequence[str]
    notes: Sequence[str]  # definitions


@dataclass(frozen=True)
class Page:
    """A question, the function that answers it, and the measurements that it shows."""

    question: str
    answer: Callable[[], Answer]
    shows: Sequence[str]  # names of records or figures in docs/results
    more: Callable[[], Sequence[str]] = field(default=lambda: ())  # further names


# ---------------------------------------------------------------------- what was measured


def facts_of(name: str) -> dict[str, Any]:
    """The JSON of a measurement."""
    facts: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def records_of(name: str) -> list[Record]:
    """The records of a measurement, one for each completion, without those that were skipped."""
    _, records = committed.read(RESULTS / "records" / f"{name}.jsonl.gz")
    return [record for record in records if "skipped" not in record]


def exists(name: str) -> bool:
    return (RESULTS / "records" / f"{name}.jsonl.gz").is_file()


def made(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The machine and the commit of a measurement; dashes where it names none."""
    found = re.match(r"(.*?), \d+ threads?,.* commit ([^,]+),", facts.get("where", ""))
    return (found[1], found[2][:7]) if found else ("–", "–")


def where(name: str) -> str:
    return "{}, commit {}".format(*made(facts_of(name)))


def times(x: Figures, digits: int = 2) -> str:
    """A speed-up with its interval."""
    return f"{x.total:.{digits}f} ({x.low:.{digits}f}–{x.high:.{digits}f})"


class Measured:
    """The records of methods side by side on one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records = records_of(name)
        self._plain = plain_of(self.records)
        self.methods = list(dict.fromkeys(record["method"] for record in self.records))
        self.model = re.sub(r"\.gguf$", "", self.records[0]["model"])

    def of(self, method: str, sets: Sequence[str] = ()) -> Figures:
        """Figures of a method over these data sets, or over all."""
        own = [x for x in self.records if x["method"] == method and (not sets or x["workload"] in sets)]
        return figures(own, self._plain)

    @property
    def default(self) -> str:
        """The default drafter; where it was not measured, the default without a base table."""
        return DEFAULT if DEFAULT in self.methods else NO_TABLE

    def best_of_llama_cpp(self, sets: Sequence[str] = ()) -> tuple[str, Figures]:
        """The fastest of llama.cpp's files and modes on these data sets, with its figures."""
        found = {name: self.of(name, sets) for name in self.methods if name.startswith(LLAMA_SERVER)}
        return max(found.items(), key=lambda item: item[1].total)


def shown_models() -> dict[str, Measured]:
    """Size -> the records of the first page, ``speed-SIZE``, the largest model first."""
    own = {path.name.split("-")[1].removesuffix(".jsonl.gz").upper(): path for path in _speed_records()}
    names = INSTEAD | {size: path.name.removesuffix(".jsonl.gz") for size, path in own.items()}
    found = {size: name for size, name in names.items() if exists(name)}
    return {size: Measured(found[size]) for size in sorted(found, key=_parameters, reverse=True)}


def _speed_records() -> list[Path]:
    return list((RESULTS / "records").glob("speed-*.jsonl.gz"))


def _parameters(size: str) -> float:
    """Millions of parameters of 1.5B or 135M."""
    return float(size[:-1]) * {"B": 1000, "M": 1}[size[-1]]


def name_of(method: str) -> str:
    """The name of a method in tables."""
    names = {
        PLAIN: "plain decoding",
        DEFAULT: "**the default**",
        FIXED: "four rows in every step",
        NO_TABLE: "the default, without a table",
        PAPERS: "the paper's (15, 5, 15)",
        "prompt-lookup": "prompt lookup",
        "hf-greedy": "transformers",
        "hf-compiled": "transformers, compiled",
        "hf-prompt-lookup": "transformers, prompt lookup",
        "openvino-greedy": "OpenVINO GenAI",
        "openvino-lookup": "OpenVINO GenAI, prompt lookup",
        "adaptive:head=auto": "with the light head",
    }
    if method in names:
        return names[method]
    if method.startswith("adaptive:table"):
        return "the default, after `lookahead learn`"
    head, _, rest = method.partition(":")
    file, _, mode = rest.partition(":")
    kind = [suffix[1:] for suffix in Path(file).suffixes[-2:-1]]
    told = {LLAMA_SERVER: "llama.cpp"}.get(head, names.get(head, head))
    return ", ".join([told, *kind, *filter(None, mode.split(":", 1))])


# ---------------------------------------------------------------------- the pages


def speed_chart(chinese: bool = False) -> str:
    """Each model on each kind of text: plain decoding, the default, and llama.cpp's fastest."""
    groups = []
    for size, measured in shown_models().items():
        for kind, sets in KINDS.items():
            plain, own = measured.of(PLAIN, sets), measured.of(measured.default, sets)
            _, theirs = measured.best_of_llama_cpp(sets)
            told = "the default" if measured.default == DEFAULT else "the default, without a table"
            bars = [
                (name, x.total, f"{x.total:.2f} × ({x.rate:.0f})", shade)
                for name, x, shade in (
                    (told, own, "best"),
                    ("plain decoding", plain, "ours"),
                    ("llama.cpp at its best", theirs, "other"),
                )
            ]
            groups.append((f"{size}, {kind}", bars))
    first = next(iter(shown_models().values()))
    machine = ", ".join(facts_of(first.name)["where"].split(", ")[:4])
    drawn = chart.bars("Times plain decoding, and tokens per second", groups, machine)
    return in_chinese(drawn) if chinese else drawn


def in_chinese(text: str) -> str:
    for english, other in CHINESE.items():
        text = text.replace(english, other)
    return text


def speed_figures() -> dict[str, float]:
    """What the first sentence says of the largest model."""
    measured = next(iter(shown_models().values()))
    found = {}
    for kind, sets in KINDS.items():
        own, (_, theirs) = measured.of(measured.default, sets), measured.best_of_llama_cpp(sets)
        found[kind], found[f"{kind} llama.cpp"] = own.total, own.total / theirs.total
    return found


def speed() -> Answer:
    models = shown_models()
    first = next(iter(models.values()))
    found = speed_figures()
    told = "the default" if first.default == DEFAULT else "the default without a base table"
    parts = []
    for size, measured in models.items():
        rows = []
        for method in measured.methods:
            if method.startswith(("openvino", PAPERS)):
                continue  # in the table of all data sets
            cells = []
            for sets in KINDS.values():
                x = measured.of(method, sets)
                cells.append("–" if x.rate != x.rate else f"{x.rate:.0f}, {x.total:.2f} ×, S {x.s_steps:.2f}")
            x = measured.of(method)
            rows.append([name_of(method), *cells, f"{x.equal} of {x.compared}" if x.compared else "–"])
        table = markdown_table(["tokens/s, times plain, S", *KINDS, "equal"], rows)
        parts.append(f"## {size}: {measured.model}\n\n{where(measured.name)}:\n\n{table}")
    parts += [_all_sets("bench-packed"), _transformers()]
    return Answer(
        f"With {first.model}, {told} decodes **{found['prose']:.2f} times as fast as plain decoding on prose "
        f"and {found['code']:.2f} times on code**; that is {found['prose llama.cpp']:.2f} and "
        f"{found['code llama.cpp']:.2f} times the speed of llama.cpp with its fastest file and mode.",
        speed_chart(),
        "Speed of the default, of plain decoding and of llama.cpp, for each model, on prose and on code: "
        + "; ".join(
            f"{size} {kind} {m.of(m.default, sets).total:.2f} times plain"
            for size, m in models.items()
            for kind, sets in KINDS.items()
        ),
        parts,
        [
            "Tokens per second after the prefill, greedy, from an empty state; S is tokens per forward pass. "
            "Prose is MT-Bench in all of its categories; code is HumanEval and, where they were measured, MBPP and "
            "ClassEval. *Equal* counts completions that equal our plain decoding token for token.",
            "llama.cpp's server has one slot, no cache of prompts, and its defaults otherwise; with drafts, each "
            "completion has a new server. Its tokens and seconds are those that it reports. Other libraries round "
            "differently, so their completions are not compared.",
            "In each turn plain decoding comes first, and the other methods follow in an order that rotates from "
            "prompt to prompt. The host is shared and its speed drifts: compare speeds within a table.",
        ],
    )


def _all_sets(name: str) -> str:
    """The default model on all data sets beside other software, and how often drafting was slower."""
    measured, facts = Measured(name), facts_of(name)
    rows = []
    for method in measured.methods:
        x = measured.of(method)
        spread = f"{x.total_low:.2f}–{x.total_high:.2f}" if x.total_low == x.total_low else "–"
        rows.append(
            [
                name_of(method),
                f"{x.rate:.0f}",
                "1.00" if method == PLAIN else times(x),
                "–" if method == PLAIN else spread,
                f"{x.s_steps:.2f}",
                f"{x.equal} of {x.compared}" if x.compared else "–",
            ]
        )
    table = markdown_table(["", "tokens/s", "times plain (95 %)", "over runs", "S", "equal"], rows)
    own, plain = facts["overall"][DEFAULT], facts["overall"][PLAIN]
    free = next(x for x in facts["totals"] if "loop-free" in x["workload"] and x["method"] == DEFAULT)
    return (
        f"## Beside other software, on six data sets\n\n{measured.model}, {where(name)}; OpenVINO runs its own INT4 "
        f"of the same weights:\n\n{table}\n\n"
        f"- Slower sequences: {own['slower']} of {own['timed']} took more than 1.02 times as long as with plain "
        f"decoding, {own['much_slower']} more than 1.1 times, at worst {own['worst']:.2f}. Plain decoding's second "
        f"run against its first: {plain['slower']}, {plain['much_slower']}, {plain['worst']:.2f}.\n"
        f"- Small models repeat themselves, which favours drafts. In {free['workload']} sequences, S is "
        f"{free['all']['s_steps']:.2f} and the speed {free['all']['total']:.2f} times that of plain decoding."
    )


def _transformers() -> str:
    """bf16, compared with transformers."""
    measured = Measured("bench-bf16")
    rows = [
        [
            name_of(method),
            f"{x.rate:.0f}",
            f"{x.total:.2f}",
            f"{x.s_steps:.2f}",
            f"{x.equal} of {x.compared}" if x.compared else "–",
        ]
        for method in measured.methods
        for x in [measured.of(method)]
    ]
    return (
        f"## Beside transformers, in bf16\n\n{measured.model}, {where('bench-bf16')}:\n\n"
        + markdown_table(["", "tokens/s", "times plain", "S", "equal"], rows)
        + "\n\nIn bf16, transformers rounds differently from the compiled CPU path; in float32 all would be equal "
        "([exactness](../exactness.md))."
    )


def row_cost() -> Answer:
    lines = {line["type"]: line for line in facts_of("packed-step")["figures"]}
    shown = {"1B": "1B, Q4_0", "own": "135M, Q4_1"}
    names = {"ours": "this library", "llama.cpp": "llama.cpp"}
    series = {
        f"{told}, {name}": {int(k): t[by] / line["t"]["1"][by] for k, t in line["t"].items() if int(k) <= 16}
        for kind, told in shown.items()
        for line in [lines[kind]]
        for by, name in names.items()
    }
    columns = ("1", "2", "4", "8", "16", "64")
    rows = [
        [
            kind if kind == "1B" else f"135M, {'Q4_1' if kind == 'own' else kind}",
            *(f"{line['t'][k]['ours']:.1f} / {line['t'][k]['llama.cpp']:.1f}" for k in columns),
        ]
        for kind, line in lines.items()
    ]
    large = lines["1B"]
    four = large["t"]["4"]["ours"] / large["t"]["1"]["ours"]
    rule = facts_of("rows")["figures"]
    ruled = [
        [
            f"{line['workload']}, T = {line['temperature']:g}",
            f"{line['adaptive']:.2f}",
            f"{line['best_fixed']:.2f} ({line['best']})",
            f"{line['of_best']:.2f}",
            f"{line['slowest']:.2f}",
        ]
        for line in rule
        if line["workload"] == "all" or line["temperature"] == 0
    ]
    floor = large["t"]["1"]["ours"] / large["floor"]
    return Answer(
        f"With a 1B model, a step of four rows takes {four:.2f} times as long as a step of one row, and a step of 16 "
        f"rows {large['t']['16']['ours'] / large['t']['1']['ours']:.1f} times; the default drafts as many rows as "
        "this price allows.",
        chart.lines(
            "The time of a step by its rows",
            "rows of a step",
            "times a step of one row",
            series,
            where("packed-step"),
        ),
        "Time of a step relative to one row: "
        + "; ".join(f"{name} {y[4]:.1f} at 4 rows, {y[16]:.1f} at 16" for name, y in series.items()),
        [
            "## Milliseconds of a step\n\nThis library / llama.cpp, by rows:\n\n"
            + markdown_table(["ms", *columns], rows)
            + f"\n\nThe 1B model has random weights in the shape of Llama 3.2 1B. Its step of one row "
            f"takes {floor:.2f} "
            f"times as long as reading the weights from memory (llama.cpp: "
            f"{large['t']['1']['llama.cpp'] / large['floor']:.2f}), so it cannot become much faster. A prompt of 512 "
            f"tokens takes {large['prompt']['ours']:.0f} ms (llama.cpp: {large['prompt']['llama.cpp']:.0f}).",
            "## Does the rule choose well?\n\nTimes plain decoding, over all sequences of a data set. The best fixed "
            "number of rows is chosen afterwards for each line, which no drafter can do:\n\n"
            + markdown_table(["", "the default", "best fixed", "ratio", "slowest sequence"], ruled)
            + f"\n\nThe slowest sequence of plain decoding's own second run was at {rule[0]['again_slowest']:.2f}.",
        ],
        [
            "t(k) is the time of a forward pass over k rows (token positions) of one sequence; medians. llama.cpp "
            "evaluates the same trees through this library's engine for it, so its t(1) includes some Python. "
            "`lookahead bench step-cost MODEL` measures t(k) on your machine.",
        ],
    )


def same_text() -> Answer:
    lines = [line for line in facts_of("exact")["figures"] if "texts" in line and "cost" not in line]
    rates = [line for line in facts_of("exact")["figures"] if "cost" in line]
    groups = [
        (
            f"temperature {temperature:g}",
            [
                (
                    "`exact=True`".strip("`") if line["exact"] else "ordinary bf16",
                    line["differ"],
                    f"{line['differ']} of {line['texts'][1] - line['texts'][0]}",
                    "best" if line["exact"] else "other",
                )
                for line in _by_mode(lines, temperature)
            ],
        )
        for temperature in sorted({line["temperature"] for line in lines})
    ]
    rows, equal, compared = [], 0, 0
    for path in sorted((RESULTS / "records").glob("*.jsonl.gz")):
        _, records = committed.read(path)
        own = [
            x
            for x in records
            if x.get("equal") is not None
            and x.get("method", PLAIN) != PLAIN
            and not str(x["method"]).startswith("hf")
        ]
        if own:
            same = sum(x["equal"] for x in own)
            rows.append(
                [path.name.partition(".")[0], own[0]["dtype"], own[0]["path"], f"{same} of {len(own)}"]
            )
            if own[0]["path"] == "cpu":
                equal, compared = equal + same, compared + len(own)
    slow = [
        [f"{line['cost']}, {line['dtype']}", f"{line['rates']['ordinary plain']:.1f}"]
        + [f"{line['rates'][f'exact {method}']:.1f}" for method in ("plain", "adaptive")]
        for line in rates
    ]
    tests = [
        [line["drafter"], f"{sum(line['passed'])} of {len(line['passed'])}", "yes" if line["equal"] else "no"]
        for line in facts_of("pass-rate")["figures"]
    ]
    return Answer(
        f"On the compiled CPU path, no: **{equal:,} of {compared:,} drafted completions** in the committed records "
        "equal plain decoding token for token. With transformers in bf16, rounding changes some, and `exact=True` "
        "none.",
        chart.bars("Completions that drafting changed, transformers in bf16", groups, where("exact")),
        "Completions that differ from plain decoding: "
        + "; ".join(
            f"{heading} {', '.join(f'{bar[0]} {bar[2]}' for bar in bars)}" for heading, bars in groups
        ),
        [
            "## Every record\n\nDrafted completions that equal plain decoding, greedy or with the same seed:\n\n"
            + markdown_table(["records", "weights", "path", "equal"], rows, texts=3),
            "## What exact mode costs\n\nTokens per second with transformers, where `exact=True` "
            "evaluates every step "
            "with one fixed shape. It is for comparing outputs, not for speed; the compiled CPU path does not need "
            "it:\n\n" + markdown_table(["", "plain", "exact, plain", "exact, drafted"], slow),
            "## Does the model still pass its tests?\n\nHumanEval, 164 functions:\n\n"
            + markdown_table(["drafter", "passed", "every completion equal"], tests, texts=1),
        ],
        [
            "*Equal* compares all token ids. Paths and their guarantees are on the page of "
            "[exactness](../exactness.md); `lookahead verify MODEL` and `lookahead verify --url` "
            "check your own model "
            "or server.",
        ],
    )


def _by_mode(lines: Sequence[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """One line for each mode: the texts that differ, added up over several runs."""
    merged: dict[bool, dict[str, Any]] = {}
    for line in lines:
        if line["temperature"] == temperature:
            first = merged.setdefault(line["exact"], line | {"differ": 0, "texts": [0, 0]})
            first["differ"] += line["differ"]
            first["texts"] = [0, first["texts"][1] + line["texts"][1] - line["texts"][0]]
    return [merged[exact] for exact in (True, False) if exact in merged]


def s_by_rows() -> Answer:
    lines = facts_of("trained")["figures"]
    methods = list(dict.fromkeys(line["method"] for line in lines))
    counts = sorted({line["rows"] for line in lines})
    found = {(line["workload"], line["method"], line["rows"]): line for line in lines}
    names = {
        method: ABOUT[method][0]
        .replace("adaptive, `head=auto`", "with the light head")
        .replace("adaptive, ", "")
        for method in methods
    }

    def table(kind: str, key: str) -> str:
        rows = [
            [
                names[method],
                *(
                    f"{found[kind, method, k][key]:.2f}" if (kind, method, k) in found else "–"
                    for k in counts
                ),
            ]
            for method in methods
        ]
        return markdown_table([kind, *(f"{k} rows" for k in counts)], rows)

    series = {
        names[method]: {k: found["prose", method, k]["s"] for k in counts if ("prose", method, k) in found}
        for method in methods
        if method != DRAFT_MODEL
    }
    chosen = {name: series[name] for name in sorted(series, key=lambda name: -max(series[name].values()))[:6]}
    own = {kind: found[kind, DEFAULT, 64]["s"] for kind in KINDS}
    return Answer(
        f"On prose, S grows from {found['prose', DEFAULT, 4]['s']:.2f} with four rows to "
        f"{own['prose']:.2f} with 64, on "
        f"code from {found['code', DEFAULT, 4]['s']:.2f} to {own['code']:.2f}, so where rows are "
        f"nearly free, as on a "
        "GPU, the same drafter is worth about twice as much.",
        chart.lines(
            "S by the rows of a step, prose", "rows of a step", "S, tokens per step", chosen, where("trained")
        ),
        "S on prose: "
        + "; ".join(f"{name} {min(y.values()):.2f} to {max(y.values()):.2f}" for name, y in chosen.items()),
        [
            "## S at equal numbers of rows\n\n" + table("prose", "s") + "\n\n" + table("code", "s"),
            "## Times plain decoding, on two CPU cores\n\nHere rows cost compute, so more rows soon cost more than "
            "they bring:\n\n" + table("prose", "speed"),
        ],
        [
            "The light head, the static tree, the EAGLE-style layer and Medusa-1 are trained, on half a million to a "
            "million tokens of the model's own output; the others are not. All draft in this library's loop, and all "
            "completions equal plain decoding. They are too few for intervals: small differences are noise. "
            "`python -m benchmarks.trained` prints what each reads and how long it was trained; the "
            "published figures "
            "of EAGLE and Medusa are of 7B models with far more training.",
        ],
    )


def paper() -> Answer:
    ours = {line["method"]: line["all"] for line in facts_of("ablation")["figures"]}
    rows, groups = [], []
    for number, (name, prompt, method, theirs) in enumerate(ablation.TABLE_3, 1):
        x = ours[method]
        rows.append(
            [
                str(number),
                name,
                prompt,
                f"{x['s_steps']:.2f}",
                f"{theirs:.2f}",
                f"{x['total']:.2f}",
                f"{x['equal']} of {x['compared']}",
            ]
        )
        label = f"{name}{' + prompt' if prompt == 'yes' and name[0] == '(' else ''}"
        groups.append(
            (
                "",
                [
                    (label, x["s_steps"], f"{x['s_steps']:.2f}", "best"),
                    ("paper", theirs, f"{theirs:.2f}", "other"),
                ],
            )
        )
    last = ours[PAPERS]["s_steps"]
    table_3 = markdown_table(
        ["row", "(N, W, G)", "prompt as reference", "S", "paper's S", "times plain", "equal"], rows, texts=3
    )
    tables = [f"## Table 3: what the window and the candidates add\n\n{table_3}"]
    tables += [_law(), _figure_5(), _table_2(), _figure_6(), _within(), _appendix_e()]
    return Answer(
        f"S is reproduced: with the paper's best setting, (15, 5, 15) with the prompt as reference, it is {last:.2f} "
        f"(the paper: {ablation.TABLE_3[-1][3]:.2f}). The speed-up is not, because on a CPU each extra row costs "
        "compute.",
        chart.bars("Table 3: S by setting (N, W, G), ours and the paper's", groups, where("ablation")),
        "S of the nine rows, with the paper's: "
        + ", ".join(f"{ours[m]['s_steps']:.2f} ({p:.2f})" for _, _, m, p in ablation.TABLE_3),
        tables,
        [
            "W is the window's columns, N the tokens of an n-gram, G the candidates of a step, S the tokens per step "
            "with the bonus token. The model is SmolLM2-135M-Instruct; the paper runs LLaMA-2 and "
            "CodeLlama models of "
            "7 to 70 billion parameters in float16 on A100 and RTX 3090 cards, where rows are almost free.",
            "Our steps keep the bonus token of a fully accepted candidate, which the authors' code "
            "drops. Small models "
            "repeat themselves, which favours n-grams.",
            "`python -m benchmarks.paper NAME --page` prints every column of a study with its intervals and the "
            "differences from the paper, from the committed records; NAME is `ablation`, `scaling-law`, "
            "`sampling-quality`, `end-to-end`, `parallel` or `attention`.",
        ],
    )


def _law() -> str:
    found = {line["method"]: line["all"] for line in facts_of("scaling-law")["figures"]}
    s = {size: found[name]["s_steps"] for size, name in scaling_law.methods().items()}
    law = scaling_law.fit([(w, n, value) for (w, n), value in s.items()])
    rows = [[f"N = {n}", *(f"{s[w, n]:.2f}" for w in scaling_law.WINDOWS)] for n in scaling_law.NGRAMS]
    paper = scaling_law.PAPER
    by_law = [f"{scaling_law.compression_ratio(paper.alpha, paper.f, 4, w):.2f}" for w in scaling_law.WINDOWS]
    cost = [f"{found[scaling_law.methods()[w, 5]]['rows']:.0f}" for w in scaling_law.WINDOWS]
    rows += [["equation 7, the paper's, N = 5", *by_law], ["rows of a step, N = 5", *cost]]
    table = markdown_table(["S", *(f"W = G = {w}" for w in scaling_law.WINDOWS)], rows)
    return (
        f"## Figures 4 and 8: S by the window\n\n{table}\n\nEquation 7 fitted to these S: alpha = {law.alpha:.3f}, "
        f"f = {law.f:.2f}, R2 = {law.r2:.2f} (the paper: {paper.alpha} and {paper.f}). The n-grams come from the "
        "window alone."
    )


def _figure_5() -> str:
    lines = [x for x in facts_of("end-to-end")["figures"] if x["method"] in (PAPERS, DEFAULT)]
    found = {(x["workload"], x["method"]): x["all"] for x in lines}
    rows = []
    for name in dict.fromkeys(workload for workload, _ in found):
        own, default = found[name, PAPERS], found[name, DEFAULT]
        theirs = end_to_end.FIGURE_5.get(name)
        rows.append(
            [
                name.replace("_", " "),
                f"{own['s_steps']:.2f}",
                f"{own['total']:.2f}",
                f"{theirs[0]:.2f} to {theirs[1]:.2f}" if theirs else "–",
                f"{default['s_steps']:.2f}",
                f"{default['total']:.2f}",
            ]
        )
    head = ["", "S, (15, 5, 15)", "times plain", "the paper's", "S, the default", "times plain"]
    return (
        f"## Figure 5: end to end\n\n{markdown_table(head, rows)}\n\nThe paper's are the smallest and the largest "
        "among its model sizes. The default chooses its rows by their price, (15, 5, 15) does not."
    )


def _table_2() -> str:
    found = facts_of("sampling-quality")["figures"]
    rows = [
        [
            f"{x['temperature']:g}",
            name_of(x["method"]),
            *(f"{100 * x[kind]:.1f}" for kind in ("rouge1", "rouge2", "rougeL")),
            f"{x['S']:.2f}",
            f"{x['equal']} of {x['compared']}",
        ]
        for x in found["texts"]
    ]
    head = ["temperature", "method", "ROUGE-1", "ROUGE-2", "ROUGE-L", "S", "equal, same seed"]
    return (
        f"## Table 2: sampling\n\n{markdown_table(head, rows, texts=2)}\n\nEvery completion is the one of plain "
        "decoding with the same seed, so every score is too; the paper compares scores alone (S 1.72 at temperature "
        "0, 1.64 at 1)."
    )


def _figure_6() -> str:
    lines = facts_of("parallel")["figures"]
    rows = [
        [x["workload"], str(x["ranks"]), f"{x['s']:.2f}", f"{x['fixed_widest']:.1f}", f"{x['fixed']:.2f}"]
        for x in lines
    ]
    head = ["", "ranks", "S, window grown", "rows of the widest rank, (15, 5, 15)", "times plain, modelled"]
    return (
        f"## Figures 6 and 7: several processes\n\n{markdown_table(head, rows)}\n\nS and rows are "
        f"measured; the speed "
        "is modelled from this machine's t(k) and the time of an exchange. A larger window hardly raises S here, so "
        "ranks help only by sharing the rows. The paper reports 1.8 on MT-Bench and 2.7 to 2.8 on "
        "code with one A100, "
        "and 3.9 to 4.0 on code with eight."
    )


def _within() -> str:
    pools = facts_of("dynamics")["figures"]["pool"]
    rows = [
        [
            name,
            f"{fmean(x['hit_rate'] for x in texts):.2f}",
            f"{fmean(x['match_length'] for x in texts):.2f}",
            f"{median(x['sizes']['128'][1] for x in texts):.0f}",
        ]
        for name, texts in pools.items()
    ]
    head = ["", "steps with candidates", "right tokens of the best", "n-grams after 128 tokens"]
    return f"## The pool within a completion, (15, 5, 15)\n\n{markdown_table(head, rows)}"


def _appendix_e() -> str:
    found = [x for x in facts_of("attention")["figures"] if x["method"] != PLAIN]
    values = sorted({f"{x['all']['s_steps']:.2f}" for x in found if x["workload"] == "humaneval"})
    return (
        "## Appendix E: the attention kernel\n\nWith the kernel and with a mask, S is the same on every prompt "
        f"(HumanEval: {' and '.join(values)})."
    )


def start() -> Answer:
    found = facts_of("startup")["figures"]
    cells = startup.cells(found)
    columns = {
        what: head
        for what, (head, _) in startup.COLUMNS.items()
        if any(what in own for own in cells.values())
    }

    def name(key: str) -> str:
        program, _, file = key.partition(", ")
        return f"{'this library' if program == 'ours' else program}, {file or 'the default model'}"

    rows = [[name(key), *(own.get(what, "–") for what in columns)] for key, own in cells.items()]
    bars = [
        (
            "",
            [
                (
                    name(key).rpartition(", ")[2].replace("-Instruct", ""),
                    median(own["start"]),
                    f"{median(own['start']):.1f} s",
                    "best" if key.startswith("ours") else "other",
                )
                for key, own in found.items()
            ],
        )
    ]
    ours = found["ours"]
    return Answer(
        f"The default model emits its first token {median(ours['start']):.1f} s after the command, in "
        f"{median(ours['memory']):.0f} MB; a first use with empty caches takes {median(ours['first use']):.1f} s.",
        chart.bars("From the command to the end of a completion of one token", bars, where("startup")),
        "Seconds of a start: "
        + ", ".join(f"{name(key)} {median(own['start']):.1f}" for key, own in found.items()),
        ["## Start, memory and first use\n\n" + markdown_table(["", *columns.values()], rows)],
        [
            "Medians with their range. Start: a whole process that emits one token. Memory: the largest resident set "
            "while it emits 64 tokens, and the largest without the mapped weights, which the system can drop and "
            "processes share. First use: with empty caches, until the text is written. Eight at once: until eight "
            "processes that start together have each emitted one token. Where llama.cpp was measured "
            "too, it has rows "
            "of its own; it starts faster, and in less memory.",
        ],
    )


def clients() -> Answer:
    lines = facts_of("serve")["figures"]
    found = {(line["clients"], line["method"]): line for line in lines}
    counts = sorted({number for number, _ in found})
    names = {PLAIN: "plain decoding", DEFAULT: "the default", "llama.cpp's server": "llama.cpp's server"}
    series = {
        told: {k: found[k, method]["tokens_per_second"] for k in counts if (k, method) in found}
        for method, told in names.items()
    }
    rows = []
    for number in counts:
        cells = [str(number)]
        for method in names:
            x = found.get((number, method))
            cells.append(f"{x['tokens_per_second']:.0f}, {1000 * x['first_token_p50']:.0f} ms" if x else "–")
        rows.append(cells)
    batches = [
        [
            str(x["batch"]),
            f"{x['plain']:.0f}",
            f"{x['adaptive']:.0f}",
            f"{x['speedup']:.2f}",
            f"{x['S']:.2f}",
            f"{x['rows']:.1f}",
            f"{x['equal']} of {x['texts']}",
        ]
        for x in facts_of("batch-size")["figures"]
    ]
    most = counts[-1]
    gain = {
        k: found[k, DEFAULT]["tokens_per_second"] / found[k, PLAIN]["tokens_per_second"] for k in (1, most)
    }
    head = ["sequences", "plain, tokens/s", "the default", "times plain", "S", "rows each", "equal"]
    memory = facts_of("batch-size")["memory"]
    return Answer(
        f"On two cores, drafting gives one client {gain[1]:.2f} times the tokens per second of plain decoding, and "
        f"{most} clients {gain[most]:.2f} times: a batch fills the rows that drafts would use, so "
        f"drafting scales back.",
        chart.lines("Tokens per second of all clients", "clients", "tokens/s", series, where("serve")),
        "Tokens per second: "
        + "; ".join(
            f"{told} {', '.join(f'{y:.0f} with {x}' for x, y in each.items())}"
            for told, each in series.items()
        ),
        [
            "## The server under load\n\nTokens per second of all clients, and the median time to "
            "the first token:\n\n" + markdown_table(["clients", *names.values()], rows),
            "## A batch in one process\n\n"
            + markdown_table(head, batches)
            + f"\n\nAt the end of a sequence of {memory['tokens']} tokens, the default keeps "
            f"{memory['kept'][DEFAULT] / 1e6:.1f} MB beside the "
            f"{memory['cache per token'] * memory['tokens'] / 1e6:.0f} MB of the KV cache.",
        ],
        [
            "The default model in Q4_0; functions of Python's standard library, at most 64 new tokens, greedy. "
            "llama.cpp's server has as many slots as clients, no drafts and no cache of prompts. Every completion of "
            "ours equals plain decoding, or the run is rejected. In the batch, *times plain* is the "
            "median over paired "
            "runs, and a waiting text takes the place of one that ends.",
        ],
    )


def sources() -> Answer:
    credit = json.loads((DOCS / "images" / "adaptive-credit.json").read_text())
    lines = [x for x in credit["figures"] if x["method"] == "adaptive cold" and not x["temperature"]]
    kept = [name for name in lines[0]["credit"] if any(x["credit"][name] >= 0.015 for x in lines)]
    groups = [
        (x["workload"], [(name, x["credit"][name], f"{x['credit'][name]:.2f}", "best") for name in kept])
        for x in lines
    ]
    worth, equal = [], True
    for page, methods in WORTH.items():
        measured = Measured(page)
        for method, told in methods.items():
            row = [told]
            for sets in KINDS.values():
                x = measured.of(method, sets)
                row.append(f"{x.s_steps:.2f}, {times(x)}")
                equal &= x.equal == x.compared
            worth.append(row)
    table = Measured("bench-packed")
    tabled = [
        [name_of(method), f"{x.s_steps:.2f}", times(x)]
        for method in ("prompt-lookup", NO_TABLE, DEFAULT)
        for x in [table.of(method)]
    ]
    best, second, *_ = sorted(kept, key=lambda name: -sum(x["credit"][name] for x in lines))
    return Answer(
        f"`{best}` gives most accepted tokens, then `{second}`; without the base table the default is "
        f"{table.of(NO_TABLE).total:.2f} times as fast as plain decoding, with it "
        f"{table.of(DEFAULT).total:.2f} times.",
        chart.bars(
            "Accepted tokens per step, by source, at most 64 rows",
            groups,
            "{}, commit {}".format(*made(credit)),
        ),
        "Accepted tokens per step by source: "
        + "; ".join(
            f"{heading} {', '.join(f'{bar[0]} {bar[2]}' for bar in bars)}" for heading, bars in groups
        ),
        [
            "## The base table\n\nAll data sets, S and times plain decoding:\n\n"
            + markdown_table(["", "S", "times plain (95 %)"], tabled),
            *corpus_parts(),
            "## The light head, and sampling\n\nS, and times plain decoding with its interval over prompts:\n\n"
            + markdown_table(["", *KINDS], worth)
            + f"\n\n{'All' if equal else 'Not all'} completions equal those of plain decoding. The light head is the "
            "only part that is trained, and it is off by default.",
        ],
        [
            "What each source proposes is on the page of [the adaptive drafter](../adaptive.md). An accepted token "
            "counts for the source that proposed it first.",
        ],
    )


#: Measurements of the default, of the light head and of sampling -> their methods, with their names.
WORTH = {
    "bench-packed-head": {DEFAULT: "the default", "adaptive:head=auto": "with the light head"},
    "bench-packed-sampled": {DEFAULT: "the default at temperature 0.7"},
}
#: The measurement of tables from more and more text (``benchmarks.corpus.measure``), one JSON for each model.
CORPUS = "corpus-*"


def corpus_files() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob(f"{CORPUS}.json"))


def corpus_lines() -> list[dict[str, Any]]:
    return [line for name in corpus_files() for line in json.loads((RESULTS / f"{name}.json").read_text())]


def corpus_chart() -> str:
    """S by the tokens of the text that a table was counted in."""
    lines = corpus_lines()
    rows = min(line["rows"] for line in lines)
    series: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["rows"] == rows and line["tokens"]:
            name = f"{line['model'].removesuffix('.gguf')}, {line['kind']}"
            series.setdefault(name, {})[line["tokens"]] = line["s"]
    return chart.lines(
        f"S by the text of the table, {rows} rows", "tokens of text", "S, tokens per step", series
    )


def corpus_parts() -> list[str]:
    """S by the size of the corpus; nothing before it was measured."""
    lines = corpus_lines()
    if not lines:
        return []
    columns = list(dict.fromkeys((line["model"], line["kind"], line["rows"]) for line in lines))
    rows = []
    for model, kind, count in columns:
        own = [x for x in lines if (x["model"], x["kind"], x["rows"]) == (model, kind, count)]
        without = next((x["s"] for x in own if not x["tokens"]), None)
        each = ", ".join(f"{x['s']:.2f} ({x['tokens']:,})" for x in own if x["tokens"])
        name = f"{model.removesuffix('.gguf')}, {kind}, {count} rows"
        rows.append([name, "–" if without is None else f"{without:.2f}", each])
    return [
        "## How much text a table needs\n\nS without a table, and with tables from more and more text (tokens in "
        "brackets). The text is the included table's, drawn as chains of tokens and split by the model's own "
        "tokenizer; the model has never seen it:\n\n"
        "![S by the number of tokens in the table's text](corpus.svg)\n\n"
        + markdown_table(["", "no table", "S (tokens of text)"], rows, texts=3)
    ]


def weights() -> Answer:
    facts = facts_of("packed-accuracy")
    names = {
        "packed (ours)": "this library, packed",
        "llama.cpp": "llama.cpp",
        "decoded to bf16": "decoded to bf16",
    }
    lines = {names[name]: line for name, line in facts["figures"].items() if name in names}
    rows = [
        [
            name,
            f"{x['kl_mean']:.2e}".replace("e-0", "e-"),
            f"{x['kl_largest']:.3f}",
            f"{100 * x['top1']:.2f} %",
            f"{x['perplexity']:.3f}",
        ]
        for name, x in lines.items()
    ]
    whole = facts["figures"]["decoded to fp32"]
    bars = [
        (
            name,
            1 - x["top1"],
            f"{100 * (1 - x['top1']):.2f} %",
            "best" if "ours" in name or "this" in name else "other",
        )
        for name, x in lines.items()
    ]
    packed = lines["this library, packed"]
    return Answer(
        f"Packed weights choose the same next token as the same weights in fp32 at {100 * packed['top1']:.1f} % of "
        f"{facts['tokens']:,} positions, as llama.cpp does ({100 * lines['llama.cpp']['top1']:.1f} "
        f"%); the perplexity "
        f"is {packed['perplexity']:.2f} instead of {whole['perplexity']:.2f}.",
        chart.bars(
            "Positions whose likeliest token differs from fp32's", [("", bars)], where("packed-accuracy")
        ),
        "Share of positions whose likeliest token differs: "
        + ", ".join(f"{bar[0]} {bar[2]}" for bar in bars),
        [
            "## Beside the same weights in fp32\n\n"
            + markdown_table(["", "mean KL", "largest KL", "same likeliest token", "perplexity"], rows)
        ],
        [
            "The default model's file in Q4_1, on prompts and reference answers of HumanEval, GSM8K, MT-Bench and "
            "Spec-Bench. The weights are the same; what differs is that packed steps round the "
            "activations to 8 bits, "
            "here as in llama.cpp.",
        ],
    )


#: Methods of ``llamacpp_examples`` -> their names.
EXAMPLES = {
    "llama-server, none": "llama.cpp's server, plain",
    "llama-lookup": "llama.cpp's llama-lookup",
    "llama-lookahead": "llama.cpp's llama-lookahead, (15, 5, 15)",
    "ours, plain": "ours on its engine, plain",
    "ours, adaptive": "ours on its engine, the default",
    "ours, CPU path, plain": "ours on our CPU path, plain",
    "ours, CPU path, adaptive": "ours on our CPU path, the default",
}


def engines() -> Answer:
    sets = {
        name: {row[0]: row for row in rows} for name, rows in facts_of("llamacpp-examples")["figures"].items()
    }

    def rate(row: Sequence[str]) -> float:
        return float(row[3].split()[0])

    def mean(method: str) -> float:
        return len(sets) / sum(1 / rate(rows[method]) for rows in sets.values())

    modes = [name for name in next(iter(sets.values())) if name.startswith("llama-server, ngram")]
    best = max(modes, key=mean)
    shown = {**EXAMPLES, best: f"llama.cpp's server, {best.partition(', ')[2]}, its fastest mode"}
    order = sorted(shown, key=mean)
    rows = [[shown[x], *(f"{rows[x][2]}, {rate(rows[x]):.0f}" for rows in sets.values())] for x in order]
    bars = [
        (
            shown[x].partition(", its")[0],
            mean(x),
            f"{mean(x):.0f}",
            "best" if x.startswith("ours") else "other",
        )
        for x in reversed(order)
    ]
    gain = mean("ours, adaptive") / mean("ours, plain")
    vllm, table = _vllm()
    return Answer(
        f"On llama.cpp's engine the default reaches {gain:.2f} times our plain decoding there, "
        f"because its extra rows "
        f"cost more than ours; on vLLM's CPU backend {vllm:.2f} times. The compiled CPU path gives "
        f"most of the speed.",
        chart.bars(
            "Tokens per second on three data sets, 135M in Q4_0", [("", bars)], where("llamacpp-examples")
        ),
        "Tokens per second: " + ", ".join(f"{bar[0]} {bar[2]}" for bar in bars),
        [
            "## llama.cpp\n\nS, and tokens per second:\n\n" + markdown_table(["", *sets], rows),
            table,
            _openvino(),
        ],
        [
            "llama.cpp was built for this processor (Release, GGML_NATIVE) from the source in "
            "llama-cpp-python 0.3.36; "
            "`python -m benchmarks.llamacpp_examples` prints all nine modes of its server. vLLM 0.32.0 ran in eager "
            "mode without prefix caching, with at most five drafted tokens for every method; it recommends 16 or 32 "
            "for suffix decoding, which was not measured. OpenVINO GenAI was given two settings of prompt lookup and "
            "two precisions; its fastest are shown.",
        ],
    )


def _vllm() -> tuple[float, str]:
    """How much our drafting gains on vLLM with one client, and the section."""
    facts = facts_of("vllm")
    lines = {(line["method"], line["clients"]): line for line in facts["figures"]}
    counts = sorted({number for _, number in lines})
    methods = [name for name in dict.fromkeys(name for name, _ in lines) if name != "plain, a second run"]

    def rate(name: str, number: int) -> float:
        tokens, seconds = lines[name, number]["decoding"]
        return float(tokens / seconds)

    rows = [
        [
            name,
            *(
                f"{lines[name, k]['all']:.2f}, {rate(name, k):.0f}" if (name, k) in lines else "–"
                for k in counts
            ),
        ]
        for name in methods
    ]
    text = f"## vLLM\n\nS, and tokens per second of decoding steps ({where('vllm')}):\n\n" + markdown_table(
        ["", *(f"{k} client{'s' * (k > 1)}" for k in counts)], rows
    )
    if facts.get("chains"):
        text += (
            "\n\nvLLM verifies chains, not trees. The same prompts on this library's own engine show what that costs "
            "in S:\n\n" + markdown_table(["every step drafts", "S"], facts["chains"])
        )
    control = fmean(rate(name, 1) for name, number in lines if number == 1 and name.startswith("plain"))
    return rate("ours", 1) / control, text


def _openvino() -> str:
    measured = Measured("bench-openvino")
    own = {name: measured.of(name) for name in measured.methods}

    def fastest(begin: str) -> str:
        return max((name for name in own if name.startswith(begin)), key=lambda name: own[name].rate_all)

    methods = [PLAIN, fastest("openvino-greedy"), fastest("openvino-lookup")]
    rows = [[name_of(x), f"{own[x].rate:.0f}", f"{own[x].s_steps:.2f}"] for x in methods]
    return (
        f"## OpenVINO GenAI\n\nIts fastest of 4 and 8 bits ({where('bench-openvino')}):\n\n"
        + markdown_table(["", "tokens/s", "S"], rows)
    )


PAGES = {
    "speed": Page(
        "How fast is it on a 1.5B model, and on smaller ones?",
        speed,
        ("bench-packed", "bench-bf16"),
        lambda: [x.name for x in shown_models().values()],
    ),
    "row-cost": Page("What does a row cost?", row_cost, ("packed-step", "rows")),
    "same-text": Page("Does the text change?", same_text, ("exact", "pass-rate")),
    "s-by-rows": Page("How does S grow with rows, and with training?", s_by_rows, ("trained",)),
    "paper": Page(
        "Are the paper's results reproduced?",
        paper,
        ("ablation", "scaling-law", "end-to-end", "sampling-quality", "parallel", "dynamics", "attention"),
    ),
    "start": Page("How long does a start take, and how much memory?", start, ("startup",)),
    "clients": Page("What does a server with many clients gain?", clients, ("serve", "batch-size")),
    "sources": Page(
        "What does each source of guesses add?",
        sources,
        ("bench-packed", "bench-packed-head", "bench-packed-sampled"),
        corpus_files,
    ),
    "weights": Page("How accurate are packed weights?", weights, ("packed-accuracy",)),
    "engines": Page("What do other engines reach?", engines, ("llamacpp-examples", "vllm", "bench-openvino")),
}


# ---------------------------------------------------------------------- writing


def text_of(name: str, page: Page, answer: Answer) -> str:
    """A page in Markdown."""
    measured = []
    for source in dict.fromkeys([*page.more(), *page.shows]):
        facts = facts_of(source) if not source.startswith("corpus") else {}
        if not facts:
            measured.append(f"- `{source}.json`, made by `python -m benchmarks.corpus.measure`")
            continue
        kept = f"records/{source}.jsonl.gz" if exists(source) else f"{source}.json"
        about = facts["where"].replace(", torch", "; torch", 1)
        measured.append(f"- `{kept}`: {about}.\n\n  `{facts['command']}`")
    return (
        "\n\n".join(
            [
                f"# {page.question}",
                answer.sentence,
                f"![{answer.alt}]({name}.svg)",
                *answer.parts,
                "## How it was measured",
                *answer.notes,
                "Every figure is computed from these files in `docs/results`:",
                "\n".join(measured),
            ]
        )
        + "\n"
    )


def with_block(text: str, page: str, name: str, block: str) -> str:
    """The text of a page with new lines between <!-- measured: NAME --> and <!-- end -->.

    Raises:
        SystemExit: the page has no such block, or several.
    """
    pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}{block}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"error: {page} must have one block <!-- measured: {name} -->, found {count}")
    return text


def readme_blocks(chinese: bool = False) -> dict[str, str]:
    """The measured blocks of README.md or README.zh.md."""
    found, measured = speed_figures(), next(iter(shown_models().values()))
    machine, commit = made(facts_of(measured.name))
    told = "" if measured.default == DEFAULT else (", without a base table", "，没有基础表")[chinese]
    if chinese:
        first = (
            f"使用 {measured.model}{told}：**散文是普通解码的 {found['prose']:.1f} 倍，代码是 {found['code']:.1f} "
            f"倍，"
            f"在你自己的模型上从第一个 token 起**，相对 llama.cpp 最快时是 {found['prose llama.cpp']:.1f} 和 "
            f"{found['code llama.cpp']:.1f} 倍（{machine.replace(' cores', ' 核')}，commit {commit}，"
            "[全部模型和方法](docs/results/speed.md)）。"
        )
    else:
        first = (
            f"With {measured.model}{told}: **{found['prose']:.1f} times plain decoding on prose, "
            f"{found['code']:.1f} on "
            f"code, on your own model from the first token**, and {found['prose llama.cpp']:.1f} and "
            f"{found['code llama.cpp']:.1f} times llama.cpp at its best ({machine}, commit {commit}, "
            "[all models and methods](docs/results/speed.md))."
        )
    words = ("start", "memory", "first use") if not chinese else ("启动", "内存", "首次使用")
    cells = startup.cells(facts_of("startup")["figures"])
    lines = []
    for name, own in cells.items():
        program, _, file = name.partition(", ")
        label = f"{program}, " * (program != "ours") + (
            file or ("默认模型" if chinese else "the default model")
        )
        each = [
            f"{word} {own[what]}"
            for word, what in zip(words, ("start", "memory", "first use"), strict=True)
            if what in own
        ]
        lines.append(
            f"- **{label}**{'：' if chinese else ': '}{'，'.join(each) if chinese else ', '.join(each)}"
        )
    return {"speed": first, "behind": "\n".join(lines)}


def with_blocks(text: str, name: str) -> str:
    """A page with its measured blocks; only README has that of what is behind.

    Args:
        name: the page's path in the repository.
    """
    folder = {"docs/index.md": "results", "docs/zh/index.md": "../results"}.get(name, "docs/results")
    for block, lines in readme_blocks("zh" in name).items():
        if block == "speed" or name.startswith("README"):
            text = with_block(text, name, block, lines.replace("docs/results", folder))
    return text


def files() -> dict[Path, str]:
    """Every file that is made from the records, with its text."""
    made_here: dict[Path, str] = {}
    for name, page in PAGES.items():
        answer = page.answer()
        made_here[RESULTS / f"{name}.md"] = text_of(name, page, answer)
        made_here[RESULTS / f"{name}.svg"] = answer.svg
    made_here[RESULTS / "speed.zh.svg"] = speed_chart(chinese=True)
    if corpus_files():
        made_here[RESULTS / "corpus.svg"] = corpus_chart()
    for name in ("README.md", "README.zh.md", "docs/index.md", "docs/zh/index.md"):
        made_here[ROOT / name] = with_blocks((ROOT / name).read_text(encoding="utf-8"), name)
    for name, folder in (("lesson/7-table.md", ".."), ("zh/lesson/7-table.md", "../..")):
        picture = f"![S by the number of tokens in the table's text]({folder}/results/corpus.svg)"
        text = (DOCS / name).read_text(encoding="utf-8")
        made_here[DOCS / name] = with_block(text, name, "corpus", picture if corpus_files() else "")
    return made_here


def write() -> None:
    """Write all pages, charts and blocks."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")

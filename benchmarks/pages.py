"""The pages of docs/results, and the measured blocks of README and the home, from the records beside them.

``python -m benchmarks.results --readme`` writes them. The words of a page are in benchmarks/questions: a question, a
sentence, a chart, short tables. A function here gives the values for its {{placeholders}}; no figure is typed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import unescape
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from . import chart, kinds, startup
from .llamacpp_examples import SERVER
from .measured import (
    DEFAULT,
    DOCS,
    FIXED,
    KINDS,
    NO_TABLE,
    PAPERS,
    PLAIN,
    RESULTS,
    SIZE,
    STATES,
    Measured,
    corpus_lines,
    corpus_pages,
    equal,
    facts_of,
    figures_of,
    has_records,
    made,
    millions,
    name_of,
    shown_machine,
    shown_models,
    times,
    where,
)
from .paper import ablation, committed, end_to_end, scaling_law
from .report import markdown_table
from .text import largest_gap, runs, versions

ROOT = DOCS.parent
QUESTIONS = Path(__file__).parent / "questions"
#: English -> Chinese, in the chart of speeds.
CHINESE = {
    "Times plain decoding, and tokens per second": "相对普通解码的倍数，以及每秒 token 数",
    "llama.cpp at its best": "llama.cpp 最快时",
    "the default, without a table": "默认（无基础表）",
    "plain decoding": "普通解码",
    "the default": "默认",
    "S by the text of the table, 4 rows": "S 与表的文本量，4 行",
    "tokens of text": "文本的 token 数",
    "S, tokens per step": "S，每步 token 数",
    ", prose": "，散文",
    ", code": "，代码",
    " cores": " 核",
    " threads": " 线程",
}
#: Values of a page by placeholder; "svg" and "alt" are its chart and the words for it.
Values = dict[str, Any]


#: Spaces of a cell where a line must not break: between a number and its unit, and after S.
UNBROKEN = re.compile(r"(?<=\d) (?=[×%]|(?:ms|s|MB)\b)|(?<=\bS) (?=\d)")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table whose cells do not break between a number and its unit on a narrow screen."""
    return markdown_table(
        headings, [[UNBROKEN.sub("\N{NO-BREAK SPACE}", cell) for cell in row] for row in rows], texts
    )


def told(bars: Sequence[chart.Bar]) -> str:
    """Bars in words."""
    return ", ".join(f"{name} {end}" for name, _, end, _ in bars)


def elsewhere(name: str, first: str) -> str:
    """Words for a table of a measurement that is from another machine than the first one of its page."""
    is_same = made(facts_of(name))[0] == made(facts_of(first))[0]
    return "" if is_same else ", measured on a different machine than the tables above"


# ---------------------------------------------------------------------- the values of each page


def speed_chart() -> tuple[str, str]:
    """(the chart, what it shows): each model on each kind of text, the default, plain and llama.cpp's fastest."""
    groups = []
    models = shown_models()
    for size, own in models.items():
        for kind, sets in KINDS.items():
            three = (
                ("the default", own.of(DEFAULT, sets)),
                ("plain decoding", own.of(PLAIN, sets)),
                ("llama.cpp at its best", own.best_of_llama_cpp(sets)),
            )
            shades = ("best", "ours", "other")
            bars = [
                (name, x.total, f"{x.total:.2f} × ({x.rate:.0f})", shade)
                for (name, x), shade in zip(three, shades, strict=True)
            ]
            groups.append((f"{size}, {kind}", bars))
    machine = shown_machine(facts_of(next(iter(models.values())).name))
    drawn = chart.bars("Times plain decoding, and tokens per second", groups, machine)
    return drawn, "; ".join(f"{heading}: {told(bars)}" for heading, bars in groups)


def speed_figures() -> dict[str, float]:
    """What the first sentence says of the largest model."""
    own = next(iter(shown_models().values()))
    found = {}
    for kind, sets in KINDS.items():
        found[kind] = own.of(DEFAULT, sets).total
        found[f"{kind}_theirs"] = found[kind] / own.best_of_llama_cpp(sets).total
    return found


def states_table() -> str:
    """Times plain decoding by model, kind of text and table, with S of the same run, and llama.cpp's two best."""
    lines = []
    for size, own in shown_models().items():
        for kind, sets in KINDS.items():
            found = [own.of(method, sets) for method in STATES.values()]
            cells = [f"{x.total:.2f} ×, S {x.s_steps:.2f}" for x in found]
            theirs = [f"{own.best_of_llama_cpp(sets, drafts).total:.2f} ×" for drafts in (False, True)]
            lines.append([f"{size}, {kind}", *cells, ", ".join(theirs)])
    return table(["", *STATES, "llama.cpp: plain, n-grams"], lines)


def speed() -> Values:
    models, facts = shown_models(), facts_of("bench-packed")
    first, packed, bf16 = next(iter(models.values())), Measured("bench-packed"), Measured("bench-bf16")
    parts = []
    for size, own in models.items():
        rows = []
        for method in own.methods:
            cells = [
                f"{x.rate:.0f}, {x.total:.2f} ×, S {x.s_steps:.2f}" if x.rate == x.rate else "–"
                for sets in KINDS.values()
                for x in [own.of(method, sets)]
            ]
            if not method.startswith(("openvino", PAPERS)):  # in the table of all data sets
                rows.append([name_of(method), *cells, equal(own.of(method))])
        parts.append(
            f"## {size}: {own.model}\n\n" + table(["tokens/s, times plain, S", *KINDS, "equal"], rows)
        )
    all_sets = [
        [
            name_of(method),
            f"{x.rate:.0f}",
            times(x) if method != PLAIN else "1.00",
            f"{x.total_low:.2f}–{x.total_high:.2f}"
            if method != PLAIN and x.total_low == x.total_low
            else "–",
            f"{x.s_steps:.2f}",
            equal(x),
        ]
        for method in packed.methods
        for x in [packed.of(method)]
    ]
    beside = [
        [name_of(method), f"{x.rate:.0f}", f"{x.total:.2f}", f"{x.s_steps:.2f}", equal(x)]
        for method in bf16.methods
        for x in [bf16.of(method)]
    ]
    free = next(x for x in facts["totals"] if "loop-free" in x["workload"] and x["method"] == DEFAULT)
    own, plain = facts["overall"][DEFAULT], facts["overall"][PLAIN]
    svg, alt = speed_chart()
    return {
        "svg": svg,
        "alt": alt,
        "model": first.model,
        **{name: f"{value:.2f}" for name, value in speed_figures().items()},
        "states": states_table(),
        "models": "\n\n".join(parts),
        "default_model": packed.model + elsewhere("bench-packed", first.name),
        "all_sets": table(["", "tokens/s", "times plain (95 %)", "over runs", "S", "equal"], all_sets),
        **{name: own[name] for name in ("slower", "timed", "much_slower")},
        "worst": f"{own['worst']:.2f}",
        **{f"plain_{name}": plain[name] for name in ("slower", "much_slower")},
        "plain_worst": f"{plain['worst']:.2f}",
        "free": free["workload"],
        "free_s": f"{free['all']['s_steps']:.2f}",
        "free_times": f"{free['all']['total']:.2f}",
        "bf16_model": bf16.model + elsewhere("bench-bf16", first.name),
        "bf16": table(["", "tokens/s", "times plain", "S", "equal"], beside),
        **{
            key: re.findall(r"--limit (\d+)", facts_of(page)["command"])[0]
            for key, page in (
                ("prompts", first.name),
                ("packed_prompts", "bench-packed"),
                ("bf16_prompts", "bench-bf16"),
            )
        },
    }


def largest_of(kinds: Iterable[str]) -> str:
    """The largest model whose rows were measured, by its size; conversions of the default model have no size."""
    return max((kind for kind in kinds if kind[-1] in "BM" and kind[0].isdigit()), key=millions)


def row_cost() -> Values:
    lines = {line["type"]: line for line in figures_of("packed-step")}
    largest = largest_of(lines)
    names = {kind: f"{kind}, Q4_K_M" for kind in lines}
    names |= {"own": "135M, Q4_1", "Q4_0": "135M, Q4_0", "Q4_K_M": "135M, Q4_K_M"}
    by = {"ours": "this library", "llama.cpp": "llama.cpp"}
    series = {
        f"{names[kind]}, {program}": {
            int(k): t[key] / line["t"]["1"][key] for k, t in line["t"].items() if int(k) <= 16
        }
        for kind, line in lines.items()
        if kind in (largest, "own")
        for key, program in by.items()
    }
    columns = ("1", "2", "4", "8", "16", "64")
    steps = [
        [
            names[kind],
            *(" / ".join(f"{line['t'][k][key]:.1f}" for key in by) for k in columns),
        ]
        for kind, line in lines.items()
    ]
    rule = figures_of("rows")
    ruled = [
        [
            f"{x['workload']}, T = {x['temperature']:g}",
            f"{x['adaptive']:.2f}",
            f"{x['best_fixed']:.2f} ({x['best']})",
            f"{x['of_best']:.2f}",
            f"{x['slowest']:.2f}",
        ]
        for x in rule
        if x["workload"] == "all" or not x["temperature"]
    ]
    large = lines[largest]
    one = large["t"]["1"]
    return {
        "large": largest,
        "svg": chart.lines(
            "The time of a step by its rows",
            "rows of a step",
            "times a step of one row",
            series,
            where("packed-step"),
        ),
        "alt": "; ".join(f"{name} {y[4]:.1f} at 4 rows, {y[16]:.1f} at 16" for name, y in series.items()),
        "four": f"{large['t']['4']['ours'] / one['ours']:.2f}",
        "sixteen": f"{large['t']['16']['ours'] / one['ours']:.1f}",
        "steps": table(["ms", *columns], steps),
        "floor": f"{one['ours'] / large['floor']:.2f}",
        "floor_theirs": f"{one['llama.cpp'] / large['floor']:.2f}",
        "prompt": f"{large['prompt']['ours']:.0f}",
        "prompt_theirs": f"{large['prompt']['llama.cpp']:.0f}",
        "rule": table(["", "the default", "best fixed", "ratio", "slowest sequence"], ruled),
        "again": f"{rule[0]['again_slowest']:.2f}",
    }


def drafted(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Engine -> its completions that were drafted and compared with its own plain ones.

    The page of llama.cpp's programs has three engines: ours on llama.cpp, our CPU path, and llama.cpp's server.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        method = record.get("method", PLAIN)
        is_plain = method.startswith(PLAIN) or method.endswith((f", {PLAIN}", ", none"))
        if record.get("equal") is None or is_plain or method.startswith("hf"):
            continue
        engine = "cpu" if ", CPU path," in method else record["path"]
        engine = "llama.cpp's server" if method.startswith(SERVER) else engine
        found.setdefault(engine, []).append(record)
    return found


def same_text() -> Values:
    lines = figures_of("exact")
    texts = [line for line in lines if "cost" not in line]
    groups = []
    for temperature in sorted({line["temperature"] for line in texts}):
        bars = []
        for exact, shade in ((True, "best"), (False, "other")):
            own = [x for x in texts if x["temperature"] == temperature and x["exact"] == exact]
            differ, count = sum(x["differ"] for x in own), sum(x["texts"][1] - x["texts"][0] for x in own)
            name = "exact=True" if exact else "ordinary bf16"
            bars.append((name, differ, f"{differ} of {count}", shade))
        groups.append((f"temperature {temperature:g}", bars))
    rows, ours, on_llama_cpp = [], Counter[bool](), Counter[bool]()
    for path in sorted((RESULTS / "records").glob("*.jsonl.gz")):
        for engine, each in drafted(committed.read(path)[1]).items():
            equal = Counter(bool(x["equal"]) for x in each)
            rows.append(
                [
                    path.name.partition(".jsonl")[0],
                    each[0]["dtype"],
                    engine,
                    f"{equal[True]} of {equal.total()}",
                ]
            )
            if engine == "cpu":
                ours += equal
            elif engine == "llama.cpp":
                on_llama_cpp += equal
    cost = [
        [f"{x['cost']}, {x['dtype']}", f"{x['rates']['ordinary plain']:.1f}"]
        + [f"{x['rates'][f'exact {method}']:.1f}" for method in ("plain", "adaptive")]
        for x in lines
        if "cost" in x
    ]
    tests = [
        [x["drafter"], f"{sum(x['passed'])} of {len(x['passed'])}", "yes" if x["equal"] else "no"]
        for x in figures_of("pass-rate")
    ]
    return {
        "svg": chart.bars("Completions that drafting changed, bf16", groups, where("exact")),
        "alt": "; ".join(f"{heading}: {told(bars)}" for heading, bars in groups),
        "equal": f"{ours[True]:,}",
        "compared": f"{ours.total():,}",
        "changed": on_llama_cpp[False],
        "elsewhere": on_llama_cpp.total(),
        "records": table(["records", "weights", "path", "equal"], rows, texts=3),
        "cost": table(["", "plain", "exact, plain", "exact, drafted"], cost),
        "tests": table(["drafter", "passed", "every completion equal"], tests),
        "engines": engines_section(),
        "engines_origin": engines_origin(),
    }


#: The referee on several engines, which not everybody has; its section is left out before it was made.
REFEREE = "text"


def engines_section() -> str:
    """What the referee says of each engine; nothing before it was measured."""
    if not (RESULTS / f"{REFEREE}.json").is_file():
        return ""
    figures = figures_of(REFEREE)
    counts = [each["counts"] for lines in figures["lines"].values() for each in lines.values()]
    verdicts = ["equal", "rounding", "wrong"]
    verdicts += ["not judged"] if any(each.get("not judged") for each in counts) else []
    rows = [
        [
            f"{engine}; {compared}",
            *(str(each["counts"].get(verdict, 0)) for verdict in verdicts),
            largest_gap(each),
        ]
        for engine, lines in figures["lines"].items()
        for compared, each in lines.items()
    ]
    words = (QUESTIONS / "text.txt").read_text(encoding="utf-8")
    return words.replace("{{table}}", table(["", *verdicts, "largest gap"], rows)).strip()


def engines_origin() -> str:
    """The runs of the referee and the versions of the engines, for the end of the page."""
    if not (RESULTS / f"{REFEREE}.json").is_file():
        return ""
    figures = figures_of(REFEREE)
    return "\n".join([f"Runs of `{REFEREE}.json`, and versions:\n", *runs(figures), *versions(figures)])


def s_by_rows() -> Values:
    # S of the default on the models people run, by rows and by kind of text.
    models: dict[str, list[dict[str, Any]]] = {}
    for line in figures_of("kinds"):
        models.setdefault(size_of(line["model"]), []).append(line)

    def s(size: str, state: str, **wanted: Any) -> float:
        wanted |= {"state": state}
        return kinds.s_of([x for x in models[size] if wanted.items() <= x.items()])

    def cells(**wanted: Any) -> list[str]:
        """S of each model, without and with a table."""
        return [
            " / ".join(f"{s(size, state, **wanted):.2f}" for state in ("cold", "corpus")) for size in models
        ]

    series = {
        f"{size}, {name}": {k: s(size, state, rows=k) for k in kinds.ROWS}
        for size in models
        for state, name in (("corpus", "the default"), ("cold", "no table"))
    }
    # The default model's type is the one without a size.
    costs = {x["type"]: x["t"] for x in figures_of("packed-step")}
    costs = {size: costs.get(size, costs["own"]) for size in models}
    every = [
        [
            str(k),
            *cells(rows=k),
            *(f"{t[str(k)]['ours'] / t['1']['ours']:.2f}" if str(k) in t else "–" for t in costs.values()),
        ]
        for k in kinds.ROWS
    ]
    heads = [f"{size}: no table / default" for size in models]
    by_kind = [[kind, *cells(rows=4, kind=kind)] for kind in kinds.PROMPTS]
    # What four rows cost where speeds were measured.
    fixed = {size: own.of(FIXED) for size, own in shown_models().items() if FIXED in own.methods}
    four = ", ".join(f"{x.s_steps / x.total:.2f} ({size})" for size, x in fixed.items())
    largest = next(iter(models))
    at_four = {kind: s(largest, "corpus", rows=4, kind=kind) for kind in kinds.PROMPTS}
    low, high = min(at_four, key=at_four.__getitem__), max(at_four, key=at_four.__getitem__)
    line = models[largest][0]
    return {
        "svg": chart.lines(
            "S by the rows of a step, all kinds of text",
            "rows of a step",
            "S, tokens per step",
            series,
            where("kinds"),
        ),
        "alt": "; ".join(f"{name} {y[2]:.2f} to {y[kinds.ROWS[-1]]:.2f}" for name, y in series.items()),
        "largest": largest,
        "few": f"{s(largest, 'corpus', rows=2):.2f}",
        "most": str(kinds.ROWS[-1]),
        "many": f"{s(largest, 'corpus', rows=kinds.ROWS[-1]):.2f}",
        "low": f"{at_four[low]:.2f} ({low})",
        "high": f"{at_four[high]:.2f} ({high})",
        "all": table(["rows", *heads, *(f"c(k), {size}" for size in costs)], every),
        "four": f" On the machine of [the speeds](speed.md), four rows cost {four}, drafting included."
        if four
        else "",
        "by_kind": table(["4 rows", *heads], by_kind),
        "prompts": line["prompts"],
        "tokens": facts_of("kinds")["new_tokens"],
    }


def paper() -> Values:
    ours = {x["method"]: x["all"] for x in figures_of("ablation")}
    rows, bars = [], []
    for number, (name, prompt, method, theirs) in enumerate(ablation.TABLE_3, 1):
        x = ours[method]
        s = f"{x['s_steps']:.2f}"
        rows.append(
            [
                str(number),
                name.replace("autoregressive", "plain decoding"),
                prompt,
                s,
                f"{theirs:.2f}",
            ]
        )
        label = f"{name}{' + prompt' if prompt == 'yes' and name[0] == '(' else ''}"
        bars += [(label, x["s_steps"], s, "best"), ("paper", theirs, f"{theirs:.2f}", "other")]
    drafted = [x for method, x in ours.items() if method != PLAIN]
    equal_of = [sum(x[key] for x in drafted) for key in ("equal", "compared")]

    # Figures 4 and 8.
    found = {x["method"]: x["all"] for x in figures_of("scaling-law")}
    named, windows = scaling_law.methods(), scaling_law.WINDOWS
    fitted = scaling_law.fit([(w, n, found[name]["s_steps"]) for (w, n), name in named.items()])
    theirs = scaling_law.PAPER
    law = [
        [f"N = {n}", *(f"{found[named[w, n]]['s_steps']:.2f}" for w in windows)] for n in scaling_law.NGRAMS
    ]
    equation = [scaling_law.compression_ratio(theirs.alpha, theirs.f, 4, w) for w in windows]
    law.append(["equation 7, the paper's, N = 5", *(f"{s:.2f}" for s in equation)])
    law.append(["rows of a step, N = 5", *(f"{found[named[w, 5]]['rows']:.0f}" for w in windows)])

    # Figure 5.
    each = {(x["workload"], x["method"]): x["all"] for x in figures_of("end-to-end")}
    drafted_5 = [x for (_, method), x in each.items() if method != PLAIN]
    figure_5, gains = [], []
    for name in dict.fromkeys(workload for workload, _ in each):
        limits = end_to_end.FIGURE_5.get(name)
        both = [each[name, method] for method in (end_to_end.METHOD, end_to_end.DEFAULT)]
        cells = [f"{x['s_steps']:.2f}" for x in both]
        gains.append(both[1]["s_steps"] / both[0]["s_steps"])
        theirs_5 = "{:.2f}–{:.2f} ×".format(*limits) if limits else "–"
        figure_5.append([name.replace("_", " "), *cells, theirs_5])

    # Table 2, figures 6 and 7, the pool, appendix E.
    table_2 = [
        [
            f"{x['temperature']:g}",
            name_of(x["method"]),
            ", ".join(f"{100 * x[kind]:.1f}" for kind in ("rouge1", "rouge2", "rougeL")),
            f"{x['S']:.2f}",
            f"{x['equal']} of {x['compared']}",
        ]
        for x in figures_of("sampling-quality")["texts"]
    ]
    figure_6 = [
        [x["workload"], str(x["ranks"]), f"{x['s']:.2f}", f"{x['widest']:.1f}", f"{x['fixed_widest']:.1f}"]
        for x in figures_of("parallel")
    ]
    pool = [
        [
            name,
            *(f"{fmean(x[key] for x in texts):.2f}" for key in ("hit_rate", "match_length")),
            f"{median(x['sizes']['128'][1] for x in texts):.0f}",
        ]
        for name, texts in figures_of("dynamics")["pool"].items()
    ]
    kernel, mask = (
        f"{x['all']['s_steps']:.2f}"
        for x in figures_of("attention")
        if x["workload"] == "humaneval" and x["method"] != PLAIN
    )
    return {
        "svg": chart.bars(
            "Table 3: S by setting (N, W, G), ours and the paper's", [("", bars)], where("ablation")
        ),
        "alt": told(bars),
        "last": f"{ours[PAPERS]['s_steps']:.2f}",
        "last_theirs": f"{ablation.TABLE_3[-1][3]:.2f}",
        "table_3": table(["row", "(N, W, G)", "prompt", "S", "paper"], rows, texts=3),
        "equal": "{} of {}".format(*equal_of),
        "law": table(["S", *(f"W = G = {w}" for w in windows)], law),
        "alpha": f"{fitted.alpha:.3f}",
        "f": f"{fitted.f:.2f}",
        "r2": f"{fitted.r2:.2f}",
        "gain_low": f"{min(gains):.1f}",
        "gain_high": f"{max(gains):.1f}",
        "equal_5": "{} of {}".format(*(sum(x[key] for x in drafted_5) for key in ("equal", "compared"))),
        "figure_5": table(["S", "(15, 5, 15)", "the default, 64 rows", "the paper's speed-up"], figure_5),
        "table_2": table(
            ["T", "method", "ROUGE-1, -2, -L", "S", "equal, same seed"],
            table_2,
            texts=2,
        ),
        "figure_6": table(
            ["", "ranks", "S, window grown", "its widest rank", "widest rank, (15, 5, 15)"], figure_6
        ),
        "pool": table(
            ["", "steps with candidates", "right tokens of the best", "n-grams after 128 tokens"], pool
        ),
        "kernel": kernel,
        "mask": mask,
    }


def startup_cells() -> dict[str, dict[str, str]]:
    """Medians with their range, which is left out where it rounds to the median."""
    return {
        name: {what: re.sub(r" \((\S+)–\1\)", "", cell) for what, cell in own.items()}
        for name, own in startup.cells(figures_of("startup")).items()
    }


def start() -> Values:
    found = figures_of("startup")
    cells = startup_cells()
    columns = {
        what: head
        for what, (head, _) in startup.COLUMNS.items()
        if any(what in own for own in cells.values())
    }
    names = {}
    for key in cells:
        program, _, file = key.partition(", ")
        program = "" if program == "ours" else f"{program}, "
        names[key] = program + (file or "the default model").replace("-Instruct.", ", ")
    bars = [
        (
            names[key],
            median(own["start"]),
            f"{median(own['start']):.1f} s",
            "best" if key.startswith("ours") else "other",
        )
        for key, own in found.items()
    ]
    largest = max(
        (key for key in found if key.startswith("ours, ")), key=lambda key: median(found[key]["memory"])
    )
    ours = {what: median(values) for what, values in found[largest].items()}
    theirs = {what: median(values) for what, values in found[largest.replace("ours", "llama.cpp", 1)].items()}
    small = {what: median(values) for what, values in found["ours"].items()}
    # llama.cpp caches nothing, so each of its uses is a first one.
    known = {
        key: own if key.startswith("ours") else {"first use": own["start"]} | own
        for key, own in cells.items()
    }
    rows = [[names[key], *(own.get(what, "–") for what in columns)] for key, own in known.items()]
    return {
        "svg": chart.bars("Start: until a completion of one token has ended", [("", bars)], where("startup")),
        "alt": told(bars),
        "model": names[largest].replace(", ", " (") + ")",
        "start": f"{ours['start']:.1f}",
        "first": f"{ours['first use']:.1f}",
        "memory": f"{ours['memory']:.0f}",
        "their_start": f"{theirs['start']:.1f}",
        "their_memory": f"{theirs['memory']:.0f}",
        "small_start": f"{small['start']:.1f}",
        "small_memory": f"{small['memory']:.0f}",
        "table": table(["", *columns.values()], rows),
    }


def clients() -> Values:
    found = {(x["clients"], x["method"]): x for x in figures_of("serve")}
    counts = sorted({number for number, _ in found})
    names = {PLAIN: "plain decoding", DEFAULT: "the default", "llama.cpp's server": "llama.cpp's server"}
    series = {
        name: {k: found[k, method]["tokens_per_second"] for k in counts if (k, method) in found}
        for method, name in names.items()
    }
    gain = {k: series["the default"][k] / series["plain decoding"][k] for k in counts}
    rows = [
        [str(k)]
        + [
            f"{found[k, x]['tokens_per_second']:.0f}, {1000 * found[k, x]['first_token_p50']:.0f} ms"
            if (k, x) in found
            else "–"
            for x in names
        ]
        + [f"{gain[k]:.2f}"]
        for k in counts
    ]
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
        for x in figures_of("batch-size")
    ]
    memory = facts_of("batch-size")["memory"]
    heads = ["at once", "plain", "the default", "times plain", "S", "rows", "equal"]
    return {
        "svg": chart.lines("Tokens per second of all clients", "clients", "tokens/s", series, where("serve")),
        "alt": "; ".join(
            f"{name}: {', '.join(f'{y:.0f} with {x}' for x, y in each.items())}"
            for name, each in series.items()
        ),
        "gains": ", ".join(f"{each:.2f} with {k}" for k, each in gain.items()),
        "table": table(["clients", *names.values(), "the default, times plain"], rows),
        "batches": table(heads, batches),
        "tokens": memory["tokens"],
        "kept": f"{memory['kept'][DEFAULT] / 1e6:.1f}",
        "cache": f"{memory['cache per token'] * memory['tokens'] / 1e6:.0f}",
    }


#: Measurements of the default, of the light head and of sampling -> their methods, with their names.
WORTH = {
    "bench-packed-head": {DEFAULT: "the default", "adaptive:head=auto": "with the light head"},
    "bench-packed-sampled": {DEFAULT: "the default at temperature 0.7"},
}


def sources() -> Values:
    credit = facts_of("adaptive-credit")
    lines = [x for x in credit["figures"] if x["method"] == "adaptive cold" and not x["temperature"]]
    summed = {name: sum(x["credit"][name] for x in lines) for name in lines[0]["credit"]}
    kept = [name for name in sorted(summed, key=lambda name: -summed[name]) if summed[name] >= 0.03]
    groups = [
        (x["workload"], [(name, x["credit"][name], f"{x['credit'][name]:.2f}", "best") for name in kept])
        for x in lines
    ]
    worth, all_equal = [], True
    for page, methods in WORTH.items():
        own = Measured(page)
        for method, name in methods.items():
            found = [own.of(method, sets) for sets in KINDS.values()]
            worth.append([name, *(f"{x.s_steps:.2f}, {times(x)}" for x in found)])
            all_equal &= all(x.equal == x.compared for x in found)
    packed = Measured("bench-packed")
    methods = {method: packed.of(method) for method in ("prompt-lookup", NO_TABLE, DEFAULT)}
    return {
        "svg": chart.bars(
            "Accepted tokens per step, by source, at most 64 rows",
            groups,
            where("adaptive-credit"),
        ),
        "alt": "; ".join(f"{heading}: {told(bars)}" for heading, bars in groups),
        "best": kept[0],
        "second": kept[1],
        "without": f"{methods[NO_TABLE].total:.2f}",
        "with": f"{methods[DEFAULT].total:.2f}",
        "table": table(
            ["", "S", "times plain (95 %)"],
            [[name_of(name), f"{x.s_steps:.2f}", times(x)] for name, x in methods.items()],
        ),
        "corpus": corpus_section(),
        "worth": table(["", *KINDS], worth),
        "equal": "All" if all_equal else "Not all",
    }


def corpus_chart() -> str:
    """S by the tokens of the text that a table was counted in, with the fewest rows that were measured."""
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


def size_of(model: str) -> str:
    """The size in a model's file name; the name, if it has none."""
    size = SIZE.search(model)
    return size[1] if size else model.removesuffix(".gguf")


def in_short(count: int) -> str:
    """A count for the head of a column, as 50k or 1M."""
    unit, name = (10**6, "M") if count >= 10**6 else (1000, "k")
    return f"{count / unit:g}{name}"


def by_model(counts: Mapping[str, int]) -> str:
    """Counts with the models that have them; a count of all models stands alone."""
    values = dict.fromkeys(counts.values())
    sizes = {n: ", ".join(size_of(model) for model, count in counts.items() if count == n) for n in values}
    return ", ".join(f"{n:,} ({sizes[n]})" if len(values) > 1 else f"{n:,}" for n in values)


def corpus_section() -> str:
    """S by the amount of text; nothing before it was measured."""
    lines = corpus_lines()
    if not lines:
        return ""
    # Columns are the amounts of text; the last one is all of it, which differs between tokenizers.
    models = dict.fromkeys(x["model"] for x in lines)
    most = {model: max(x["tokens"] for x in lines if x["model"] == model) for model in models}
    parts = sorted({x["tokens"] for x in lines if x["tokens"] < most[x["model"]]})
    found = {(x["model"], x["kind"], x["rows"], x["tokens"]): x["s"] for x in lines}
    rows = [
        [f"{size_of(key[0])}, {key[1]}, {key[2]} rows"]
        + [f"{found[*key, n]:.2f}" if (*key, n) in found else "–" for n in (*parts, most[key[0]])]
        for key in dict.fromkeys((x["model"], x["kind"], x["rows"]) for x in lines)
    ]
    values = {
        "table": table(["", *(in_short(n) if n else "no table" for n in parts), "all"], rows),
        "all": by_model(most),
        "prompts": by_model({x["model"]: x["prompts"] for x in lines}),
        # A line counts the tokens after the first one of each completion.
        "tokens": str(max(ceil(x["new"] / x["prompts"]) for x in lines) + 1),
    }
    words = (QUESTIONS / "corpus.txt").read_text(encoding="utf-8").strip()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], words)


def weights() -> Values:
    facts = facts_of("packed-accuracy")
    names = {
        "packed (ours)": "this library, packed",
        "llama.cpp": "llama.cpp",
        "decoded to bf16": "decoded to bf16",
    }
    lines = {name: line for name, line in facts["figures"].items() if name in names}
    rows = [
        [
            names[key],
            f"{x['kl_mean']:.2e}".replace("e-0", "e-"),
            f"{x['kl_largest']:.3f}",
            f"{100 * x['top1']:.2f} %",
            f"{x['perplexity']:.3f}",
        ]
        for key, x in lines.items()
    ]
    bars = [
        (names[key], 1 - x["top1"], f"{100 * (1 - x['top1']):.2f} %", "best" if "ours" in key else "other")
        for key, x in lines.items()
    ]
    ours = lines["packed (ours)"]
    return {
        "svg": chart.bars(
            "Positions with another likeliest token than fp32", [("", bars)], where("packed-accuracy")
        ),
        "alt": told(bars),
        "ours": f"{100 * ours['top1']:.1f}",
        "theirs": f"{100 * lines['llama.cpp']['top1']:.1f}",
        "positions": f"{facts['tokens']:,}",
        "perplexity": f"{ours['perplexity']:.2f}",
        "whole": f"{facts['figures']['decoded to fp32']['perplexity']:.2f}",
        "table": table(["", "mean KL", "largest KL", "same likeliest token", "perplexity"], rows),
    }


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


def engines() -> Values:
    # llama.cpp: (S, tokens/s) by method and data set.
    sets = {
        name: {row[0]: (row[2], float(row[3].split()[0])) for row in rows}
        for name, rows in figures_of("llamacpp-examples").items()
    }

    def mean(method: str) -> float:
        return len(sets) / sum(1 / rows[method][1] for rows in sets.values())

    modes = [name for name in next(iter(sets.values())) if name.startswith("llama-server, ngram")]
    best = max(modes, key=mean)
    shown = {**EXAMPLES, best: f"llama.cpp's server, {best.partition(', ')[2]}"}
    order = sorted(shown, key=mean, reverse=True)
    bars = [(shown[x], mean(x), f"{mean(x):.0f}", "best" if x[:4] == "ours" else "other") for x in order]
    rows = [[shown[x], *(f"{own[x][0]}, {own[x][1]:.0f}" for own in sets.values())] for x in order]

    # vLLM: tokens/s of decoding steps by method and number of clients.
    facts = facts_of("vllm")
    lines = {(x["method"], x["clients"]): x for x in facts["figures"]}
    counts = sorted({number for _, number in lines})
    rates = {run: x["decoding"][0] / x["decoding"][1] for run, x in lines.items()}
    cells = [
        [name]
        + [
            f"{lines[name, k]['all']:.2f}, {rates[name, k]:.0f}" if (name, k) in lines else "–"
            for k in counts
        ]
        for name in dict.fromkeys(name for name, _ in lines)
        if name != "plain, a second run"
    ]
    control = fmean(rate for (name, k), rate in rates.items() if k == 1 and name.startswith("plain"))

    # OpenVINO GenAI.
    other = Measured("bench-openvino")
    methods = [PLAIN, *(other.fastest(f"openvino-{kind}") for kind in ("greedy", "lookup"))]
    fastest = [[name_of(x), f"{other.of(x).rate:.0f}", f"{other.of(x).s_steps:.2f}"] for x in methods]
    return {
        "svg": chart.bars(
            "Tokens per second on three data sets, 135M in Q4_0", [("", bars)], where("llamacpp-examples")
        ),
        "alt": told(bars),
        "gain": f"{mean('ours, adaptive') / mean('ours, plain'):.2f}",
        "gain_vllm": f"{rates['ours', 1] / control:.2f}",
        "llama_cpp": table(["", *sets], rows),
        "where_vllm": elsewhere("vllm", "llamacpp-examples"),
        "vllm": table(["", *(f"{k} client{'s' * (k > 1)}" for k in counts)], cells),
        "chains": table(["every step drafts", "S"], facts["chains"]),
        "where_openvino": elsewhere("bench-openvino", "llamacpp-examples"),
        "openvino": table(["", "tokens/s", "S"], fastest),
    }


#: Page -> the function of its values, and the measurements that it shows.
PAGES: dict[str, tuple[Callable[[], Values], tuple[str, ...]]] = {
    "speed": (speed, ("bench-packed", "bench-bf16")),
    "row-cost": (row_cost, ("packed-step", "rows")),
    "same-text": (same_text, ("exact", "pass-rate")),
    "s-by-rows": (s_by_rows, ("kinds",)),
    "paper": (
        paper,
        ("ablation", "scaling-law", "end-to-end", "sampling-quality", "parallel", "dynamics", "attention"),
    ),
    "start": (start, ("startup",)),
    "clients": (clients, ("serve", "batch-size")),
    "sources": (sources, ("adaptive-credit", "bench-packed", *WORTH)),
    "weights": (weights, ("packed-accuracy",)),
    "engines": (engines, ("llamacpp-examples", "vllm", "bench-openvino")),
}


# ---------------------------------------------------------------------- writing


def shown_on(name: str) -> list[str]:
    """The measurements that a page shows."""
    more = [own.name for own in shown_models().values()] if name == "speed" else []
    if name == "sources":
        more = corpus_pages()
    if name == "same-text" and (RESULTS / f"{REFEREE}.json").is_file():
        more = [REFEREE]
    return list(dict.fromkeys([*more, *PAGES[name][1]]))


def origin(measurement: str) -> str:
    """Where a measurement is, the machine and the command."""
    facts = facts_of(measurement)
    kept = f"records/{measurement}.jsonl.gz" if has_records(measurement) else f"{measurement}.json"
    return f"- `{kept}`: {facts['where'].replace(', torch', '; torch', 1)}.\n\n    `{facts['command']}`"


def page_of(name: str) -> tuple[str, str]:
    """(a page in Markdown, its chart)."""
    make, _ = PAGES[name]
    values = make()
    svg, alt = values.pop("svg"), values.pop("alt")
    title = re.search(r"<title>(.*?)</title>", svg)
    values["chart"] = f"![{unescape(title[1]) if title else name}. {alt}]({name}.svg)"
    origins = "\n\n".join(map(origin, shown_on(name)))
    values["sources"] = f"Every figure is computed from these files in `docs/results`:\n\n{origins}"
    text = (QUESTIONS / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)
    return re.sub(r"\n{3,}", "\n\n", text), svg  # a section may be empty


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
    own = next(iter(shown_models().values()))
    machine, commit = shown_machine(facts_of(own.name)), made(facts_of(own.name))[1]
    prose, prose_theirs, code, code_theirs = (f"{value:.2f}" for value in speed_figures().values())
    prose_cold, code_cold = (f"{own.of(NO_TABLE, sets).total:.2f}" for sets in KINDS.values())
    if chinese:
        machine = machine.replace(" cores", " 核")
        first = (
            f"使用 {own.model}：**散文是普通解码的 {prose} 倍，代码是 {code} 倍**，"
            "无需训练（首次使用时，后台会统计一张模型常写内容的表），"
            f"相对 llama.cpp 最快时是 {prose_theirs} 和 {code_theirs} 倍（{machine}，commit {commit}，"
            f"[全部模型和方法](docs/results/speed.md)）。\n没有表时是 {prose_cold} 和 {code_cold} 倍。"
        )
        words, comma, default = ("启动", "内存", "首次使用"), "，", "默认模型"
    else:
        first = (
            f"With {own.model}: **{prose} times plain decoding on prose, {code} on code**, with nothing to train (a "
            f"table of what models write is counted in the background at the first use), and {prose_theirs} and "
            f"{code_theirs} times llama.cpp at its best ({machine}, commit {commit}, "
            "[all models and methods](docs/results/speed.md)).\n"
            f"Without a table, it is {prose_cold} and {code_cold} times plain decoding."
        )
        words, comma, default = ("start", "memory", "first use"), ", ", "the default model"
    lines = []
    for name, cells in startup_cells().items():
        program, _, file = name.partition(", ")
        each = zip(words, ("start", "memory", "first use"), strict=True)
        shown = comma.join(f"{word} {cells[what]}" for word, what in each if what in cells)
        label = ("" if program == "ours" else f"{program}{comma}") + (file or default)
        lines.append(f"- **{label}**{'：' if chinese else ': '}{shown}")
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


def in_chinese(text: str) -> str:
    for english, other in CHINESE.items():
        text = text.replace(english, other)
    return text


def files() -> dict[Path, str]:
    """Every file that is made from the records, with its text."""
    made_here: dict[Path, str] = {}
    for name in PAGES:
        made_here[RESULTS / f"{name}.md"], made_here[RESULTS / f"{name}.svg"] = page_of(name)
    made_here[RESULTS / "speed.zh.svg"] = in_chinese(made_here[RESULTS / "speed.svg"])
    if corpus_lines():
        made_here[RESULTS / "corpus.svg"] = corpus_chart()
        made_here[RESULTS / "corpus.zh.svg"] = in_chinese(made_here[RESULTS / "corpus.svg"])
    for name in ("README.md", "README.zh.md", "docs/index.md", "docs/zh/index.md"):
        made_here[ROOT / name] = with_blocks((ROOT / name).read_text(encoding="utf-8"), name)
    for name, picture in (
        ("lesson/7-table.md", "![S by the number of tokens in the table's text](../results/corpus.svg)"),
        ("zh/lesson/7-table.md", "![S 与表的文本量](../../results/corpus.zh.svg)"),
    ):
        text = (DOCS / name).read_text(encoding="utf-8")
        made_here[DOCS / name] = with_block(text, name, "corpus", picture if corpus_lines() else "")
    return made_here


def write() -> None:
    """Write all pages, charts and blocks."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")

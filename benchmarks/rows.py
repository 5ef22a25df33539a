"""The rule for the number of rows compared with plain decoding and fixed numbers of rows, sequence by sequence.

    python -m benchmarks.rows --data DIR --prompts 4
    python -m benchmarks.rows MODEL --dtype bfloat16 --data DIR --temperatures 0,0.7

All methods decode each prompt, in alternating order, and plain decoding twice, because its second run shows the
noise. Time is wall-clock time after the prefill; the fastest of ``--rounds`` counts. Prompts that the priors were
fitted to are excluded. Sequences in ``--records`` of this commit and these settings are not measured again, so the
same command continues after an interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.core import Drafter
from lookahead.drafters import Adaptive, Plain
from lookahead.records import RecordWriter, finite, read_records

from .datasets import load_workload
from .page import write_report
from .paper import committed
from .quiet import processor, require_quiet
from .report import command_line, markdown_table

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import fit_priors

WORKLOADS = ("humaneval", "gsm8k", "mbpp", "classeval", "mt-bench", "spec-bench")
FIXED = (2, 3, 4, 6, 8)
#: Fields that identify a sequence in the records.
KEYS = (
    "commit",
    "model",
    "dtype",
    "workload",
    "prompt",
    "temperature",
    "new_tokens",
    "longest",
    "rounds",
    "fixed",
)
#: Fields of a record that are the same for all of a page.
OPTIONS = ("new_tokens", "longest", "rounds", "fixed")
#: A sequence is slow if its speed is less than this share of plain decoding's.
SLOW = 0.95


def decode(llm: Any, prompt: Any, drafter: Drafter, temperature: float, seed: int, new_tokens: int) -> Any:
    """(seconds after the prefill, result) of one prompt."""
    sampling = {"temperature": temperature, "seed": seed} if temperature else {}
    first = 0.0
    last = 0.0
    result = None
    for update in llm.run([prompt], drafter=drafter, max_new_tokens=new_tokens, **sampling):
        last = perf_counter()
        first = first or last
        result = update.result or result
    return last - first, result


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each sequence."""
    # The methods, and the sequences that have been measured.
    llm = lookahead.load(args.model, dtype=args.dtype)
    methods: dict[str, Drafter] = {"plain": Plain(), "adaptive": Adaptive()}
    methods |= {f"{rows} rows": Adaptive(rows=rows) for rows in args.fixed} | {"again": Plain()}
    name = Path(llm.name).name if Path(llm.name).exists() else llm.name  # not this machine's folders
    about = {**environment(), "model": name, "path": llm.path, "dtype": llm.dtype}
    about |= {"new_tokens": args.new_tokens, "longest": args.longest, "rounds": args.rounds}
    about["fixed"] = ",".join(map(str, args.fixed))
    fitted = set(fit_priors.prompts(args.data, 60))
    lines = []
    records = read_records(args.records, "seconds", "rows")
    done = {tuple(line.get(key) for key in KEYS): line for line in records}

    # Measure the others, each with all methods in alternating order.
    require_quiet()
    llm.generate([{"role": "user", "content": "Hello"}], max_new_tokens=8)  # measures the cost curve
    for workload in args.workloads:
        candidates = load_workload(workload, 3 * args.prompts, data=args.data)
        held_out = [prompt for prompt in candidates if prompt.turns[0] not in fitted][: args.prompts]
        for number, prompt in enumerate(held_out):
            ids = prompt.tokens(llm.tokenizer)[-args.longest :]
            for temperature in args.temperatures:
                sequence = {**about, "workload": workload, "prompt": number, "temperature": temperature}
                known = done.get(tuple(sequence[key] for key in KEYS))
                if known is not None:
                    lines.append(known)
                    continue
                seconds = defaultdict(list)
                results = dict[str, Any]()
                for turn in range(args.rounds):
                    for name in list(methods)[:: -1 if turn % 2 else 1]:
                        spent, results[name] = decode(
                            llm, ids, methods[name], temperature, number, args.new_tokens
                        )
                        seconds[name].append(spent)
                plain = results["plain"].tokens
                line = {
                    **sequence,
                    "tokens": len(plain),
                    "equal": all(result.tokens == plain for result in results.values()),
                    "seconds": {name: min(some) for name, some in seconds.items()},
                    "steps": {name: result.stats.steps for name, result in results.items()},
                    "rows": {name: result.stats.rows for name, result in results.items()},
                }
                lines.append(line)
                speeds = {n: round(min(seconds["plain"]) / s, 2) for n, s in line["seconds"].items()}
                print(workload, number, f"T={temperature:g}", len(plain), line["equal"], speeds, flush=True)
                with RecordWriter(args.records, append=True) as writer:
                    writer.write(line)
    return lines


def to_commit(line: dict[str, Any]) -> dict[str, Any]:
    """A record with the fields of committed records."""
    kept = {name: value for name, value in line.items() if name not in ("tokens", *OPTIONS)}
    return kept | {"options": {name: line[name] for name in OPTIONS}}


def figures(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals by temperature and workload. Speeds are ratios to plain decoding's."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for workload in ("all", line["workload"]):
            groups[line["temperature"], workload].append(line)
    totals = []
    for (temperature, workload), some in sorted(groups.items()):
        total = {name: sum(line["seconds"][name] for line in some) for name in some[0]["seconds"]}
        best = min((name for name in total if name.endswith(" rows")), key=lambda name: total[name])
        speeds = {
            name: sorted(line["seconds"]["plain"] / line["seconds"][name] for line in some)
            for name in ("adaptive", "again")
        }
        totals.append(
            {
                "temperature": temperature,
                "workload": workload,
                "sequences": len(some),
                "equal": sum(line["equal"] for line in some),
                "adaptive": total["plain"] / total["adaptive"],
                "best": best,
                "best_fixed": total["plain"] / total[best],
                "of_best": total[best] / total["adaptive"],
                "slowest": speeds["adaptive"][0],
                "slow": sum(speed < SLOW for speed in speeds["adaptive"]),
                "again_slowest": speeds["again"][0],
                "again_slow": sum(speed < SLOW for speed in speeds["again"]),
            }
        )
    return totals


def body(lines: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[str]:
    """The page's text and table."""
    about = lines[0]["options"]
    heads = ["T", "workload", "sequences", "equal", "adaptive", "best fixed", "its rows", "adaptive / best"]
    heads += ["slowest sequence", f"under {SLOW}", "plain again: slowest", f"under {SLOW}"]
    rows = [
        [
            f"{x['temperature']:g}",
            x["workload"],
            str(x["sequences"]),
            str(x["equal"]),
            f"{x['adaptive']:.2f}",
            f"{x['best_fixed']:.2f}",
            x["best"].split()[0],
            f"{x['of_best']:.2f}",
            f"{x['slowest']:.2f}",
            str(x["slow"]),
            f"{x['again_slowest']:.2f}",
            str(x["again_slow"]),
        ]
        for x in groups
    ]
    return [
        f"Chat template, at most {about['new_tokens']} new tokens, no state kept; prompts that the priors were "
        f"fitted to are left out. Wall-clock time after the prefill, the fastest of {about['rounds']} rounds; all "
        "methods decode each prompt alternately. Speeds are ratios to plain decoding, whose second run shows the "
        f"noise; the best of {about['fixed'].replace(',', ', ')} rows is chosen afterwards for each line.",
        "",
        markdown_table(heads, rows, texts=2),
        "",
        f"{sum(line['equal'] for line in lines)} of {len(lines)} sequences equal plain decoding by all methods.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="default: the library's default model")
    add("--data", type=Path, required=True)
    add("--dtype", default="auto")
    add("--prompts", type=int, default=10, help="prompts of each workload")
    add("--fixed", type=lambda text: [int(k) for k in text.split(",")], default=list(FIXED), help="rows")
    add("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    add("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7])
    add("--new-tokens", type=int, default=128)
    add("--longest", type=int, default=1024, help="maximum tokens of a prompt; the last ones are kept")
    add("--rounds", type=int, default=2)
    add("--records", type=Path, default=Path("build/results/rows.jsonl"), help="JSON lines; appended to")
    add("--out", type=Path, default=Path("docs/results/rows"), help="figures, without suffix")
    args = parser.parse_args()
    args.records.parent.mkdir(parents=True, exist_ok=True)
    path = args.out.parent / "records" / f"{args.out.name}.jsonl.gz"
    head = {
        "command": command_line(sys.argv[1:], "python -m benchmarks.rows"),
        "processor": processor(),
    }
    committed.write(path, head, map(to_commit, measure(args)))
    _, lines = committed.read(path)
    groups = figures(lines)
    title = f"The rule for rows, sequence by sequence: {lines[-1]['dtype']}"
    write_report(args.out, title, lines[-1], finite(groups), body(lines, groups))


if __name__ == "__main__":
    main()

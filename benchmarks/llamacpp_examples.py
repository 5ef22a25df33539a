"""Our drafters on the llama.cpp engine alongside llama.cpp's own examples, on the same file, prompts and threads.

    python -m benchmarks.llamacpp_examples --bin llama.cpp/build/bin --model model.gguf --limit 4 --repeats 3

``--bin`` is the folder of llama.cpp's programs: llama-bench (plain decoding), llama-lookup and llama-lookahead are
run; a custom build may call the last two lookup and lookahead. Each program gets the prompt as text, and must report
the same number of prompt tokens as ours. S is tokens per pass after the prompt. Greedy; prints a table for each
workload, with the median and the range over the repeats. If llama-server is there too, its ngram modes
(``--spec-type``) are also measured, each completion compared with its own plain one. This library's own CPU path
decodes the same file and prompts. The page is computed from records of each completion, which --out also writes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lookahead
from lookahead.bench.methods import RunOptions
from lookahead.bench.record import Record, environment
from lookahead.core import SettingsError

from .datasets import load_workload
from .llamacpp_build import build_of
from .llamacpp_server import answers, steps_of
from .page import write_report
from .paper import committed
from .report import command_line, markdown_table
from .servers import exit_on_signals

#: What we measure on llama.cpp. The triple is the one compiled into llama-lookahead.
OURS = ("plain", "adaptive", "prompt_lookup", "15,5,15")
#: What we measure on our own CPU path.
OWN_PATH = ("plain", "adaptive")
#: Engine -> its methods.
METHODS = {"ours": OURS, "ours, CPU path": OWN_PATH}
BENCH = "llama-bench, plain"
#: Drafting modes of llama-server, with their numbers (``draft_options``). The defaults look up 12 or 24 tokens and
#: draft about 48, for long repeated passages; the others look up and draft few, as ours do. The last mode, and the
#: last with its defaults, were the fastest so far.
MODES = (
    "none",
    "ngram-simple",
    "ngram-simple 3,8",
    "ngram-map-k",
    "ngram-map-k 3,8",
    "ngram-map-k4v",
    "ngram-cache",
    "ngram-mod",
    "ngram-mod 6,2,8",
)
#: llama-lookup's numbers of drafted tokens; None is its default.
LOOKUPS = (None, 8)
#: Beginning of the names of the server's modes.
SERVER = "llama-server, "
#: {tokens}: the largest number of new tokens of a completion.
ABOUT = (
    "Greedy; the same file, prompts and threads for each, and at most {tokens} new tokens per completion, which "
    "llama.cpp's examples may exceed by the drafts of their last pass. S is tokens per pass after the prompt, "
    "tokens/s leave the prompt out: the median over the repeats, with their range. In each repeat, ours and "
    "llama.cpp's command-line programs decode each prompt in turn, and then the server decodes all prompts in one "
    "mode after the other. ours: on the llama.cpp engine; ours, CPU path: this library's own kernels. llama-bench "
    "decodes random tokens after as many as each prompt has. (15,5,15) is the triple that is compiled into "
    "llama-lookahead. llama-lookup drafts three tokens by default, or the number shown; our prompt lookup drafts "
    "ten. The server's modes have their defaults, which look up 12 or 24 tokens and draft about 48, or the numbers "
    "shown: tokens looked up and drafted (ngram-mod: looked up, least and most drafted); each has one server per "
    "repeat, so ngram-mod, which remembers, may use the earlier prompts of the set. llama-lookup and llama-lookahead "
    "print no token ids, so their texts cannot be compared."
)
#: (tokens, passes, seconds), of one prompt or of all.
Cost = tuple[int, int, float]
HEADS = ("", "tokens", "S", "tokens/s", "texts equal to the same engine's plain text")


def said(output: str, name: str) -> float:
    """The number that an example prints after a name.

    Raises:
        SettingsError: the output does not contain the name.
    """
    found = re.search(rf"\b{name}\s*=\s*([\d.]+)", output)
    if found is None:
        raise SettingsError(f"the example must print {name}, got {output[-200:]!r}")
    return float(found.group(1))


def cost_of(output: str, prompt_tokens: int, counts_first: bool) -> Cost:
    """The cost reported by llama-lookahead or llama-lookup. Every pass emits one token in addition to accepted ones.

    Args:
        output: what the program printed.
        prompt_tokens: our number of prompt tokens.
        counts_first: whether its tokens include the one from the prefill, as with llama-lookup.

    Raises:
        SettingsError: the program did not read our prompt, or its output is incomplete.
    """
    read = re.search(r"encoded\s+(\d+) tokens", output)
    if read is None or int(read.group(1)) != prompt_tokens:
        raise SettingsError(f"the example must read {prompt_tokens} tokens, got {read and read.group(1)}")
    spent = re.search(r"decoded\s+\d+ tokens in\s+([\d.]+) seconds", output)
    if spent is None:
        raise SettingsError(f"the example must say how long it took, got {output[-200:]!r}")
    tokens = int(said(output, "n_predict")) - counts_first
    accepted = int(said(output, "n_accept"))
    return tokens, tokens - accepted, float(spent.group(1))


def program(folder: Path, name: str) -> str:
    """The path of a program, whose name may begin with ``llama-``."""
    for path in (folder / f"llama-{name}", folder / name):
        if path.is_file():
            return str(path)
    raise SettingsError(f"--bin must hold llama-{name}, and {folder} does not")


def examples(arguments: argparse.Namespace) -> dict[str, Callable[[str, int], Cost]]:
    """Name -> a function that runs one of llama.cpp's examples on (prompt, its tokens)."""

    def runner(name: str, drafted: int | None = None) -> Callable[[str, int], Cost]:
        path = program(arguments.bin, name)
        options = [] if drafted is None else ["--spec-draft-n-max", str(drafted)]

        def run(prompt: str, prompt_tokens: int) -> Cost:
            command = [path, "-m", str(arguments.model), "-t", str(arguments.threads), "--temp", "0"]
            command += ["-n", str(arguments.tokens), "-c", "2048", *options, "--no-escape", "-p", prompt]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            return cost_of(done.stdout + done.stderr, prompt_tokens, name == "lookup")

        return run

    lookups = {f"llama-lookup {n}" if n else "llama-lookup": runner("lookup", n) for n in LOOKUPS}
    return {**lookups, "llama-lookahead": runner("lookahead")}


def plain_of_bench(arguments: argparse.Namespace, depth: int) -> Cost:
    """The cost of plain decoding after ``depth`` tokens by llama-bench, which decodes random tokens."""
    command = [program(arguments.bin, "bench"), "-m", str(arguments.model), "-t", str(arguments.threads)]
    command += ["-p", "0", "-n", str(arguments.tokens), "-d", str(depth), "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r'"avg_ts":\s*([\d.]+)', done.stdout)
    if found is None:
        raise SettingsError(f"llama-bench must print avg_ts, got {done.stderr[-200:]!r}")
    return arguments.tokens, arguments.tokens, arguments.tokens / float(found.group(1))


def program_if_there(folder: Path, name: str) -> str | None:
    """``program``, or None."""
    try:
        return program(folder, name)
    except SettingsError:
        return None


def cost_of_answer(answer: dict[str, Any]) -> Cost:
    """The cost reported by llama-server. The first token comes from the prefill and is not counted."""
    timings = answer["timings"]
    return timings["predicted_n"] - 1, steps_of(timings), timings["predicted_ms"] / 1e3


def measure(
    arguments: argparse.Namespace, engines: dict[str, Any], workload: str, prompts: Sequence[list[int]]
) -> Iterator[Record]:
    """A record of each completion of these prompts.

    Args:
        engines: ``ours`` on llama.cpp and ``ours, CPU path``, each a loaded model.
    """
    theirs = examples(arguments)
    server = program_if_there(arguments.bin, "server")
    drafters = {f"{name}, {each}": (llm, each) for name, llm in engines.items() for each in METHODS[name]}
    for llm, drafter in drafters.values():  # one-time work should not count for a prompt
        llm.generate(prompts[0], max_new_tokens=4, drafter=drafter)
    plain: dict[tuple[str, int], list[int]] = {}
    for repeat in range(arguments.repeats):

        def record(
            name: str, number: int, cost: Cost, text: list[int] | None, repeat: int = repeat
        ) -> Record:
            tokens, passes, seconds = cost
            own = plain.setdefault((name.rpartition(", ")[0], number), text) if text is not None else None
            first = int(name != BENCH)  # the token of the prefill
            return {
                "workload": workload,
                "prompt": str(number),
                "repeat": repeat,
                "method": name,
                "new_tokens": tokens + first,
                "prefill_tokens": first,
                "steps": passes,
                "decode_seconds": seconds,
                "equal": None if text is None else text == own,
                "load": round(os.getloadavg()[0], 2),
            }

        # Ours and llama.cpp's command-line programs, prompt by prompt.
        for number, ids in enumerate(prompts):
            text = engines["ours"].tokenizer.decode(ids, skip_special_tokens=False)
            yield record(BENCH, number, plain_of_bench(arguments, len(ids)), None)
            for name, (llm, drafter) in drafters.items():
                result = llm.generate(ids, max_new_tokens=arguments.tokens, drafter=drafter)
                stats = result.stats
                seconds = sum(spent for part, spent in stats.seconds.items() if part != "prefill")
                yield record(name, number, (stats.new_tokens - 1, stats.steps, seconds), result.tokens)
            for name, run in theirs.items():
                yield record(name, number, run(text, len(ids)), None)
        # llama.cpp's server, whose modes are compared with its own plain decoding.
        options = RunOptions(arguments.tokens)
        for mode in MODES if server is not None else ():
            found = answers(
                str(server), arguments.model, arguments.threads, mode.replace(" ", ":"), prompts, options
            )
            for number, answer in enumerate(found):
                yield record(f"{SERVER}{mode}", number, cost_of_answer(answer), answer["tokens"])


def tables(records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """Workload -> rows of its table."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault(record["workload"], {}).setdefault(record["method"], []).append(record)
    return {
        workload: [_row(name, each) for name, each in methods.items()] for workload, methods in groups.items()
    }


def _row(name: str, records: Sequence[Record]) -> list[str]:
    """A line of the table. The tokens are those of the first repeat; the rate has a range if there are several."""

    def totals(repeat: int) -> tuple[int, int, float]:
        own = [record for record in records if record["repeat"] == repeat]
        tokens = sum(record["new_tokens"] - record["prefill_tokens"] for record in own)
        seconds = sum(record["decode_seconds"] for record in own)
        return tokens, sum(record["steps"] for record in own), seconds

    each = [totals(repeat) for repeat in sorted({record["repeat"] for record in records})]
    rates = [tokens / seconds for tokens, _, seconds in each]
    rate = f"{median(rates):.1f}" + (f" ({min(rates):.0f}–{max(rates):.0f})" if len(rates) > 1 else "")
    compared = [record["equal"] for record in records if record["equal"] is not None]
    equal = f"{sum(compared)} of {len(compared)}" if compared else "not compared"
    tokens, passes, _ = each[0]
    return [name, str(tokens), f"{tokens / passes:.2f}", rate, equal]


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", action="append", help="can be repeated (default: stdlib)")
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="number of times each prompt is decoded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="page, JSON and records, as a path without the suffix")
    exit_on_signals()
    arguments = parser.parse_args(words)
    load = partial(lookahead.load, arguments.model, threads=arguments.threads)
    engines = {"ours": load(engine="llama.cpp"), "ours, CPU path": load()}
    llm = engines["ours"]
    # The file's name is the page's; the records' fields are those of committed.FIELDS.
    common = {**environment(), "model": arguments.model.name, "path": llm.path, "dtype": llm.dtype}
    records: list[Record] = []
    for name in arguments.workload or ["stdlib"]:
        prompts = load_workload(name, arguments.limit, data=arguments.data)
        ids = [prompt.tokens(llm.tokenizer) for prompt in prompts]
        records += [record | common for record in measure(arguments, engines, name, ids)]
        print(f"{name}\n{markdown_table(HEADS, tables(records)[name])}", flush=True)
    if arguments.out is None:
        return
    software = build_of(Path(program(arguments.bin, "bench")))
    words = sys.argv[1:] if words is None else words
    head = {
        "command": command_line(list(words), "python -m benchmarks.llamacpp_examples"),
        "software": software,
    }
    path = arguments.out.parent / "records" / f"{arguments.out.name}.jsonl.gz"
    committed.write(path, head, records)
    _, records = committed.read(path)  # with the rounded times, from which the page can be computed again
    figures = tables(records)
    body = [ABOUT.format(tokens=arguments.tokens), "", f"llama.cpp: {software}.", ""]
    for name, rows in figures.items():
        count = len({record["prompt"] for record in records if record["workload"] == name})
        body += [
            f"## {name}, {count} prompts, {arguments.repeats} repeats",
            "",
            markdown_table(HEADS, rows),
            "",
        ]
    loads = [record["load"] for record in records]
    shown = records[-1] | {"load": max(loads)}
    title = "Our drafters on llama.cpp, compared with its own examples"
    write_report(arguments.out, title, shown, figures, body, loads)


if __name__ == "__main__":
    main()

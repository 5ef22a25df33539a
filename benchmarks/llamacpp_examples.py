"""Our drafters on the llama.cpp engine alongside llama.cpp's own examples, on the same file, prompts and threads.

    python -m benchmarks.llamacpp_examples --bin llama.cpp/build/bin --model model.gguf --limit 4 --tokens 64

``--bin`` is the folder of llama.cpp's programs: llama-bench (plain decoding), llama-lookup and llama-lookahead are
run; a custom build may call the last two lookup and lookahead. Each program gets the prompt as text, and must report
the same number of prompt tokens as ours. S is tokens per pass after the prompt. Greedy; prints a table for each
workload. If llama-server is there too, its ngram modes (``--spec-type``) are also measured, each completion compared
with its own plain one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.report import markdown_table
from lookahead.core import SettingsError

from .datasets import load_workload
from .page import write_page
from .serve import running

#: What we measure. The triple is the one compiled into llama-lookahead.
OURS = ("plain", "adaptive", "prompt_lookup", "15,5,15")
#: Values of llama-server's ``--spec-type`` without a draft model.
MODES = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
ABOUT = (
    "Greedy; the same file, prompts and threads for each. S is tokens per pass after the prompt, tokens/s leave the "
    "prompt out. llama-bench decodes random tokens after as many as each prompt has. (15,5,15) is the triple that is "
    "compiled into llama-lookahead. llama-lookup drafts its default of three tokens, ours ten; the server's modes "
    "have their defaults. llama-lookup and llama-lookahead print no token ids, so their texts cannot be compared."
)
#: (tokens, passes, seconds), of one prompt or of all.
Cost = tuple[int, int, float]


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

    def runner(name: str) -> Callable[[str, int], Cost]:
        path = program(arguments.bin, name)

        def run(prompt: str, prompt_tokens: int) -> Cost:
            command = [path, "-m", str(arguments.model), "-t", str(arguments.threads), "--temp", "0"]
            command += ["-n", str(arguments.tokens), "-c", "2048", "--no-escape", "-p", prompt]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            return cost_of(done.stdout + done.stderr, prompt_tokens, name == "lookup")

        return run

    return {f"llama-{name}": runner(name) for name in ("lookup", "lookahead")}


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


def served(
    arguments: argparse.Namespace, path: str, mode: str, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """llama-server's answers to the prompts with a ``--spec-type``, after one uncounted request."""
    command = [path, "-m", str(arguments.model), "-t", str(arguments.threads), "-c", "4096", "-np", "1"]
    command += ["--spec-type", mode]
    body = {"temperature": 0, "n_predict": arguments.tokens, "cache_prompt": False, "return_tokens": True}
    with running(command, "/health") as address, httpx.Client(base_url=address, timeout=600) as client:
        answers = [
            client.post("/completion", json=body | {"prompt": ids}).raise_for_status().json()
            for ids in (prompts[0][:8], *prompts)
        ]
    return answers[1:]


def cost_of_answer(answer: dict[str, Any]) -> Cost:
    """The cost reported by llama-server. The first token comes from the prefill and is not counted."""
    timings = answer["timings"]
    tokens = timings["predicted_n"] - 1
    return tokens, tokens - timings.get("draft_n_accepted", 0), timings["predicted_ms"] / 1e3


def measure(arguments: argparse.Namespace, llm: Any, prompts: Sequence[list[int]]) -> list[list[str]]:
    """Rows of the table for these prompts."""
    # Ours and llama.cpp's command-line programs, prompt by prompt.
    theirs = examples(arguments)
    costs: dict[str, list[Cost]] = {}
    texts: dict[str, list[Any]] = {}
    for drafter in OURS:  # one-time work should not count for a prompt
        llm.generate(prompts[0], max_new_tokens=4, drafter=drafter)
    for ids in prompts:
        text = llm.tokenizer.decode(ids, skip_special_tokens=False)
        costs.setdefault("llama-bench, plain", []).append(plain_of_bench(arguments, len(ids)))
        for drafter in OURS:
            result = llm.generate(ids, max_new_tokens=arguments.tokens, drafter=drafter)
            stats = result.stats
            seconds = sum(spent for part, spent in stats.seconds.items() if part != "prefill")
            costs.setdefault(f"ours, {drafter}", []).append((stats.new_tokens - 1, stats.steps, seconds))
            texts.setdefault(f"ours, {drafter}", []).append(result.tokens)
        for name, run in theirs.items():
            costs.setdefault(name, []).append(run(text, len(ids)))
    plain = texts["ours, plain"]
    rows = []
    for name, each in costs.items():
        equal = sum(a == b for a, b in zip(texts[name], plain, strict=True)) if name in texts else None
        rows.append(_row(name, each, "not compared" if equal is None else f"{equal} of {len(plain)}"))

    # llama.cpp's server, whose modes are compared with its own plain decoding.
    server = program_if_there(arguments.bin, "server")
    own: list[Any] = []
    for mode in MODES if server is not None else ():
        answers = served(arguments, str(server), mode, prompts)
        wrote = [answer["tokens"] for answer in answers]
        own = own or wrote
        equal = sum(a == b for a, b in zip(wrote, own, strict=True))
        rows.append(
            _row(
                f"llama-server, {mode}",
                list(map(cost_of_answer, answers)),
                f"{equal} of {len(own)} to its own plain text",
            )
        )
    return rows


def _row(name: str, each: Sequence[Cost], equal: str) -> list[str]:
    tokens, passes, seconds = (sum(column) for column in zip(*each, strict=True))
    return [name, str(tokens), f"{tokens / passes:.2f}", f"{tokens / seconds:.1f}", equal]


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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="page and JSON, as a path without the suffix")
    arguments = parser.parse_args(words)
    llm = lookahead.load(arguments.model, engine="llama.cpp", threads=arguments.threads)
    body = []
    figures = {}
    for name in arguments.workload or ["stdlib"]:
        workload = load_workload(name, arguments.limit, data=arguments.data)
        rows = measure(arguments, llm, [prompt.tokens(llm.tokenizer) for prompt in workload])
        table = markdown_table(["", "tokens", "S", "tokens/s", "texts equal to our plain text"], rows)
        print(f"{name}\n{table}", flush=True)
        body += [f"## {name}, {len(workload)} prompts", "", table, ""]
        figures[name] = rows
    if arguments.out is not None:
        record = {**environment(), "model": arguments.model.name, "path": llm.path, "dtype": llm.dtype}
        title = "On llama.cpp: our drafters beside its own examples"
        write_page(arguments.out, title, record, figures, [ABOUT, "", *body])


if __name__ == "__main__":
    main()

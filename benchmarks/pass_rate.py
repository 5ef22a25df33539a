"""HumanEval's pass rate with and without drafts: the same completions, hence the same rate.

    python -m benchmarks.pass_rate --data DIR
    python -m benchmarks.pass_rate MODEL --data DIR --drafters "plain;adaptive;15,5,15"

The model is asked for each function of HumanEval (Chen et al., 2021, arXiv 2107.03374), with greedy decoding. The
tests run in a separate process: in isolated mode, with an empty folder and environment, without a network if the
system allows network namespaces, and with limits on memory, CPU time and file size. The rate itself shows how good
the model is; this benchmark shows that it does not depend on the drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lookahead
from lookahead.bench.record import environment

from .page import write_report
from .report import markdown_table

ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}```"
#: Limit on the wall-clock time, and on the CPU time, of a test process.
SECONDS = 10
#: Limit on its memory, in bytes.
MEMORY = 1 << 30
#: Limit on the size of its files, in bytes.
FILE = 1 << 20


@cache
def without_network() -> tuple[str, ...]:
    """Command prefix that creates a network namespace without interfaces. Empty if the system does not allow it."""
    words = ("unshare", "--map-root-user", "--net")
    if shutil.which("unshare") is None:
        return ()
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else ()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def code_of(answer: str) -> str:
    """The first code block of an answer, or the whole answer if it has none."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return block[1] if block is not None else answer


def passes(problem: dict[str, str], code: str) -> bool:
    """Whether ``code`` passes the problem's tests. The prompt's imports come first."""
    imports = [line for line in problem["prompt"].splitlines() if line.startswith(("import ", "from "))]
    program = "\n".join([*imports, code, problem["test"], f"check({problem['entry_point']})", ""])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8")
        command = [*without_network(), sys.executable, "-I", "-S", str(file)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_limit,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def measure(
    llm: Any, problems: Sequence[dict[str, str]], drafters: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """For each drafter: whether each problem passes, the tokens of each completion, and S."""
    found = []
    for name in drafters:
        passed = list[bool]()
        texts = list[list[int]]()
        emitted = steps = 0
        for problem in problems:
            chat = [{"role": "user", "content": ASK.format(problem["prompt"])}]
            result = llm.generate(chat, drafter=name, max_new_tokens=tokens)
            passed.append(passes(problem, code_of(result.text)))
            texts.append(result.tokens)
            emitted += result.stats.new_tokens - 1
            steps += result.stats.steps
        found.append({"drafter": name, "passed": passed, "tokens": texts, "s": emitted / max(1, steps)})
        print(name, sum(passed), "of", len(passed), flush=True)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line for each drafter. The completions of the others are compared with those of the first."""
    rows = []
    for own in found:
        same = sum(a == b for a, b in zip(own["tokens"], found[0]["tokens"], strict=True))
        count = sum(own["passed"])
        total = len(own["passed"])
        rows.append(
            [
                own["drafter"],
                f"{count} of {total} ({count / total:.1%})",
                f"{same} of {total}",
                f"{own['s']:.2f}",
            ]
        )
    return markdown_table(["drafter", "passed", "completions equal to the first line's", "S"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="default: the library's default model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="number of problems; 0 for all 164")
    parser.add_argument("--drafters", default="plain;adaptive", help="names separated by semicolons")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results/pass-rate"), help="figures, without suffix"
    )
    args = parser.parse_args()
    lines = (args.data / "humaneval" / "HumanEval.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines][: args.limit or None]
    llm = lookahead.load(args.model)
    loads = [os.getloadavg()[0]]
    record = {**environment(), "model": llm.name, "path": llm.path, "dtype": llm.dtype}
    found = measure(llm, problems, args.drafters.split(";"), args.max_new_tokens)
    body = [
        f"HumanEval, greedy, at most {args.max_new_tokens} new tokens: a chat that asks for the whole function in "
        "a code block. S: tokens per forward pass. The tests ran in processes with limits on memory and time"
        + (", without a network." if without_network() else "."),
        "",
        table(found),
    ]
    figures = [{**own, "tokens": None, "equal": own["tokens"] == found[0]["tokens"]} for own in found]
    write_report(args.out, "HumanEval's pass rate with and without drafts", record, figures, body, loads)


if __name__ == "__main__":
    main()

"""How many requests of the package's corpus are about the task of a data set on which S is measured.

    python -m benchmarks.corpus.overlap --data FOLDER [--without OUT.jsonl.xz]

A request is about a task if it has at least two and three quarters of the task's words, and these are at least three
tenths of the words of both. Words that most requests have ("write", "function", "list") do not count, nor do endings.
``--without`` writes the corpus without the answers to such requests, for ``measure --text``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lookahead.drafters.adaptive.base_files import CORPUS

from ..datasets import load_workload
from ..report import markdown_table
from .requests import WRITERS
from .write import again, read

SETS = ("mbpp", "humaneval")
LEAST_WORDS, LEAST_OF_TASK, LEAST_OF_BOTH = 2, 0.75, 0.3
ENDINGS = ("ing", "ed", "es", "s", "al", "ly")
#: Words that say nothing about what a function does.
COMMON = frozenset(
    re.findall(
        r"\w+",
        """
        a all also an and answer are as at be by can check code def docstring each element elements every
        example explain find first for from function get give given have how if implement import in into is
        it its list lists me my need no not number numbers of on one only or please program python result
        return returns short should show simple so solution string strings task takes test tests than that
        the their them then this to two typing use using value values want whether which with write you your
        """,
    )
)


def words_of(text: str) -> frozenset[str]:
    """The words that say what a text is about, without their endings."""
    found = set()
    for word in re.findall(r"[a-z]{3,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).replace("_", " ").lower()):
        if word not in COMMON:
            ending = next((x for x in ENDINGS if word.endswith(x) and len(word) - len(x) >= 4), "")
            found.add(word.removesuffix(ending))
    return frozenset(found)


def task_of(prompt: str) -> str:
    """What a prompt of a data set asks for: the sentence before MBPP's tests, or a docstring without its examples."""
    inside = re.search(r'"""(.*?)(?:>>>|"""|Example|For example)', prompt, re.S)
    return inside[1] if inside else prompt.partition(" Answer with Python")[0]


def is_about(request: frozenset[str], task: frozenset[str]) -> bool:
    """Whether a request is about a task, by their words."""
    both = len(request & task)
    return (
        both >= LEAST_WORDS
        and both >= LEAST_OF_TASK * len(task)
        and both >= LEAST_OF_BOTH * len(request | task)
    )


def found_in(requests: Iterable[str], tasks: list[str]) -> dict[str, set[int]]:
    """Request -> the numbers of the tasks that it is about; only requests that are about one."""
    words = list(map(words_of, tasks))
    about = dict[frozenset[str], set[int]]()
    found = {}
    for request in requests:
        own = words_of(request)
        if own not in about:
            about[own] = {number for number, task in enumerate(words) if is_about(own, task)}
        if about[own]:
            found[request] = about[own]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--without", type=Path)
    given = parser.parse_args()
    answers = read(CORPUS)
    requests = {}
    for writer in WRITERS:
        numbers = {answer["number"] for answer in answers if answer["writer"] == writer}
        requests |= {(writer, ask.number): ask.text for ask in again(writer, numbers)}
    left_out = set[tuple[str, int]]()
    rows = []
    for name in SETS:
        tasks = [task_of(prompt.turns[0]) for prompt in load_workload(name, data=given.data)]
        found = found_in(requests.values(), tasks)
        own = {key for key, text in requests.items() if text in found}
        hit = sorted(set().union(*found.values()))
        by_writer = Counter(writer for writer, _ in own)
        cells = [f"{by_writer[writer]}" for writer in WRITERS]
        rows.append([name, *cells, f"{len(hit)} of {len(tasks)}", ", ".join(map(str, hit[:3]))])
        left_out |= own
    print(markdown_table(["requests about a task of", *WRITERS, "tasks", "the first of them"], rows))
    if given.without:
        kept = [answer for answer in answers if (answer["writer"], answer["number"]) not in left_out]
        lines = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in kept)
        given.without.write_bytes(lzma.compress(lines.encode()))
        print(f"{len(answers) - len(kept):,} of {len(answers):,} answers left out")


if __name__ == "__main__":
    main()

"""S of the adaptive drafter with tables counted in more and more of a corpus, in forward passes only.

    python -m benchmarks.corpus.measure OUT.json --model FILE.gguf --data FOLDER [--tokens 0 50000 all]
    python -m benchmarks.corpus.measure --page OUT.json [OUT.json ...]

The corpus is the package's (``lookahead.learning.corpus``), or the texts of ``--text`` (``write``, ``pack``), in a
fixed random order. Prompts are MT-Bench's questions for prose, and MBPP's tasks without their tests for
code; neither is in a corpus. A model without a chat template completes an answer or a function after them. Steps have
a fixed number of rows, so S depends neither on the machine nor on its load. Every output is compared with plain
decoding; a difference ends the run. A table of 0 tokens is none.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of
from lookahead.drafters.adaptive.settings import DEFAULT_SOURCES
from lookahead.learning import corpus
from lookahead.learning.table import Places
from lookahead.text.prompts import has_chat_template

from .. import datasets
from ..page import write_report
from ..report import markdown_table
from .write import read

#: Categories of MT-Bench that are answered in prose.
PROSE = ("writing", "roleplay", "stem", "humanities")
ALL = "all"


def prompts(kind: str, data: Path, count: int) -> list[str]:
    """The first ``count`` prompts of a kind, in order of their categories."""
    if kind == "code":
        tasks = datasets.load_workload("mbpp", count, data=data)
        return [task.turns[0].partition(" Answer with Python")[0] for task in tasks]
    questions = datasets.load_workload("mt-bench", data=data)
    return [question.turns[0] for question in questions if question.category in PROSE][:count]


def prompt_of(llm: Any, kind: str, text: str) -> Any:
    """The prompt as a chat, or as the beginning of a text if the model has no chat template."""
    if has_chat_template(llm.tokenizer):
        return [{"role": "user", "content": text}]
    return f"# {text}\n\ndef" if kind == "code" else f"Question: {text}\n\nAnswer:"


def texts_of(files: Sequence[Path]) -> list[str]:
    """The texts of the package, or of files, mixed."""
    texts = [line["answer"] for file in files for line in read(file)] if files else corpus.texts()
    random.Random(0).shuffle(texts)
    return texts


def first(places: Places, tokens: str) -> Places:
    """The positions of the first tokens of a corpus."""
    return places if tokens == ALL else places.where(slice(int(tokens)))  # type: ignore[arg-type]


def measure(llm: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each kind of prompts, number of rows and size of the corpus."""
    places = corpus.split(llm.tokenizer.backend_tokenizer, texts_of(given.text))
    tables: dict[str, str | None] = {}
    folder = Path(tempfile.mkdtemp())
    for tokens in given.tokens:
        part = first(places, tokens)
        table = folder / f"{tokens}.safetensors"
        if len(part):
            corpus.save(part, table, key_of(llm.model), given.least, given.contexts)
        tables[str(len(part))] = str(table) if len(part) else None
    lines = []
    origin = {"model": Path(llm.name).name}
    for kind in given.kinds:
        chats = [prompt_of(llm, kind, text) for text in prompts(kind, given.data, given.prompts)]
        common = {"max_new_tokens": given.new_tokens, "temperature": given.temperature, "seed": 0}
        plain = [llm.generate(chat, drafter=Plain(), **common).tokens for chat in chats]
        for rows in given.rows:
            for tokens, path in tables.items():
                sources = tuple(name for name in DEFAULT_SOURCES if path is not None or name != "base")
                drafter = Adaptive(rows=rows, table=path, sources=sources)
                steps = new = 0
                for chat, expected in zip(chats, plain, strict=True):
                    result = llm.generate(chat, drafter=drafter, **common)
                    if result.tokens != expected:
                        raise SystemExit(
                            f"{kind}, {rows} rows, {tokens} tokens: the output differs from plain decoding"
                        )
                    steps += result.stats.steps
                    new += result.stats.new_tokens - 1
                size = Path(path).stat().st_size if path is not None else 0
                line = origin | {"kind": kind, "rows": rows, "tokens": int(tokens), "bytes": size}
                lines.append(
                    {
                        **line,
                        "prompts": len(chats),
                        "new": new,
                        "steps": steps,
                        "s": round(new / max(1, steps), 3),
                    }
                )
                print(json.dumps(lines[-1]), flush=True)
    return lines


def page(files: Sequence[Path]) -> str:
    """The tables of results, one for each model."""
    parts = []
    lines = [line for file in files for line in json.loads(file.read_text())["figures"]]
    for model in dict.fromkeys(line["model"] for line in lines):
        own = [line for line in lines if line["model"] == model]
        columns = list(dict.fromkeys((line["kind"], line["rows"]) for line in own))
        rows = []
        for tokens in dict.fromkeys(line["tokens"] for line in own):
            found = {(line["kind"], line["rows"]): line for line in own if line["tokens"] == tokens}
            size = max(line["bytes"] for line in found.values())
            rows.append(
                [f"{tokens:,}", f"{size / 1e6:.1f}", *(f"{found[column]['s']:.2f}" for column in columns)]
            )
        heads = [f"{kind}, {count} rows" for kind, count in columns]
        parts.append(f"## {model}\n\n" + markdown_table(["tokens", "MB", *heads], rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--page", type=Path, nargs="+", help="print the tables of these results")
    parser.add_argument("--model", help="as for lookahead.load (default: the library's default model)")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--tokens", nargs="+", default=["0", "50000", "200000", "500000", ALL])
    parser.add_argument("--kinds", nargs="+", default=["prose", "code"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--least", type=float, default=corpus.LEAST_COUNT)
    parser.add_argument("--contexts", type=int, default=corpus.MOST_CONTEXTS)
    given = parser.parse_args()
    if given.page:
        print(page(given.page), end="")
        return
    llm = lookahead.load(given.model, threads=given.threads)
    record = environment() | {"model": Path(llm.name).name, "dtype": llm.dtype}
    write_report(given.out, "S by the text of a table", record, measure(llm, given), [])


if __name__ == "__main__":
    main()

"""S of the adaptive drafter by the rows of a step, for each kind of text of SPEED-Bench, in forward passes only.

    python -m benchmarks.kinds [--model FILE.gguf ...]      continues where it was interrupted

``kinds.toml`` has the prompts. Each step has a fixed number of rows, so S depends neither on the machine nor on its
load. A state is what the drafter starts with: nothing (``cold``), or a table counted in the package's corpus
(``corpus``). Every text is compared with plain decoding; a difference ends the run. Lines of ``--records`` of this
commit and these settings are not measured again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.core import Drafter
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of
from lookahead.drafters.adaptive.settings import DEFAULT_SOURCES
from lookahead.learning import corpus
from lookahead.records import RecordWriter, read_records

from .page import write_report
from .report import markdown_table

PROMPTS = tomllib.loads((Path(__file__).parent / "kinds.toml").read_text(encoding="utf-8"))
ROWS = (2, 4, 8, 16)
#: Fields that identify a line.
KEYS = ("model", "state", "rows", "kind")
#: What the lines of one page have in common.
COMMON = ("commit", "new_tokens")


class Runner:
    """One model with its tables; plain texts are decoded once."""

    def __init__(self, path: str | None, threads: int | None, new_tokens: int, folder: Path) -> None:
        self.llm = lookahead.load(path, threads=threads)
        self.new_tokens = new_tokens
        self._plain = dict[str, list[int]]()
        key = key_of(self.llm.model)
        counted = folder / f"{key}.safetensors"
        if not counted.exists():
            corpus.save(corpus.split(self.llm.tokenizer.backend_tokenizer, corpus.texts()), counted, key)
        self.tables: dict[str, Path | None] = {"cold": None, "corpus": counted}

    @property
    def origin(self) -> dict[str, Any]:
        """Where a line is from."""
        name = Path(self.llm.name).name  # records must not reveal this machine's folders
        return {**environment(), "model": name, "dtype": self.llm.dtype, "new_tokens": self.new_tokens}

    def measure(self, state: str, rows: int, prompts: Sequence[str]) -> dict[str, int]:
        """Steps and their tokens over prompts."""
        table = self.tables[state]
        sources = tuple(name for name in DEFAULT_SOURCES if table is not None or name != "base")
        drafter = Adaptive(rows=rows, sources=sources, table=None if table is None else str(table))
        steps = new = 0
        for prompt in prompts:
            if prompt not in self._plain:
                self._plain[prompt] = self._decode(prompt, Plain()).tokens
            result = self._decode(prompt, drafter)
            if result.tokens != self._plain[prompt]:
                raise SystemExit(f"{state}, {rows} rows: the output differs from plain decoding: {prompt!r}")
            steps += result.stats.steps
            new += result.stats.new_tokens - 1
        return {"prompts": len(prompts), "new": new, "steps": steps}

    def _decode(self, prompt: str, drafter: Drafter) -> Any:
        chat = [{"role": "user", "content": prompt}]
        return self.llm.generate(chat, drafter=drafter, max_new_tokens=self.new_tokens)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of all models."""
    records = read_records(given.records, "steps", "benchmarks.kinds")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, RecordWriter(given.records, append=True) as writer:
        for path in given.model:
            runner = Runner(path, given.threads, given.new_tokens, Path(folder))
            origin = runner.origin
            known = {
                tuple(line[key] for key in KEYS): line
                for line in records
                if all(line[name] == origin[name] for name in COMMON)
            }
            # Those with the fewest rows first.
            for rows, state in product(ROWS, runner.tables):
                for kind, prompts in PROMPTS.items():
                    key = origin["model"], state, rows, kind
                    if key not in known:
                        line = origin | dict(zip(KEYS, key, strict=True))
                        known[key] = line | runner.measure(state, rows, prompts)
                        writer.write(known[key])
                    found.append(known[key])
                print(origin["model"], state, rows, flush=True)
    return found


def figures(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page reads of the lines."""
    return [{name: line[name] for name in (*KEYS, "prompts", "new", "steps")} for line in lines]


def s_of(lines: Sequence[dict[str, Any]]) -> float:
    """S over lines."""
    return sum(line["new"] for line in lines) / sum(line["steps"] for line in lines)


def shown(lines: Sequence[dict[str, Any]]) -> str:
    """S over lines; a dash if there are none."""
    return f"{s_of(lines):.2f}" if lines else "–"


def body(lines: Sequence[dict[str, Any]]) -> list[str]:
    """S over all kinds, by model and state."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["model"], line["state"]), []).append(line)
    cells = [
        [*key, *(shown([x for x in own if x["rows"] == rows]) for rows in ROWS)] for key, own in found.items()
    ]
    return [markdown_table(["model", "state", *(f"{rows} rows" for rows in ROWS)], cells, texts=2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", action="append", metavar="GGUF", help="can be repeated; default: the default model")
    add("--new-tokens", type=int, default=48)
    add("--threads", type=int)
    add("--records", type=Path, default=Path("build/results/kinds.jsonl"))
    add("--out", type=Path, default=Path("docs/results/kinds"), help="figures, without suffix")
    given = parser.parse_args()
    given.model = given.model or [None]
    given.records.parent.mkdir(parents=True, exist_ok=True)
    lines = measure(given)
    names = ", ".join(dict.fromkeys(line["model"] for line in lines))
    record = {**lines[-1], "model": names, "dtype": "their own types"}
    title = "S by rows and kind of text"
    write_report(given.out, title, record, figures(lines), body(lines), new_tokens=given.new_tokens)


if __name__ == "__main__":
    sys.exit(main())

"""What was measured, as pages read it: the JSON of a measurement, its records, and figures over kinds of text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.record import Record
from lookahead.bench.report import Figures, figures, plain_of
from lookahead.core import SettingsError

from .llamacpp_server import LLAMA_SERVER
from .paper import committed

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results"
PLAIN, DEFAULT, FIXED, PAPERS = "plain", "adaptive", "adaptive:rows=4", "lookahead:15,5,15"
NO_TABLE, FIXED_NO_TABLE = (f"{name}:sources=suffix+logits+jacobi" for name in (DEFAULT, FIXED))
#: What the default starts with -> its method.
STATES = {"without a table": NO_TABLE, "the default": DEFAULT}
#: Kinds of text -> their data sets.
KINDS = {"prose": ("mt-bench",), "code": ("humaneval", "mbpp", "classeval")}
#: The size of a model in its file's name.
SIZE = re.compile(r"-(\d+(?:\.\d+)?[BM])\b")
#: Sizes without records of their own on the first page -> the records that stand in for them.
INSTEAD = {"135M": "bench-packed"}
NAMES = {
    PLAIN: "plain decoding",
    DEFAULT: "**the default**",
    FIXED: "four rows in every step",
    NO_TABLE: "the default, without a table",
    FIXED_NO_TABLE: "four rows, without a table",
    PAPERS: "the paper's (15, 5, 15)",
    LLAMA_SERVER: "llama.cpp",
    "adaptive:head=auto": "with the light head",
    "prompt-lookup": "prompt lookup",
    "hf-greedy": "transformers",
    "hf-compiled": "transformers, compiled",
    "hf-prompt-lookup": "transformers, prompt lookup",
    "openvino-greedy": "OpenVINO GenAI",
    "openvino-lookup": "OpenVINO GenAI, prompt lookup",
}


def name_of(method: str) -> str:
    """The name of a method in tables."""
    head, _, rest = method.partition(":")
    file, _, mode = rest.partition(":")
    kind = [suffix[1:] for suffix in Path(file).suffixes[-2:-1]]
    return NAMES.get(method) or ", ".join([NAMES.get(head, head), *kind, *filter(None, mode.split(":", 1))])


def facts_of(name: str) -> Any:
    """The JSON of a measurement."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def figures_of(name: str) -> Any:
    return facts_of(name)["figures"]


def has_records(name: str) -> bool:
    return (RESULTS / "records" / f"{name}.jsonl.gz").is_file()


def made(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The machine and the commit of a measurement; dashes where it names none."""
    found = re.match(r"(.*?), \d+ threads?,.* commit ([^,]+),", facts.get("where", ""))
    return (found[1], found[2][:7]) if found else ("–", "–")


#: The beginning of an instruction set's name -> what a page calls a processor that has it; the newest first.
INSTRUCTIONS = {"amx": "AMX", "avx512": "AVX-512", "avx2": "AVX2"}


def shown_machine(facts: Mapping[str, Any]) -> str:
    """The machine of a measurement, with its newest instruction set alone."""
    *parts, sets = made(facts)[0].replace("(R)", "").replace(" Processor,", ",").split(", ")
    newest = (shown for start, shown in INSTRUCTIONS.items() if start in sets)
    return ", ".join([*parts, next(newest, sets)])


def where(name: str) -> str:
    """The machine and the commit of a measurement, for a chart."""
    facts = facts_of(name)
    return f"{shown_machine(facts)}, commit {made(facts)[1]}"


def times(x: Figures) -> str:
    """A speed-up with its interval."""
    return f"{x.total:.2f} ({x.low:.2f}–{x.high:.2f})"


def equal(x: Figures) -> str:
    return f"{x.equal} of {x.compared}" if x.compared else "–"


class Measured:
    """The records of methods side by side on one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        _, records = committed.read(RESULTS / "records" / f"{name}.jsonl.gz")
        self._records: list[Record] = [record for record in records if "skipped" not in record]
        self._plain = plain_of(self._records)
        self.methods = list(dict.fromkeys(record["method"] for record in self._records))
        self.model = re.sub(r"\.gguf$", "", self._records[0]["model"])

    def of(self, method: str, sets: Sequence[str] = ()) -> Figures:
        """Figures of a method over these data sets, or over all."""
        own = [x for x in self._records if x["method"] == method and (not sets or x["workload"] in sets)]
        return figures(own, self._plain)

    def best_of_llama_cpp(self, sets: Sequence[str], drafts: bool | None = None) -> Figures:
        """Figures of the fastest of llama.cpp's files and modes on these data sets.

        Args:
            drafts: only modes that draft, or only those that do not; None for all.
        """
        names = [name for name in self.methods if name.startswith(LLAMA_SERVER)]
        found = [self.of(name, sets) for name in names if drafts in (None, name.count(":") > 1)]
        return max((x for x in found if x.total == x.total), key=lambda x: x.total)  # a mode may have failed

    def fastest(self, begin: str) -> str:
        """The fastest of the methods whose names begin so."""
        own = [name for name in self.methods if name.startswith(begin)]
        return max(own, key=lambda name: self.of(name).rate_all)


def size_of(file: Path) -> str:
    """The size of a model in its file's name, as "1.5B".

    Raises:
        SettingsError: there is none.
    """
    size = SIZE.search(file.stem)
    if size is None:
        raise SettingsError(
            f"--model must have its size in its name, as in Llama-3.2-1B.gguf, got {file.name}"
        )
    return size[1]


def millions(size: str) -> float:
    """Parameters of a model by its size, as "0.5B"."""
    return float(size[:-1]) * {"B": 1000, "M": 1}[size[-1]]


def shown_models() -> dict[str, Measured]:
    """Size -> the records of the first page, ``speed-SIZE``, the largest model first."""
    files = [path.name.removesuffix(".jsonl.gz") for path in (RESULTS / "records").glob("speed-*.jsonl.gz")]
    names = INSTEAD | {name.removeprefix("speed-").upper(): name for name in files}
    sizes = sorted(filter(lambda size: has_records(names[size]), names), key=millions, reverse=True)
    return {size: Measured(names[size]) for size in sizes}


def corpus_lines() -> list[dict[str, Any]]:
    """The lines of ``benchmarks.corpus.measure``, of all models."""
    return [line for name in corpus_pages() for line in figures_of(name)]


def corpus_pages() -> list[str]:
    """The measurements of ``benchmarks.corpus.measure``, one for each model."""
    return sorted(path.stem for path in RESULTS.glob("corpus-*.json"))

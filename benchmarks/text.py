"""Does speculation, or a batch, change the text? The referee of ``lookahead verify`` on this library and on peers.

    python -m benchmarks.text [--llamacpp PROGRAM] [--vllm PYTHON] [--only NAME ...] [--out docs/results/text]

The prompts are those of ``lookahead verify``; every completion is greedy. Servers are started here and asked over
HTTP: the plain one twice, the other one once. OpenVINO GenAI, transformers and the paths of this library run in this
process, and the gap at a difference comes from transformers' float32 logits of the same weights. Findings are kept in
``--out``.json as they come, so an interrupted run at one commit continues; peers that are not given or not installed
keep what was found of them before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lookahead
from lookahead.bench.methods import ModelUnderTest, Outcome, RunOptions, load_model
from lookahead.bench.record import describe, environment
from lookahead.cli.verify_exact import PROMPTS
from lookahead.core import LookaheadError
from lookahead.referee import BOUND, Report, Server, Side, Verdict, compare_greedy, judge
from lookahead.referee.client import TOP, Completion, Token

from .convert_gguf import export
from .llamacpp_build import build_of
from .page import reason_of, write_report
from .peers import make_methods
from .report import markdown_table
from .servers import exit_on_signals, running, started_llamacpp

#: Requests of a batch, tokens of a completion, and positions of a server's context.
AT_ONCE, TOKENS, CONTEXT = 16, 96, 1024
#: Verdicts that have a column.
SHOWN = (Verdict.EQUAL, Verdict.ROUNDING, Verdict.WRONG, Verdict.NOT_JUDGED)
#: llama.cpp's modes of drafting without a model.
MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
#: vLLM's methods of drafting without a model.
VLLM: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
#: Paths of this library: dtype and path.
PATHS = (
    ("auto", "auto"),
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("bfloat16", "transformers"),
    ("bfloat16", "exact"),
)
TWICE, BATCH = "plain, twice", f"alone and among {AT_ONCE}"


@dataclass(frozen=True)
class Line:
    """A line of the page: an engine, what is compared, and the comparison."""

    engine: str
    compared: str
    run: Callable[[], Report]


def _ask(plain: Server, other: Server, at_once: int = 1, repeat: bool = True, **without: Any) -> Report:
    fields = {"temperature": 0.0, "max_tokens": TOKENS}
    return compare_greedy(Side(plain, without), Side(other, {}, at_once), PROMPTS, fields, BOUND, repeat)


def _servers(plain: Any, other: Any, at_once: int) -> Report:
    """Compare two servers, given as contexts with an address; the same one if the other is None."""
    with ExitStack() as stack:
        first = Server(stack.enter_context(plain()))
        second = Server(stack.enter_context(other())) if other is not None else first
        return _ask(first, second, at_once, repeat=other is not None or at_once > 1)


def llamacpp_lines(program: str, file: Path, threads: int) -> Iterator[Line]:
    """llama.cpp's server: against itself, with each mode of drafting, and in a batch."""
    engine = f"llama.cpp, {file.stem.rpartition('.')[2]}"

    def server(slots: int = 1, *more: str) -> Any:
        return partial(started_llamacpp, program, file, threads, CONTEXT, slots, more)

    yield Line(engine, TWICE, partial(_servers, server(), None, 1))
    for mode in MODES:
        yield Line(engine, f"drafts: {mode}", partial(_servers, server(), server(1, "--spec-type", mode), 1))
    yield Line(engine, BATCH, partial(_servers, server(AT_ONCE), None, AT_ONCE))


def vllm_lines(python: str, folder: Path) -> Iterator[Line]:
    """vLLM's server on a CPU: against itself, with each method of drafting, and in a batch."""
    words = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--dtype",
        "bfloat16",
    ]
    words += ["--max-model-len", str(CONTEXT), "--enforce-eager", "--no-enable-prefix-caching"]
    engine = "vLLM, bfloat16"

    def server(*more: str) -> Any:
        return partial(running, [*words, *more], "/health")

    yield Line(engine, TWICE, partial(_servers, server(), None, 1))
    for name, given in VLLM.items():
        drafted = server("--speculative-config", json.dumps(given))
        yield Line(engine, f"drafts: {name}", partial(_servers, server(), drafted, 1))
    yield Line(engine, BATCH, partial(_servers, server(), None, AT_ONCE))


def server_lines(threads: int) -> Iterator[Line]:
    """This library's server: with its drafts, and in a batch with them."""
    words = [sys.executable, "-m", "lookahead", "serve"]
    words += ["--threads", str(threads), "--max-model-len", str(CONTEXT)]

    def compare(at_once: int) -> Report:
        with running(words, "/health") as address:
            server = Server(address)
            return _ask(server, server, at_once, lookahead={"drafter": "plain"})

    yield Line("our server, 4 bits", "drafts: default", partial(compare, 1))
    yield Line("our server, 4 bits", f"{BATCH}, with drafts", partial(compare, AT_ONCE))


@cache
def _reference() -> Any:
    """transformers' model of the default model's file, in float32."""
    from transformers import AutoModelForCausalLM

    folder, file = lookahead.default_model()
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32").eval()


def _completion(model: ModelUnderTest, prompt: Sequence[int], outcome: Outcome | str) -> Completion:
    """A completion with the log-probabilities of float32.

    Raises:
        LookaheadError: the method returned why it failed.
    """
    import torch

    if isinstance(outcome, str):
        raise LookaheadError(outcome)
    new = outcome.tokens
    with torch.inference_mode():
        logits = _reference()(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
    best = logits.float().log_softmax(-1)
    values, ids = best.topk(TOP)
    decode = partial(model.tokenizer.decode, clean_up_tokenization_spaces=False)
    tokens = [
        Token(
            decode([token]),
            len(decode(new[:place])),
            float(best[place, token]),
            [(decode([i]), v) for i, v in zip(ids[place].tolist(), values[place].tolist(), strict=True)],
        )
        for place, token in enumerate(new)
    ]
    ended = bool(new) and new[-1] in model.eos
    return Completion(decode(new), "stop" if ended else "length", len(new), tokens)


def _methods(load: Callable[[], ModelUnderTest], plain: str, other: str) -> Report:
    """Compare two methods of ``benchmarks.peers`` in this process."""
    model = load()
    options = RunOptions(max_new_tokens=TOKENS)
    (right,), (judged, *_) = (make_methods(name, model, warm=False) for name in (plain, other))
    pairs = []
    for text in PROMPTS:
        prompt = model.tokenizer(text).input_ids
        a, b = (
            _completion(model, prompt, method.decode(model, prompt, options)) for method in (right, judged)
        )
        pairs.append((text, a, b))
    return judged_by_reference(pairs)


def judged_by_reference(pairs: Sequence[tuple[str, Completion, Completion]]) -> Report:
    """Judge completions whose log-probabilities are those of float32 and not of the engine.

    Where the engine's plain token is less likely than the other one in float32, the engine is off by at least that
    much. A gap is a difference of two log-probabilities, each of which may be as far off.

    Args:
        pairs: prompt, plain completion and the one to judge.
    """
    gaps = [judge(*pair, BOUND).gap for pair in pairs]
    noise = max((-gap for gap in gaps if gap is not None and gap < 0), default=0.0)
    bound = max(BOUND, 2 * noise)
    return Report([judge(*pair, bound) for pair in pairs], bound, noise)


def process_lines() -> Iterator[Line]:
    """Each path of this library, and transformers, in this process."""
    for dtype, path in PATHS:
        load = partial(load_model, dtype=dtype, path=path)
        weights = "4 bits" if dtype == "auto" else dtype
        engine = f"ours, {weights}, path {'cpu' if path == 'auto' else path}"
        yield Line(engine, "drafts: default", partial(_methods, load, "plain", "adaptive"))
    load = partial(load_model, dtype="bfloat16", path="transformers")
    lookup = "drafts: prompt lookup"
    yield Line("transformers, bfloat16", TWICE, partial(_methods, load, "hf-greedy", "hf-greedy"))
    yield Line("transformers, bfloat16", lookup, partial(_methods, load, "hf-greedy", "hf-prompt-lookup"))


def openvino_lines(file: Path) -> Iterator[Line]:
    """OpenVINO GenAI in this process, on a file that it reads."""
    for other, compared in (("greedy", TWICE), ("lookup", "drafts: prompt lookup")):
        names = f"openvino-greedy:{file}", f"openvino-{other}:{file}"
        yield Line("OpenVINO, Q8_0", compared, partial(_methods, load_model, *names))


def figures_of(report: Report) -> dict[str, Any]:
    """The findings of a line."""
    counts = Counter(finding.verdict for finding in report.findings)
    return {
        "counts": {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]},
        "tokens": sum(finding.new_tokens or 0 for finding in report.findings),
        "noise": report.noise,
        "findings": [finding.as_dict() for finding in report.findings if finding.verdict != Verdict.EQUAL],
    }


def table(lines: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One line for each comparison."""
    rows = []
    for engine, compared in lines.items():
        for name, found in compared.items():
            cells = [str(found["counts"].get(verdict, 0)) for verdict in SHOWN]
            rows.append([engine, name, *cells, largest_gap(found)])
    return markdown_table(["engine", "compared with plain", *SHOWN, "largest gap"], rows)


def versions(figures: dict[str, Any]) -> list[str]:
    """The versions of the peers that have lines, as list items."""
    return [
        f"- {engine}: {figures['versions'][name]}."
        for engine, name in (
            ("llama.cpp", "llama.cpp"),
            ("vLLM", "vllm"),
            ("transformers", "transformers"),
            ("OpenVINO GenAI", "openvino-genai"),
        )
        if figures["versions"].get(name)
    ]


def runs(figures: dict[str, Any]) -> list[str]:
    """The runs that the lines come from, with the engines of each, as list items; none if it is one run."""
    engines: dict[str, dict[str, None]] = {}
    for engine, lines in figures["lines"].items():
        for line in lines.values():
            engines.setdefault(line.get("where", ""), {})[engine] = None
    if len(engines) < 2:
        return []
    return [f"- Run of {'; '.join(names)}: {where or 'not recorded'}." for where, names in engines.items()]


def largest_gap(line: dict[str, Any]) -> str:
    """The largest gap of a line's differences in nats; "" without differences."""
    gaps = [each["gap"] for each in line["findings"] if each["gap"] is not None]
    return f"{max(gaps):.2g}" if gaps else ""


def _installed(package: str, python: str | None = None) -> str:
    try:
        if python is not None:
            code = f"from importlib.metadata import version; print(version({package!r}))"
            return subprocess.run(
                [python, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip()
        return version(package)
    except (PackageNotFoundError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llamacpp", metavar="PROGRAM", help="llama-server; llama-quantize is beside it")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--only", nargs="*", default=[], help="parts of engines' names; others are left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/results/text"), help="page and JSON")
    given = parser.parse_args()
    exit_on_signals()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default reserves half of the memory
    record = {**environment(), "model": "SmolLM2-135M-Instruct", "dtype": "several types of weights"}
    kept = given.out.with_suffix(".json")
    figures = json.loads(kept.read_text())["figures"] if kept.is_file() else {"lines": {}, "versions": {}}
    found = {name: _installed(name) for name in ("transformers", "openvino-genai")}
    if given.llamacpp:
        found["llama.cpp"] = build_of(Path(given.llamacpp))
    if given.vllm:
        found["vllm"] = _installed("vllm-cpu", given.vllm) or _installed("vllm", given.vllm)
    figures["versions"] |= {name: each for name, each in found.items() if each}
    with TemporaryDirectory() as folder:
        for line in _lines(given, Path(folder)):
            done = figures["lines"].setdefault(line.engine, {})
            if given.only and not any(part in line.engine for part in given.only):
                continue
            if done.get(line.compared, {}).get("where") == describe(record):
                continue
            try:
                done[line.compared] = figures_of(line.run()) | {"where": describe(record)}
            except (LookaheadError, OSError) as error:
                print(f"{line.engine}, {line.compared}: not compared: {reason_of(error)}", flush=True)
                continue
            _write(given, record, figures)
    _write(given, record, figures)


def _lines(given: argparse.Namespace, folder: Path) -> Iterator[Line]:
    default = lookahead.default_model()
    file = Path(default.folder) / default.file
    yield from process_lines()
    yield from server_lines(given.threads)
    if given.llamacpp:
        yield from llamacpp_lines(given.llamacpp, file, given.threads)
        if _installed("openvino-genai"):
            eight = folder / "SmolLM2-135M-Instruct.Q8_0.gguf"
            quantize = Path(given.llamacpp).with_name("llama-quantize")
            words = [quantize, "--allow-requantize", file, eight, "Q8_0"]
            subprocess.run(words, check=True, capture_output=True)
            yield from openvino_lines(eight)
    if given.vllm:
        export(file, folder / "model")
        yield from vllm_lines(given.vllm, folder / "model")


def _write(given: argparse.Namespace, record: dict[str, Any], figures: dict[str, Any]) -> None:
    figures["lines"] = {name: lines for name, lines in figures["lines"].items() if lines}
    body = [
        f"{len(PROMPTS)} prompts (code, arithmetic, prose, lists, other scripts), greedy, {TOKENS} new tokens, as",
        "`lookahead verify` judges them: *equal* is the same text; *rounding* is a difference where the plain token",
        f"was at most {BOUND:g} nats more likely, or twice the noise; *wrong* is a larger gap; *not judged* means",
        "that the plain side does not repeat its own text or gives no log-probabilities there. Each line compares",
        "with plain decoding of the same engine and weights; *plain, twice* shows what an engine repeats.",
        "",
        table(figures["lines"]),
        "",
        *versions(figures),
        *runs(figures),
    ]
    write_report(given.out, "Does the text change?", record, figures, body)


if __name__ == "__main__":
    main()

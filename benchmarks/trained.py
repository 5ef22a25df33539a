"""Trained and retrieval-based drafters alongside this library's own, at equal rows: S.

    python -m benchmarks.trained --data DIR --text DIR --medusa FILE --eagle FILE
    python -m benchmarks.trained --data DIR --text DIR --medusa FILE --rows 4,8 --methods adaptive,medusa

``--text`` is the default model's own output (saved by ``lookahead learn``), for the datastore of REST. All methods
are drafters in this library's decoding loop and decode the same prompts greedily. A completion that differs from
plain decoding ends the run. Results in ``--records`` of this commit, these settings and these weights are not
measured again.

Assisted generation with a draft model is transformers' own loop instead, in fp32, compared with its own greedy
decoding; its draft model is a copy of the model with the first third of the layers.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

import lookahead
from lookahead.bench.methods import ModelUnderTest, RunOptions
from lookahead.bench.record import environment
from lookahead.core import Drafter, LookaheadError
from lookahead.drafters import Adaptive, Lookahead, Plain, PromptLookup
from lookahead.drafters.adaptive.heads import find_head
from lookahead.learning.text_parts import Folder
from lookahead.records import RecordWriter, read_records

from .datasets import load_workload
from .drafters.eagle import Eagle, EagleDrafter
from .drafters.medusa import Medusa, MedusaDrafter
from .drafters.rest import Datastore, Rest
from .drafters.static_tree import SHAPES, StaticTree
from .origin import require_one_origin
from .page import write_report
from .peers import HuggingFace
from .report import markdown_table

OPEN = ("writing", "roleplay", "humanities", "stem")
#: The paper's window, n-gram and candidates for a number of rows, (W + G)(N - 1).
PAPER = {4: (1, 3, 1), 8: (2, 3, 2), 16: (4, 3, 4), 64: (8, 5, 8)}
#: Fields that identify a result in the records.
KEYS = ("model", "dtype", "prompts", "new_tokens", "workload", "method", "rows", "commit", "weights", "reads")
#: Method -> (name, what it reads).
ABOUT = {
    "adaptive": ("adaptive, the default", "the text, base table"),
    "adaptive with head": ("adaptive, `head=auto`", "the text, base table, light head (3.0M numbers)"),
    "static tree": ("static tree, SpecInfer's form", "the same light head alone"),
    "eagle": ("EAGLE-style layer", "one decoder layer (3.8M)"),
    "medusa": ("Medusa-1", "three heads (15.2M)"),
    "rest": ("REST", "datastore: own text, Python's standard library"),
    "prompt lookup": ("prompt lookup", "the text"),
    "lookahead": ("the paper's lookahead", "its window and n-grams"),
    # SmolLM2-135M has no smaller sibling.
    "draft model": (
        "transformers' assisted generation",
        "a copy with a third of the layers, not trained further",
    ),
}
#: Methods with trained weights.
WEIGHTED = ("adaptive with head", "static tree", "eagle", "medusa")
#: The method that decodes in transformers' loop, and its largest number of rows: 63 drafted tokens take 63 passes.
DRAFT_MODEL = "draft model"
MOST_CHAIN = 8


def prompts_of(data: Path, size: int) -> dict[str, list[Any]]:
    """Open questions and code to complete, by workload. The priors and the head were fitted to other prompts."""
    questions = [prompt for prompt in load_workload("mt-bench", data=data) if prompt.category in OPEN]
    code = load_workload("humaneval", data=data)[::24]
    return {"prose": questions[::3][:size], "code": code[: -(-7 * size // 12)]}


def datastore(llm: Any, text: Path) -> Datastore:
    """The model's own output, and the modules of Python's standard library."""
    own = (each.completion for each in Folder(text, scan=False).read())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = (llm.tokenizer(file.read_text(errors="ignore")).input_ids for file in files)
    return Datastore([*own, *code])


def weights_of(file: Path | None) -> dict[str, str]:
    """A digest of a method's weights, and what their file says about the training; empty without a file."""
    if file is None or not file.is_file():
        return {"weights": "", "training": ""}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    with safe_open(file, "numpy") as opened:
        about = json.loads((opened.metadata() or {}).get("about", "{}"))
    training = ""
    if about:
        epochs = about["settings"]["epochs"]
        times = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
        training = f"{about['tokens']:,} tokens, {times}, {about['seconds']:,} s"
    return {"weights": digest, "training": training}


def require_weights(files: dict[str, Path | None]) -> None:
    """Raise SystemExit unless every method has the file of its weights."""
    for method, file in files.items():
        if file is None or not file.is_file():
            raise SystemExit(
                f"error: {method} needs a file of trained weights, got {file}; train it or leave it out of --methods"
            )


def reads_of(llm: Any, text: Path) -> dict[str, str]:
    """Digests of the model's base table, for adaptive, and of the model's own text, for REST."""
    table = ModelUnderTest.of(llm).learned().get("table", "")
    digest = hashlib.sha256()
    for part in Folder(text, scan=False).parts():
        digest.update(part.read_bytes())
    return {"adaptive": table, "adaptive with head": table, "rest": digest.hexdigest()[:12]}


class Measurement:
    """The model, and the files of the methods, which are loaded on first use.

    Attributes:
        weights: method -> digest and training of its weights, and a digest of the table or text that it reads.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.llm = lookahead.load(args.model)
        head = find_head(self.llm.model.shape.name)
        files = {"adaptive with head": head, "static tree": head, "eagle": args.eagle, "medusa": args.medusa}
        require_weights({method: files[method] for method in args.methods if method in WEIGHTED})
        reads = reads_of(self.llm, args.text)
        self.weights = {
            method: {**weights_of(files.get(method)), "reads": reads.get(method, "")}
            for method in args.methods
        }
        self.heads = cache(lambda: Medusa.load(args.medusa))
        self.eagle = cache(lambda: Eagle.load(args.eagle, self.llm.model))
        self.datastore = cache(lambda: datastore(self.llm, args.text))
        self.assisted = cache(lambda: DraftModel(args.model))
        self._plain = dict[tuple[str, str], list[int]]()
        self.methods: dict[str, Callable[[int], Drafter]] = {
            "adaptive": lambda rows: Adaptive(rows=rows),
            "adaptive with head": lambda rows: Adaptive(rows=rows, head="auto"),
            "static tree": lambda rows: StaticTree(SHAPES[rows]),
            "eagle": lambda rows: EagleDrafter(rows, self.eagle()),
            "medusa": lambda rows: MedusaDrafter(rows, self.heads()),
            "rest": lambda rows: Rest(rows, self.datastore()),
            "prompt lookup": lambda rows: PromptLookup(max_drafted=rows - 1),
            "lookahead": lambda rows: Lookahead(*PAPER[rows]),
        }

    def decode(self, method: str, rows: int, prompt: Any, new_tokens: int) -> Run:
        """The steps of a method on a prompt.

        Raises:
            SystemExit: the tokens differ from those of plain decoding.
        """
        chat = [{"role": "user", "content": prompt.turns[0]}]
        ids = self.llm.encode(chat)
        if method == DRAFT_MODEL:
            plain, drafted = self.assisted().decode(ids, rows, new_tokens)
        else:
            key = prompt.workload, prompt.id
            if key not in self._plain:
                self._plain[key] = self._decode(ids, Plain(), new_tokens).tokens
            plain, drafted = self._plain[key], self._decode(ids, self.methods[method](rows), new_tokens)
        if plain != drafted.tokens:
            raise SystemExit(f"{method}, {rows} rows: the text of {prompt.id} differs from plain decoding")
        return drafted

    def _decode(self, ids: Sequence[int], drafter: Drafter, new_tokens: int) -> Run:
        result = self.llm.generate(ids, drafter=drafter, max_new_tokens=new_tokens)
        return Run(result.tokens, result.stats.steps, result.stats.rows)


class Run(NamedTuple):
    """Tokens of a completion, and the steps and their rows after the prefill."""

    tokens: list[int]
    steps: int
    rows: int


class Assisted(HuggingFace):
    """Assisted generation of transformers, greedy."""

    def __init__(self, draft_model: Any) -> None:
        super().__init__("hf-greedy")
        self.draft_model = draft_model

    def arguments(self, model: ModelUnderTest, length: int) -> dict[str, Any]:
        return {"assistant_model": self.draft_model}


class DraftModel:
    """Assisted generation of transformers, whose draft model is a copy of the model with fewer layers.

    Args:
        path: the model; None for the default model.
        share: the part of the layers that the draft model keeps.
    """

    def __init__(self, path: str | None, share: float = 1 / 3) -> None:
        llm = lookahead.load(path, dtype="float32", drafter="off")
        self._model = ModelUnderTest.of(llm)
        draft = copy.deepcopy(llm.model.module)
        layers = draft.get_decoder().layers
        kept = max(1, round(share * len(layers)))
        draft.get_decoder().layers = layers[:kept]
        draft.config.num_hidden_layers = kept
        # A fixed number of tokens in every pass.
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        self._draft = draft

    def decode(self, ids: Sequence[int], rows: int, new_tokens: int) -> tuple[list[int], Run]:
        """Tokens of transformers' greedy decoding, and its assisted generation with ``rows - 1`` drafted tokens."""
        self._draft.generation_config.num_assistant_tokens = rows - 1
        options = RunOptions(max_new_tokens=new_tokens)
        outcomes = [
            method.decode(self._model, ids, options)
            for method in (HuggingFace("hf-greedy"), Assisted(self._draft))
        ]
        plain, drafted = outcomes
        return plain.tokens, Run(drafted.tokens, drafted.stats.steps, drafted.stats.rows)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each method, number of rows and workload."""
    measurement = Measurement(args)
    about = {**environment(), "model": measurement.llm.name, "dtype": measurement.llm.dtype}
    about["new_tokens"] = args.new_tokens
    records = read_records(args.records, "s", "method")
    known = {tuple(line.get(key) for key in KEYS): line for line in records}
    prompts = prompts_of(args.data, args.prompts)
    lines = []
    for rows, workload, method in product(args.rows, prompts, args.methods):
        line = {**about, "prompts": args.prompts, "workload": workload, "method": method, "rows": rows}
        line |= measurement.weights[method]
        done = known.get(tuple(line.get(key) for key in KEYS))
        if done is not None:
            lines.append(done)
            continue
        if method == DRAFT_MODEL and rows > MOST_CHAIN:
            continue
        runs = [measurement.decode(method, rows, prompt, args.new_tokens) for prompt in prompts[workload]]
        steps = sum(run.steps for run in runs)
        line |= {
            "s": sum(len(run.tokens) - 1 for run in runs) / steps,
            "steps": steps,
            "mean_rows": sum(run.rows for run in runs) / steps,
        }
        print(
            f"{workload} {method} {rows} rows: S {line['s']:.3f}, {line['mean_rows']:.1f} rows a step",
            flush=True,
        )
        with RecordWriter(args.records, append=True) as writer:
            writer.write(line)
        lines.append(line)
    return lines


def body(lines: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """A description of the methods, and the tables of S."""
    by = {(line["workload"], line["method"], line["rows"]): line for line in lines}
    trained = {line["method"]: line.get("training") for line in lines}
    methods = []
    for method in args.methods:
        training = (trained.get(method) or "-") if method in WEIGHTED else "none"
        methods.append([*ABOUT[method], training])
    heads = ["method", "reads", "training"]
    shapes = ", ".join(str(PAPER[rows]) for rows in args.rows)
    text = [
        f"Greedy, {args.new_tokens} tokens, {args.prompts} open questions of MT-Bench and "
        f"{-(-7 * args.prompts // 12)} functions of HumanEval: too few for intervals, so small differences are "
        "noise. Every method drafts in this library's loop, on the compiled CPU path, except transformers' assisted "
        "generation (fp32); every text equals plain decoding. A "
        f"step has at most so many rows; the paper's lookahead has (W, N, G) = {shapes}.",
        "",
        markdown_table(heads, methods, texts=3),
        "",
        "All heads were trained on the model's own output.",
        "",
    ]
    for workload, title in (("prose", "Open questions"), ("code", "Code")):
        table = []
        for method in args.methods:
            some = [by.get((workload, method, rows)) for rows in args.rows]
            cells = ["-" if line is None else f"{line['s']:.2f}" for line in some]
            table.append([ABOUT[method][0], *cells])
        heads = ["method", *(f"{rows} rows" for rows in args.rows)]
        text += [f"## {title}", "", markdown_table(heads, table, texts=1), ""]
    return text


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="default: the library's default model")
    add("--data", type=Path, required=True)
    add("--text", type=Path, required=True)
    add("--medusa", type=Path, default=Path("build/medusa.safetensors"))
    add("--eagle", type=Path, default=Path("build/eagle.safetensors"))
    add("--prompts", type=int, default=12, help="open questions; 7/12 as many functions")
    add("--rows", type=lambda text: [int(k) for k in text.split(",")], default=[4, 8, 16, 64])
    add("--methods", type=lambda text: text.split(","), default=list(ABOUT))
    add("--new-tokens", type=int, default=128)
    add("--records", type=Path, default=Path("build/results/trained.jsonl"))
    add("--out", type=Path, default=Path("build/results/trained"))
    args = parser.parse_args(words)
    for option, given, known in (("--methods", args.methods, ABOUT), ("--rows", args.rows, PAPER)):
        unknown = [each for each in given if each not in known]
        if unknown:
            parser.error(f"{option} must be some of {', '.join(map(str, known))}, got {unknown[0]}")
    args.records.parent.mkdir(parents=True, exist_ok=True)
    try:
        lines = measure(args)
        require_one_origin(lines)
    except LookaheadError as error:
        raise SystemExit(f"error: {error}") from None
    print(
        write_report(
            args.out,
            "Trained and retrieval-based drafters at equal rows",
            lines[-1],
            lines,
            body(lines, args),
        )
    )


if __name__ == "__main__":
    main()

"""``lookahead verify``: is the output exact, here, with this model and this dtype?"""

# ruff: noqa: RUF009
from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import SettingsError
from ..engine.fields import Given, option
from ..engine.options import TAKES, TRIPLE, DraftOptions, LoadOptions, Options
from .batch import read_jobs
from .console import diverged, note
from .options import load_model, read_bytes, takes

if TYPE_CHECKING:
    from ..engine.compare import Comparison
    from ..engine.llm import LLM

#: Built-in prompts: code, sums, prose, lists, other scripts, and text that invites loops.
PROMPTS = (
    'def quicksort(items):\n    """Return the items in ascending order."""\n    if',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "import json\nimport argparse\n\n\ndef main():",
    "Question: A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?\nAnswer:",
    "Once upon a time there was a lighthouse keeper who",
    "1, 2, 3, 4, 5, 6,",
    "Größe, café, naïve, 東京, Привет",
    "for i in range(10):\n    print(i)\nfor j in range(10):",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Given):
    """What to decode, and what to compare with."""

    prompt: list[str] | None = option(None, "In place of the built-in ones; may be given several times.")
    input: Path | None = option(None, 'JSON lines of {"id", "prompt"} or {"id", "input_ids"}.')
    reference: str = option(
        "plain",
        "Compare with our own plain decoding, or with model.generate of transformers (greedy).",
        metavar="plain|generate",
    )
    json: bool = option(False, "One JSON object in place of text.")


@takes(without=("parallel_timeout", "warm"), max_new_tokens=64, seed=0)
def verify(*, task: Task, options: Options, draft: DraftOptions, load: LoadOptions) -> None:
    """Decode prompts by a method and plainly, and compare token for token.

    Exit status 1 where float32 or float64 differs. In shorter formats rounding may flip near ties: the gap
    between the two best logits says whether it was one.
    """
    reference = task.reference
    if task.prompt and task.input is not None:
        raise SettingsError("--prompt and --input cannot be given together; use one of them")
    if reference not in ("plain", "generate"):
        raise SettingsError(f"--reference must be plain or generate, got {reference!r}")
    others = options.keywords().keys() - {"max_new_tokens", "seed"}
    if reference == "generate" and others:
        raise SettingsError(
            "--reference generate is for greedy decoding as it comes; leave "
            f"{', '.join(sorted('--' + name.replace('_', '-') for name in others))} out, or use --reference plain"
        )
    if draft.method == "autoregressive" and reference == "plain":
        raise SettingsError(
            "--method autoregressive is plain decoding itself; compare it with --reference generate"
        )
    method, config = draft.resolve()
    if method == "adaptive":  # the most drafting, not what pays: it is the drafts that are examined
        config = {"budget": False} | (config or {})
    prompts = list(task.prompt or PROMPTS) if task.input is None else _read(task.input)
    llm = load_model(load, method, config)
    comparisons = [_compare(llm, item, reference, options) for item in prompts]
    runs = [
        {key: c.as_dict()[key] for key in ("equal", "first_divergence", "gap", "steps")}
        | {"new_tokens": len(c.ours.tokens)}
        for c in comparisons
    ]
    report = {
        "model": llm.name,
        "dtype": llm.dtype,
        "device": str(llm.model.device),
        "method": llm.method,
        "lookahead": list(llm.config.triple) if TAKES.get(llm.method, TRIPLE) == TRIPLE else None,
        "reference": reference,
        "probe": llm.probe.mode,
        "equal": sum(run["equal"] for run in runs),
        "runs": len(runs),
        "tokens": sum(run["new_tokens"] for run in runs),
        "prompts": runs,
    }
    if task.json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        _show(prompts, report)
        if llm.probe.mode == "plain":
            note(llm.probe.reason, "yellow")
    raise typer.Exit(diverged(llm, [run["equal"] for run in runs]))


def _read(source: Path) -> list[Any]:
    """The prompts of a file, of which every line must be good."""
    jobs = read_jobs(read_bytes(source, "--input"))
    for job in jobs:
        if job.error is not None:
            raise SettingsError(f"{source}: {job.error}")
    if not jobs:
        raise SettingsError(f"--input must hold at least one prompt, got none in {source}")
    return [job.prompt for job in jobs]


def _compare(llm: LLM, prompt: Any, reference: str, options: Options) -> Comparison:
    from ..engine.compare import compare, decode_plainly, reference_tokens

    ids, given = llm.encode(prompt), options.keywords()
    ours = llm.generate(ids, **given)
    if reference == "plain":
        return compare(llm, ours, decode_plainly(llm, ids, ours.seed, given))
    return compare(llm, ours, replace(ours, tokens=reference_tokens(llm, ids, options.max_new_tokens)))


def _show(prompts: list[Any], report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "equal", "tokens", "steps", "differs at", "logit gap"):
        table.add_column(name, justify="left" if name in ("prompt", "equal") else "right", no_wrap=True)
    for prompt, run in zip(prompts, report["prompts"], strict=True):
        differs, gap = run["first_divergence"], run["gap"]
        table.add_row(
            Text(" ".join(str(prompt).split())[:32]),
            "[green]yes[/]" if run["equal"] else "[red]no[/]",
            str(run["new_tokens"]),
            str(run["steps"]),
            "" if differs is None else str(differs),
            "" if gap is None else f"{gap:.2e}",
        )
    Console().print(table)
    reference = "plain decoding" if report["reference"] == "plain" else "model.generate"
    triple = f" {tuple(report['lookahead'])}" if report["lookahead"] else ""
    typer.echo(
        f"{report['equal']} of {report['runs']} runs equal to {reference} over {report['tokens']} tokens: "
        f"{report['model']}, {report['dtype']}, {report['device']}, {report['method']}{triple}"
    )

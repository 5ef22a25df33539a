"""``lookahead verify``: is the output exact on this machine, with this model and dtype?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import Adaptive, Plain
from ..core import SettingsError
from ..option import flag_of
from ..options import DraftOptions, LoadOptions, Options
from ..records import as_line
from .adapter import with_options
from .console import diverged, note
from .shared import Json, load_model

if TYPE_CHECKING:
    from ..llm import LLM

#: Built-in prompts: code, arithmetic, prose, lists, other scripts, and a prompt that often makes models loop.
PROMPTS = [
    'def quicksort(items):\n    """Return the items in ascending order."""\n    if',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "import json\nimport argparse\n\n\ndef main():",
    "Question: A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?\nAnswer:",
    "Once upon a time there was a lighthouse keeper who",
    "1, 2, 3, 4, 5, 6,",
    "Größe, café, naïve, 東京, Привет",
    "for i in range(10):\n    print(i)\nfor j in range(10):",
]
REFERENCE = "Compare with this library's plain decoding, or with model.generate of transformers (greedy)."


@with_options(without=("parallel_timeout",), max_new_tokens=64, seed=0)
def verify(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt instead of the built-in ones; may be repeated."),
    ] = None,
    reference: Annotated[str, typer.Option(help=REFERENCE, metavar="plain|generate")] = "plain",
    as_json: Json = False,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> None:
    """Decode prompts with a drafter and with plain decoding, and compare the completions token for token.

    Exit status 1 if completions differ in float32 or float64, or on a path that promises equal bits. Elsewhere in 16
    bits, rounding may resolve near ties differently; the gap between the two largest logits shows whether it was a
    near tie.
    """
    # Check the options.
    if reference not in ("plain", "generate"):
        raise SettingsError(f"--reference must be plain or generate, got {reference!r}")
    others = options.keywords().keys() - {"max_new_tokens", "seed"}
    if reference == "generate" and others:
        raise SettingsError(
            "--reference generate is for greedy decoding without other options; omit "
            f"{', '.join(sorted(map(flag_of, others)))}, or use --reference plain"
        )
    # The drafter to verify.
    drafter = draft.resolve()
    if isinstance(drafter, Plain) and reference == "plain":
        raise SettingsError("--drafter plain is plain decoding; compare it with --reference generate")
    if isinstance(drafter, Adaptive):  # draft as much as possible, because this command tests drafting
        drafter = replace(drafter, rows=drafter.most_rows)
    # Compare completions, then single rows bit by bit.
    llm = load_model(load, drafter)
    prompts = prompt or PROMPTS
    runs = [_compare(llm, text, reference, options) for text in prompts]
    from ..equivalence import bit_equal_rows

    target = llm.target()
    same, rows = bit_equal_rows(target)
    # Report, and exit with 1 if completions must be equal and are not.
    report = {
        "model": llm.name,
        "dtype": llm.dtype,
        "device": llm.model.device,
        "drafter": str(llm.drafter),
        "reference": reference,
        "probe": llm.model.probe.mode,
        "path": target.path,
        "promise": target.promise,
        "bit_equal_rows": [same, rows],
        "equal": sum(run["equal"] for run in runs),
        "runs": len(runs),
        "tokens": sum(run["new_tokens"] for run in runs),
        "prompts": runs,
    }
    if as_json:
        typer.echo(as_line(report), nl=False)
    else:
        _show(prompts, report)
        if not llm.model.probe.drafts:
            note(llm.model.probe.reason, "yellow")
    raise typer.Exit(diverged(llm, [run["equal"] for run in runs], same_path=reference == "plain"))


def _compare(llm: LLM, prompt: str, reference: str, options: Options) -> dict[str, Any]:
    """Decode a prompt with the drafter and with the reference, and compare."""
    from .compare import compare, plainly, reference_tokens

    ids = llm.encode(prompt)
    given = options.keywords()
    ours = llm.generate(ids, **given)
    if reference == "plain":
        other = llm.generate(ids, **plainly(ours.seed, given))
    else:
        other = replace(ours, tokens=reference_tokens(llm, ids, options.max_new_tokens))
    comparison = compare(llm, ours, other).as_dict()
    kept = {key: comparison[key] for key in ("equal", "first_divergence", "gap", "steps")}
    return kept | {"new_tokens": len(ours.tokens)}


def _show(prompts: list[str], report: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "equal", "tokens", "steps", "differs at", "logit gap"):
        table.add_column(name, justify="left" if name in ("prompt", "equal") else "right", no_wrap=True)
    for prompt, run in zip(prompts, report["prompts"], strict=True):
        equal = "[green]yes[/]" if run["equal"] else "[red]no[/]"
        where = ("", "") if run["equal"] else (str(run["first_divergence"]), f"{run['gap']:.2e}")
        text = Text(" ".join(prompt.split())[:32])
        table.add_row(text, equal, str(run["new_tokens"]), str(run["steps"]), *where)
    Console().print(table)
    same, rows = report["bit_equal_rows"]
    typer.echo(
        f"{same} of {rows} rows of a tree are bit-identical to single-row steps: {report['path']} path"
        + (f", {report['promise']}" if report["promise"] else "")
    )
    reference = "plain decoding" if report["reference"] == "plain" else "model.generate"
    typer.echo(
        f"{report['equal']} of {report['runs']} runs equal to {reference} over {report['tokens']} tokens: "
        f"{report['model']}, {report['dtype']}, {report['device']}, {report['drafter']}"
    )

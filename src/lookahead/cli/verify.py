"""``lookahead verify``: is the output exact, here, with this model and this dtype?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from . import options as opt
from .console import note

if TYPE_CHECKING:
    from ..engine import LLM
    from ..engine.compare import Comparison

app = typer.Typer(add_completion=False)

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


@app.command()
def verify(
    model: opt.Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="In place of the built-in ones; may be given several times.")
    ] = None,
    input_: Annotated[
        Path | None, typer.Option("--input", help='JSON lines of {"id", "prompt"} or {"id", "input_ids"}.')
    ] = None,
    reference: Annotated[
        str,
        typer.Option(
            help="Compare with our own plain decoding, or with model.generate of transformers (greedy).",
            metavar="plain|generate",
        ),
    ] = "plain",
    max_new_tokens: opt.MaxNewTokens = 64,
    method: opt.Method = None,
    lookahead: opt.Triple = None,
    window_size: opt.WindowSize = None,
    ngram_size: opt.NgramSize = None,
    guess_set_size: opt.GuessSetSize = None,
    preset: opt.Preset = None,
    max_rows: opt.MaxRows = None,
    sources: opt.Sources = None,
    no_budget: opt.NoBudget = False,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
) -> None:
    """Decode prompts by a method and plainly, and compare token for token.

    Exit status 1 where float32 or float64 differs. In shorter formats rounding may flip near ties: the gap
    between the two best logits says whether it was one.
    """
    from .generate import check_options, diverged

    if prompt and input_ is not None:
        raise SettingsError("--prompt and --input cannot be given together; use one of them")
    if reference not in ("plain", "generate"):
        raise SettingsError(f"--reference must be plain or generate, got {reference!r}")
    if reference == "generate" and (temperature or repetition_penalty is not None):
        raise SettingsError(
            "--reference generate is for greedy decoding without penalties; "
            "leave --temperature and --repetition-penalty out, or use --reference plain"
        )
    if method == "autoregressive" and reference == "plain":
        raise SettingsError(
            "--method autoregressive is plain decoding itself; compare it with --reference generate"
        )
    method, config = opt.settings(
        method, lookahead, window_size, ngram_size, guess_set_size, preset, max_rows, sources, no_budget
    )
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    if method == "adaptive":  # the most drafting, not what pays: it is the drafts that are examined
        config = {"budget": False} | (config or {})
    check_options(options)
    prompts = _prompts(prompt, input_)
    llm = opt.load_model(
        model, dtype=dtype, device=device, threads=threads, revision=revision,
        trust_remote_code=trust_remote_code, method=method, config=config,
    )  # fmt: skip
    comparisons = [_compare(llm, item, reference, options) for item in prompts]
    status = diverged(llm, comparisons)
    if as_json:
        typer.echo(json.dumps(_as_json(llm, reference, comparisons), ensure_ascii=False))
    else:
        _show(llm, prompts, reference, comparisons)
    raise typer.Exit(status)


def _prompts(prompt: list[str] | None, source: Path | None) -> list[Any]:
    if prompt:
        return list(prompt)
    if source is None:
        return list(PROMPTS)
    from .records import read_jobs

    jobs = read_jobs(opt.read_text(source, "--input").encode())
    for job in jobs:
        if job.error is not None:
            raise SettingsError(f"{source}: {job.error}")
    if not jobs:
        raise SettingsError(f"--input must hold at least one prompt, got none in {source}")
    return [job.prompt for job in jobs]


def _compare(llm: LLM, prompt: Any, reference: str, options: dict[str, Any]) -> Comparison:
    from dataclasses import replace

    from ..engine.compare import compare, judge, reference_tokens

    if reference == "plain":
        return compare(llm, llm.generate(prompt, **options), prompt, **options)
    ids = llm.encode(prompt)
    ours = llm.generate(ids, **options)
    tokens = reference_tokens(llm, ids, options["max_new_tokens"])
    return judge(llm, ours, replace(ours, tokens=tokens))


def _as_json(llm: LLM, reference: str, comparisons: list[Comparison]) -> dict[str, Any]:
    return {
        "model": llm.name,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "method": llm.method,
        "lookahead": list(llm.config.triple) if opt.TAKES.get(llm.method, opt.FIXED) == opt.FIXED else None,
        "reference": reference,
        "probe": llm.probe.mode,
        "equal": sum(c.equal for c in comparisons),
        "runs": len(comparisons),
        "tokens": sum(len(c.ours.tokens) for c in comparisons),
        "prompts": [
            {key: c.as_dict()[key] for key in ("equal", "first_divergence", "gap")}
            | {"new_tokens": len(c.ours.tokens), "steps": c.ours.stats.steps}
            for c in comparisons
        ],
    }


def _show(llm: LLM, prompts: list[Any], reference: str, comparisons: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "tokens", "steps", "equal", "differs at", "logit gap"):
        table.add_column(name, justify="left" if name in ("prompt", "equal") else "right", no_wrap=True)
    for prompt, c in zip(prompts, comparisons, strict=True):
        shown = prompt if isinstance(prompt, str) else f"{len(c.ours.prompt_tokens)} tokens"
        table.add_row(
            Text(" ".join(shown.split())[:32]),
            str(len(c.ours.tokens)),
            str(c.ours.stats.steps),
            "[green]yes[/]" if c.equal else "[red]no[/]",
            "" if c.first_divergence is None else str(c.first_divergence),
            "" if c.gap is None else f"{c.gap:.2e}",
        )
    Console().print(table)
    equal = sum(c.equal for c in comparisons)
    report = _as_json(llm, reference, comparisons)
    typer.echo(
        f"{equal} of {len(comparisons)} runs equal to "
        f"{'plain decoding' if reference == 'plain' else 'model.generate'} over {report['tokens']} tokens: "
        f"{llm.name}, {report['dtype']}, {report['device']}, {llm.method}"
        + (f" {tuple(report['lookahead'])}" if report["lookahead"] else "")
    )
    if llm.probe.mode != "tree":
        note(llm.probe.reason, "yellow")

"""``lookahead verify``: is the output exact, of a local model or of a server?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import Adaptive, Plain
from ..core import SettingsError
from ..core.target import BIT_EQUAL, CHECKED
from ..option import flag_of
from ..options import DraftOptions, LoadOptions, Options
from ..records import as_line
from ..referee import BOUND, SHOWN, Finding, Verdict, shown_prompt, status, verdict_of
from .adapter import with_options
from .batch import read_jobs
from .console import note
from .findings import counted, show
from .shared import Json, load_model, read_bytes
from .verify_rows import verify_rows
from .verify_server import AT_ONCE, Asked, verify_server

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


#: Largest gap that is called rounding in float32 and float64.
ACCURATE_BOUND = 1e-3
SERVERS = "Servers"


def _server(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SERVERS, **more)


@with_options(without=("parallel_timeout", "rows"), max_new_tokens=64, seed=0)
def verify(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt instead of the built-in ones; may be repeated."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help='Prompts as JSON lines, each with "prompt", "messages" or "input_ids"; - is stdin.'
        ),
    ] = None,
    reference: Annotated[str, typer.Option(help=REFERENCE, metavar="plain|generate")] = "plain",
    bound: Annotated[
        float | None,
        typer.Option(
            help=f"Largest gap in nats that is called rounding. [default: {BOUND:g}, two steps of bfloat16 logits; "
            f"{ACCURATE_BOUND:g} for local models in float32]",
            min=0.0,
        ),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="Instead of completions, compare the logits of steps of 2 to 64 rows with single rows.",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 after rounding.")] = False,
    as_json: Json = False,
    url: Annotated[
        str | None,
        _server("--url", help="Verify this OpenAI-compatible server; MODEL is then its name for the model."),
    ] = None,
    against: Annotated[
        str | None,
        _server("--against", help="Compare with this server, which does not speculate.", metavar="URL"),
    ] = None,
    with_fields: Annotated[
        str | None,
        _server("--with", help="Request fields that turn speculation on, as JSON.", metavar="JSON"),
    ] = None,
    without_fields: Annotated[
        str | None, _server("--without", help="Request fields that turn it off, as JSON.", metavar="JSON")
    ] = None,
    batch: Annotated[
        int | None,
        _server(
            "--batch",
            help=f"Compare prompts asked one by one with this many requests at once. [default: {AT_ONCE}, if no "
            "other comparison is asked for]",
            min=2,
        ),
    ] = None,
    repeat: Annotated[bool, _server("--repeat", help="Compare the server with itself.")] = False,
    samples: Annotated[
        int,
        _server("--samples", help="Sampled completions of each prompt and side, if texts differ.", min=10),
    ] = 200,
    api_key: Annotated[
        str | None, _server("--api-key", help="The key of the servers.", envvar="LOOKAHEAD_API_KEY")
    ] = None,
    timeout: Annotated[float, _server("--timeout", help="Seconds to wait for an answer.", min=0.001)] = 300.0,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> None:
    """Does drafting change the text? Compare completions of a local model, or of servers, token for token.

    A difference is rounding if the two best tokens are almost equally likely there, and wrong otherwise. On a path
    that promises equal bits, every difference is wrong.

    Exit status 0: equal, or rounding. 1: rounding, with --strict. 2: wrong. 3: not judged, because the server gives
    no log-probabilities or no answer.
    """
    prompts = _prompts(prompt, input)
    if url is not None:
        others = draft.keywords() | load.keywords()
        others.pop("path_or_id", None)
        others |= {"reference": reference} if reference != "plain" else {}
        others |= {"rows": rows} if rows else {}
        if others:
            named = ", ".join(sorted(map(flag_of, others)))
            raise SettingsError(
                f"{named} cannot be given with --url, because the server loads and drafts; omit it"
            )
        asked = Asked(url, against, with_fields, without_fields, batch, repeat, samples, api_key, timeout)
        model = None if load.path_or_id is None else str(load.path_or_id)
        found = verify_server(
            asked, model, prompts, options, BOUND if bound is None else bound, strict, as_json
        )
        raise typer.Exit(found)
    for name, value in {"--against": against, "--with": with_fields, "--without": without_fields}.items():
        if value is not None:
            raise SettingsError(f"{name} needs --url, which is not given")
    if batch or repeat:
        raise SettingsError(f"{'--batch' if batch else '--repeat'} needs --url, which is not given")
    if rows:
        raise typer.Exit(verify_rows(load_model(load, Plain()), as_json))
    raise typer.Exit(_verify_model(prompts, reference, bound, strict, as_json, options, draft, load))


def _prompts(given: list[str] | None, file: Path | None) -> list[Any]:
    """The prompts: given, from a file, or the built-in ones.

    Raises:
        SettingsError: both are given, the file cannot be used, or a prompt is empty.
    """
    if file is None:
        prompts: list[Any] = list(given or PROMPTS)
    elif given:
        raise SettingsError("--prompt and --input cannot be given together; use one of them")
    else:
        jobs = read_jobs(read_bytes(file, "--input"))
        for job in jobs:
            if job.error is not None:
                raise SettingsError(f"--input: {job.error}")
        prompts = [job.prompt for job in jobs]
    if not prompts or not all(prompts):
        raise SettingsError(
            "every prompt must have text, and there must be one; one is empty, or there is none"
        )
    return prompts


def _verify_model(
    prompts: list[Any],
    reference: str,
    bound: float | None,
    strict: bool,
    as_json: bool,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> int:
    """Verify a local model. Returns the exit status."""
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
    target = llm.target()
    guaranteed = reference == "plain" and target.guarantee in (BIT_EQUAL, CHECKED)
    allowed = BOUND if llm.model.probe.half else ACCURATE_BOUND
    if bound is not None:
        allowed = bound
    runs = [_compare(llm, text, reference, options, None if guaranteed else allowed) for text in prompts]
    findings = [finding for finding, _ in runs]
    from ..equivalence import bit_equal_rows

    same, rows = bit_equal_rows(target)
    # Report.
    report = {
        "model": llm.name,
        "dtype": llm.dtype,
        "device": llm.model.device,
        "drafter": str(llm.drafter),
        "reference": reference,
        "probe": llm.model.probe.mode,
        "path": target.path,
        "guarantee": target.guarantee,
        "bit_equal_rows": [same, rows],
        "bound": 0.0 if guaranteed else allowed,
        "equal": sum(finding.verdict is Verdict.EQUAL for finding in findings),
        "runs": len(runs),
        "tokens": sum(finding.new_tokens or 0 for finding in findings),
        "prompts": [finding.as_dict() | {"steps": steps} for finding, steps in runs],
    }
    if as_json:
        typer.echo(as_line(report), nl=False)
    else:
        _show(findings, report)
        if not llm.model.probe.drafts:
            note(llm.model.probe.reason, "yellow")
    return status((finding.verdict for finding in findings), strict)


def _compare(
    llm: LLM, prompt: Any, reference: str, options: Options, bound: float | None
) -> tuple[Finding, int]:
    """Decode a prompt with the drafter and with the reference, and compare. Returns the finding and the steps.

    Args:
        bound: the largest gap that is called rounding; None if bits must be equal.
    """
    from .compare import compare, plainly, reference_tokens

    ids = llm.encode(prompt)
    given = options.keywords()
    ours = llm.generate(ids, **given)
    if reference == "plain":
        other = llm.generate(ids, **plainly(ours.seed, given))
    else:
        other = replace(ours, tokens=reference_tokens(llm, ids, options.max_new_tokens))
    comparison = compare(llm, ours, other)
    shown = shown_prompt(prompt)
    index, gap = comparison.first_divergence, comparison.gap
    if index is None or gap is None:
        return Finding(shown, Verdict.EQUAL, len(ours.tokens)), ours.stats.steps
    why = ""
    if bound is None:
        verdict, why = Verdict.WRONG, "this path promises equal bits"
    elif options.temperature and llm.model.probe.half:
        verdict, why = Verdict.NOT_JUDGED, "sampled: the gap of the logits does not decide"
    else:  # a third token needs a larger gap than the two best have
        verdict = verdict_of(gap, bound) if comparison.second and not options.temperature else Verdict.WRONG
    before, plain_text, other_text = (
        llm.tokenizer.decode(tokens)
        for tokens in (other.tokens[:index], other.tokens[index:], ours.tokens[index:])
    )
    finding = Finding(
        shown,
        verdict,
        len(ours.tokens),
        index,
        gap,
        at_least=not comparison.second,
        before=before[-SHOWN:],
        plain=plain_text[:SHOWN],
        other=other_text[:SHOWN],
        plain_token=llm.tokenizer.decode(other.tokens[index : index + 1]),
        other_token=llm.tokenizer.decode(ours.tokens[index : index + 1]),
        why=why,
    )
    return finding, ours.stats.steps


def _show(findings: list[Finding], report: dict[str, Any]) -> None:
    show(findings)
    same, rows = report["bit_equal_rows"]
    typer.echo(
        f"{same} of {rows} rows of a tree are bit-identical to single-row steps: {report['path']} path"
        + (f", {report['guarantee']}" if report["guarantee"] else "")
    )
    reference = "plain decoding" if report["reference"] == "plain" else "model.generate"
    typer.echo(
        f"{report['equal']} of {report['runs']} runs equal to {reference} over {report['tokens']} tokens "
        f"({counted(findings)}): {report['model']}, {report['dtype']}, {report['device']}, {report['drafter']}"
    )

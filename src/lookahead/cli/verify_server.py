"""``lookahead verify --url``: does speculation, or a batch, change the text of a server?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from ..core import SettingsError
from ..option import flag_of
from ..options import Options
from ..records import as_line
from ..referee import (
    ERROR_RATE,
    NoAnswer,
    Report,
    Server,
    Side,
    compare_greedy,
    compare_sampled,
    status,
)
from .console import problem, progress_bar
from .findings import counted, show

#: Options of completions that OpenAI's API has, and their names there.
FIELDS = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
#: Requests at once if no other side is given.
AT_ONCE = 16


@dataclass(frozen=True)
class Asked:
    """The options of ``verify`` that only servers have."""

    url: str
    against: str | None
    with_fields: str | None
    without_fields: str | None
    batch: int | None
    repeat: bool
    samples: int
    api_key: str | None
    timeout: float


def verify_server(
    asked: Asked,
    model: str | None,
    prompts: Sequence[Any],
    options: Options,
    bound: float,
    strict: bool,
    as_json: bool,
) -> int:
    """Compare both sides. Returns the exit status."""
    fields = _fields(options)
    sampled = bool(fields.get("temperature"))
    plain, other, compared, repeat = _sides(asked, model)
    runs = 2 if sampled else 1 + repeat + -(-other.at_once // len(prompts))
    try:
        with progress_bar() as bar:
            task = bar.add_task("", total=None if sampled else runs * len(prompts))

            def done() -> None:
                bar.advance(task)

            if sampled:
                seed = options.seed or 0
                report = compare_sampled(plain, other, prompts, fields, seed, asked.samples, done)
            else:
                greedy = {"temperature": 0.0} | fields
                report = compare_greedy(plain, other, prompts, greedy, bound, repeat, done)
    except NoAnswer as error:
        problem(str(error))
        return 3
    _print(asked, other.server.model, report, compared, as_json)
    return status((finding.verdict for finding in report.findings), strict)


def _print(asked: Asked, model: str, report: Report, compared: str, as_json: bool) -> None:
    findings = report.findings
    tokens = sum(finding.new_tokens or 0 for finding in findings)
    if as_json:
        record: dict[str, Any] = {
            "model": model,
            "url": asked.url,
            "against": asked.against,
            "compared": compared,
        }
        record |= {"bound": report.bound, "noise": report.noise, "tokens": tokens, "runs": len(findings)}
        record["equal"] = sum(finding.as_dict()["equal"] for finding in findings)
        record["prompts"] = [finding.as_dict() for finding in findings]
        typer.echo(as_line(record), nl=False)
        return
    show(findings)
    if report.bound is None:
        typer.echo(
            "texts that differ under one seed are judged by p, of a permutation test of chi-square on new samples; a "
            f"right server is called wrong with a probability of at most {ERROR_RATE:g}"
        )
    else:
        noise = "not known" if report.noise is None else f"{report.noise:.2g}"
        typer.echo(
            f"a gap of at most {report.bound:.3g} is called rounding; log-probabilities of repeated plain runs "
            f"differ by up to {noise}"
        )
    typer.echo(f"{counted(findings)}, of {len(findings)} prompts and {tokens} tokens: {model}, {compared}")


def _fields(options: Options) -> dict[str, Any]:
    """The request fields of these options.

    Raises:
        SettingsError: an option has no field in OpenAI's API.
    """
    given = {"max_new_tokens": options.max_new_tokens} | options.keywords()
    others = given.keys() - {*FIELDS, "seed"}
    if others:
        raise SettingsError(
            f"with --url, {', '.join(sorted(map(flag_of, others)))} cannot be given, because OpenAI's API has no "
            "such field; give the server's own field to both sides with --with and --without"
        )
    return {FIELDS[name]: value for name, value in given.items() if name in FIELDS}


def _sides(asked: Asked, model: str | None) -> tuple[Side, Side, str, bool]:
    """The plain side, the other side, what is compared, and whether the plain side is asked twice.

    Raises:
        SettingsError: the options contradict each other.
    """
    by_field = asked.with_fields is not None or asked.without_fields is not None
    ways = {"--against": asked.against, "--batch": asked.batch, "--repeat": asked.repeat}
    given = [name for name, value in ways.items() if value] + ["--with or --without"] * by_field
    if len(given) > 1 and not (given[0] == "--against" and given[1:] == ["--with or --without"]):
        raise SettingsError(f"{' and '.join(given)} cannot be given together; use one of them")

    server = Server(asked.url, model, asked.api_key, asked.timeout)
    plain = Side(server, _json(asked.without_fields, "--without"))
    other = Side(server, _json(asked.with_fields, "--with"))
    if asked.against:
        # Each server may have its own name for the model.
        plain = Side(Server(asked.against, None, asked.api_key, asked.timeout), plain.fields)
        return plain, other, f"{asked.url} against {asked.against}", True
    if by_field:
        return plain, other, "with and without fields", True
    if asked.repeat:
        return plain, other, "the same server twice", False
    many = asked.batch or AT_ONCE
    return plain, Side(server, {}, many), f"alone and among {many} at once", True


def _json(text: str | None, option: str) -> dict[str, Any]:
    """Request fields from JSON.

    Raises:
        SettingsError: it is not a JSON object.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SettingsError(f"{option} must be a JSON object of request fields, got {text!r}")
    return value

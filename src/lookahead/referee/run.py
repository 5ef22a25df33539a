"""Asks two sides for the same completions, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .client import REFUSED, Completion, NoAnswer, Prompt, Server
from .distribution import ERROR_RATE, p_value
from .judge import Finding, Verdict, judge, shown_prompt, spread

#: Tokens of a sampled completion in the test of distributions.
SAMPLED_TOKENS = 8

#: Called after each completion; ``bool`` does nothing.
Done = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Side:
    """How one side is asked.

    Attributes:
        server: the server.
        fields: fields of its requests.
        at_once: how many requests it is sent at once.
    """

    server: Server
    fields: Mapping[str, Any] = field(default_factory=dict)
    at_once: int = 1

    def ask(
        self, asked: Sequence[tuple[Prompt, Mapping[str, Any]]], logprobs: bool = False, done: Done = bool
    ) -> list[Completion]:
        """Complete each prompt with these fields. After an error, no request is started."""

        def one(pair: tuple[Prompt, Mapping[str, Any]]) -> Completion:
            completion = self.server.complete(pair[0], {**self.fields, **pair[1]}, logprobs)
            done()
            return completion

        pool = ThreadPoolExecutor(self.at_once)
        try:
            return list(pool.map(one, asked))
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of a run.

    Attributes:
        findings: one for each prompt.
        bound: the largest gap that was called rounding; None if sampled.
        noise: the largest difference of a log-probability between two plain runs; None if unknown.
    """

    findings: list[Finding]
    bound: float | None = None
    noise: float | None = None


def compare_greedy(
    plain: Side,
    other: Side,
    prompts: Sequence[Prompt],
    fields: Mapping[str, Any],
    bound: float,
    repeat: bool = True,
    done: Done = bool,
) -> Report:
    """Compare greedy completions of both sides.

    Args:
        plain: the side that is right.
        other: the side to judge. It is not asked for log-probabilities, because they turn off speculation in some
            servers.
        prompts: the prompts.
        fields: fields of all requests.
        bound: the largest gap that is called rounding. Where two plain runs differ by more, that counts.
        repeat: whether the plain side is asked twice, to see what it repeats.
    """
    asked = [(prompt, fields) for prompt in prompts]
    right, logprobs = _with_logprobs(plain, asked, done)
    again = plain.ask(asked, logprobs, done) if repeat else right
    noise = max(map(spread, right, again)) if repeat and logprobs else None
    # A gap is a difference of two log-probabilities, each of which may be off by the noise.
    bound = max(bound, 2 * (noise or 0.0))
    copies = -(-other.at_once // len(asked))
    found = other.ask(asked * copies, False, done)
    findings = []
    for i, prompt in enumerate(prompts):
        shown = shown_prompt(prompt)
        repeated = judge(shown, right[i], again[i], bound)
        judged = [judge(shown, right[i], each, bound) for each in found[i :: len(asked)]]
        worst = max(judged, key=lambda finding: SEVERITY.index(finding.verdict))
        if repeated.verdict is Verdict.WRONG and worst.verdict is not Verdict.EQUAL:
            worst = Finding(shown, Verdict.NOT_JUDGED, why="the plain side does not repeat its own text")
        findings.append(worst)
    return Report(findings, bound, noise)


#: Verdicts from the best to the worst.
SEVERITY = (Verdict.EQUAL, Verdict.ALIKE, Verdict.ROUNDING, Verdict.NOT_JUDGED, Verdict.WRONG)


def compare_sampled(
    plain: Side,
    other: Side,
    prompts: Sequence[Prompt],
    fields: Mapping[str, Any],
    seed: int,
    samples: int,
    done: Done = bool,
) -> Report:
    """Compare sampled completions of both sides.

    With one seed, both sides may answer the same text: such prompts are equal. Speculation by rejection sampling
    keeps only the distribution, so the others are sampled ``samples`` times with different seeds, and the
    distributions of their first tokens are compared (``distribution``), with ``ERROR_RATE`` over all prompts.
    """
    asked = [(prompt, {**fields, "seed": seed}) for prompt in prompts]
    pairs = list(zip(plain.ask(asked, False, done), other.ask(asked, False, done), strict=True))
    differ = [i for i, (a, b) in enumerate(pairs) if a.text != b.text]
    findings = [
        Finding(shown_prompt(p), Verdict.EQUAL, b.count) for p, (_, b) in zip(prompts, pairs, strict=True)
    ]
    for i in differ:
        short = {**fields, "max_tokens": SAMPLED_TOKENS}
        seeds = [(prompts[i], {**short, "seed": seed + 1 + k}) for k in range(2 * samples)]
        one, two = plain.ask(seeds[:samples], False, done), other.ask(seeds[samples:], False, done)
        p = p_value([each.text for each in one], [each.text for each in two], len(differ))
        verdict = Verdict.WRONG if p < ERROR_RATE / len(differ) else Verdict.ALIKE
        findings[i] = Finding(shown_prompt(prompts[i]), verdict, pairs[i][1].count, p=p)
    return Report(findings)


def _with_logprobs(
    side: Side, asked: Sequence[tuple[Prompt, Mapping[str, Any]]], done: Done
) -> tuple[list[Completion], bool]:
    """The completions, with log-probabilities unless the server refuses them, and whether it gives any."""
    try:
        completions = side.ask(asked, True, done)
    except NoAnswer as error:
        if error.status not in REFUSED or "logprob" not in str(error):
            raise
        return side.ask(asked, False, done), False
    return completions, any(completion.tokens for completion in completions)

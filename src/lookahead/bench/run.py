"""The measurement: all methods on the same prompts in one process, interleaved prompt by prompt.

For every repeat, prompt and turn, plain decoding comes first, because the other methods are compared with its output,
and the next turn follows it. The other methods come in a rotating order, so that drift of the machine affects all
alike. Before the measurement, each method decodes one prompt as a warm-up.

An error ends the run. A method of another library may return why it failed instead: the record then gives the reason,
and does not count as finished, so the next run tries again.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from ..core import first_divergence
from ..drafters import ngrams_of
from ..equivalence import host_row
from .methods import PLAIN, MakeMethods, Method, ModelUnderTest, Outcome, RunOptions, load_model, make_methods
from .record import Record, Records, environment, key_of
from .workloads import Prompt

#: Called with (finished records, total records, what comes next).
Progress = Callable[[int, int, str], None]
#: A completion loops if an n-gram of this size occurs twice.
LOOP_SIZE = 8


def run(
    methods: Sequence[str | Method],
    prompts: Iterable[Prompt | str | Sequence[int]],
    model: ModelUnderTest | None = None,
    options: RunOptions | None = None,
    records: Records | None = None,
    progress: Progress | None = None,
    make: MakeMethods = make_methods,
) -> list[Record]:
    """Measure and return one record per prompt, turn, method and repeat.

    Args:
        methods: names for ``make``, or methods; plain decoding is always measured.
        prompts: prompts of a workload, strings, or token ids.
        model: the model under test; None for the default model.
        options: how to decode.
        records: the folder from which finished records are read, and to which each new one is written immediately.
        progress: called before every record.
        make: makes the methods for a name.

    Raises:
        SettingsError: a method is unknown, or lacks a requirement.
    """
    # The model and the methods.
    model = model or load_model(dtype="float32")
    options = options or RunOptions()
    show = progress or (lambda done, total, what: None)
    measured: list[Method] = []
    for method in dict.fromkeys([PLAIN, *methods]):
        measured += [method] if isinstance(method, Method) else make(method, model, options.warm)
    # The fields that all records share, and the records of earlier runs.
    workload = [_as_prompt(number, prompt) for number, prompt in enumerate(prompts)]
    common = _common_fields(model, options)
    known = records.read() if records else []
    finished: dict[str, Record] = {record["key"]: record for record in known if not record.get("failed")}
    # Measure in the order of the plan.
    plan = list(_plan(workload, measured, options))
    result: list[Record] = []
    warmed_up = False
    #: Prompts with existing records, which a warm method decodes before its next record.
    unseen: dict[Method, list[list[int]]] = defaultdict(list)
    for repeat, number, turn, method in plan:
        # Plain decoding begins a turn.
        prompt = workload[number]
        if method is measured[0]:
            if not turn:
                answers: list[str] = []
                if not number or prompt.workload != workload[number - 1].workload:
                    # Two workloads may share prompts, and a warm method must not have seen the prompt itself.
                    unseen.clear()
                    for each in measured:
                        each.forget()
            tokens = prompt.tokens(model.tokenizer, answers)
            reference: list[int] | None = None
        # A finished record with the same key is reused.
        show(len(result), len(plan), f"{prompt.id}, {method.label} {method.state}")
        earlier = [(p.id, p.ids) for p in workload[:number] if p.workload == prompt.workload]
        name = method.label, method.state, method.settings
        # With the prompt's text alone, the key would not change with the tokenizer or the chat template.
        decoded = tokens, sorted(model.eos)
        key = key_of(
            common, asdict(prompt), turn, name, repeat, earlier if method.state == "warm" else None, decoded
        )
        fits = tokens and len(tokens) + options.max_new_tokens <= model.max_positions
        record: Record | None = finished.get(key)
        # Otherwise measure it, or record that the prompt does not fit.
        if record is None:
            if fits and not warmed_up:
                for each in measured:
                    show(len(result), len(plan), f"warm-up: {each.label}")
                    each.decode(model, tokens, options)
                    each.forget()
                warmed_up = True
            record = {
                **_identifying_fields(key, repeat, prompt, turn, method),
                "prompt_tokens": len(tokens),
                **common,
            }
            if fits:
                for missed in unseen.pop(method, []):
                    method.decode(model, missed, options)
                outcome = method.decode(model, tokens, options)
                if isinstance(outcome, str):
                    record |= {"skipped": outcome, "failed": True}
                else:
                    record |= _figures(model, tokens, method, outcome, options, reference)
                    record["reference"] = prompt.reference if turn == len(prompt.turns) - 1 else None
            else:
                record["skipped"] = (
                    f"{len(tokens)} prompt tokens and {options.max_new_tokens} new tokens do not fit in "
                    f"{model.max_positions} positions"
                )
            if records is not None:
                records.append(record)
        elif method.state == "warm" and fits:
            unseen[method].append(tokens)
        result.append(record)
        # Plain decoding's output is the reference, and part of the next turn.
        if method is measured[0]:
            reference = record.get("tokens", [])
            answers.append(record.get("text", ""))
    show(len(plan), len(plan), "")
    return result


def _common_fields(model: ModelUnderTest, options: RunOptions) -> Record:
    """The fields that all records of a run share."""
    setup = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "seed")}
    common = {"model": model.name, "dtype": model.dtype, "path": model.target.path, "options": setup}
    files = {"weights": model.weights(), "learned": model.learned()}
    return common | {"loading": model.loading} | environment() | files


def _identifying_fields(key: str, repeat: int, prompt: Prompt, turn: int, method: Method) -> Record:
    """The fields identifying what a record measures, and when."""
    return {
        "schema": 1,
        "key": key,
        "repeat": repeat,
        "turn": turn,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "workload": prompt.workload,
        "prompt": prompt.id,
        "category": prompt.category,
        "method": method.label,
        "state": method.state,
        "settings": method.settings,
    }


def _plan(
    prompts: Sequence[Prompt], methods: Sequence[Method], options: RunOptions
) -> Iterator[tuple[int, int, int, Method]]:
    """(repeat, prompt number, turn, method), in the order of measurement."""
    plain, *all_others = methods
    for repeat in range(options.repeats):
        others = [each for each in all_others if not repeat or each.label not in options.once]
        for number, prompt in enumerate(prompts):
            shift = (number + repeat) % max(1, len(others))
            for turn in range(len(prompt.turns)):
                for method in (plain, *others[shift:], *others[:shift]):
                    yield repeat, number, turn, method


def _as_prompt(number: int, prompt: Prompt | str | Sequence[int]) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(str(number), "prompts", (prompt,))
    return prompt if isinstance(prompt, Prompt) else Prompt(str(number), "tokens", ("",), ids=tuple(prompt))


def loop_free(tokens: Sequence[int]) -> bool:
    """Whether no n-gram of ``LOOP_SIZE`` tokens occurs twice. Small models loop, and loops favour n-gram methods."""
    grams = list(map(tuple, ngrams_of(tokens, LOOP_SIZE)))
    return len(set(grams)) == len(grams)


def _figures(
    model: ModelUnderTest,
    prompt: list[int],
    method: Method,
    outcome: Outcome,
    options: RunOptions,
    reference: list[int] | None,
) -> Record:
    """The cost of one completion. ``reference`` is plain decoding's completion; None if this is plain decoding."""
    tokens = outcome.tokens
    stats = outcome.stats
    tokenizer = model.tokenizer
    record = {
        "new_tokens": len(tokens),
        "prefill_tokens": outcome.prefill_tokens,
        "steps": stats.steps,
        "rows": stats.rows if outcome.knows_rows else None,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": sum(outcome.step_seconds),
        "compression_ratio": stats.compression_ratio if stats.steps else None,
        "acceptance_rate": stats.acceptance_rate if stats.drafted else None,
        "acceptance_by_position": stats.acceptance_by_position,
        "loop_free": loop_free(tokens),
        "step_tokens": outcome.step_tokens,
        "step_rows": outcome.step_rows,
        "step_ms": [round(seconds * 1e3, 4) for seconds in outcome.step_seconds],
        "drafter": dict(stats.drafter),
        "tokens": tokens,
        "text": tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else "",
    }
    # Compare with plain decoding, token by token, if the method must give the same completion.
    comparable = method.comparable(options)
    plain = tokens if reference is None else reference
    divergence = first_divergence(tokens, plain) if comparable else None
    gap = None
    if divergence is not None and divergence < min(len(tokens), len(plain)):
        # The difference between the two logits at that position. Near 0, rounding explains the divergence.
        (scores,) = model.target.prefill([(0, prompt + plain[:divergence])])
        row = host_row(scores, 0)
        gap = float(row[plain[divergence]]) - float(row[tokens[divergence]])
        model.target.release(0)
    equal = divergence is None if comparable else None
    return record | {"equal": equal, "first_divergence": divergence, "logit_gap": gap}

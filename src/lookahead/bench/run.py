"""The measurement: all methods on the same prompts in one process, interleaved prompt by prompt.

For every repeat, every prompt and every turn: plain decoding first, whose text is what the others are
compared with and what the next turn follows, then the other methods in an order that rotates. So drift of
the machine hits all alike. Before that, each method decodes one prompt that is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import torch

from ..core.stats import first_divergence
from .methods import PLAIN, Method, RunOptions, make_methods
from .model import ModelUnderTest, load_model
from .record import Record, Records, environment, key_of, load_average
from .workloads import Prompt

#: told (records finished, records in all, what comes next)
Progress = Callable[[int, int, str], None]
LOOP = 8


def run(
    methods: Sequence[str | Method],
    prompts: Iterable[Prompt | str | Sequence[int]],
    model: ModelUnderTest | None = None,
    options: RunOptions | None = None,
    records: Records | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure and return one record per prompt, turn, method and repeat.

    Args:
        methods: names as in ``lookahead.bench.methods``, or ready methods; plain decoding is always among them.
        prompts: of a workload, or plain texts, or token ids.
        model: the model under test; the bundled one where None.
        options: how to decode.
        records: where records go as they are made, and where finished ones are taken from.
        progress: told before every record.

    Raises:
        SettingsError: an unknown method, or one that lacks what it needs.
    """
    return _Run(model or load_model(), methods, prompts, options or RunOptions(), records, progress).all()


def loop_free(tokens: Sequence[int], size: int = LOOP) -> bool:
    """Whether no n-gram of ``size`` tokens occurs twice: small models loop, and loops flatter n-gram methods."""
    grams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return len(set(grams)) == len(grams)


def _as_prompt(number: int, prompt: Prompt | str | Sequence[int]) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(str(number), "prompts", (prompt,))
    return prompt if isinstance(prompt, Prompt) else Prompt(str(number), "tokens", ("",), ids=tuple(prompt))


class _Run:
    """One call of ``run``; its arguments, and where it is."""

    def __init__(
        self,
        model: ModelUnderTest,
        methods: Sequence[str | Method],
        prompts: Iterable[Prompt | str | Sequence[int]],
        options: RunOptions,
        records: Records | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.options, self.records = model, options, records
        self.methods: list[Method] = []
        for one in dict.fromkeys([PLAIN, *methods]):
            self.methods += [one] if isinstance(one, Method) else make_methods(one, model, options.warm)
        self.prompts = [_as_prompt(number, prompt) for number, prompt in enumerate(prompts)]
        self.total = sum(len(p.turns) for p in self.prompts) * len(self.methods) * options.repeats
        self.progress = progress or (lambda done, total, what: None)
        told = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "seed")}
        setup = {"model": model.name, "dtype": model.dtype, "path": model.target.path, "options": told}
        self.common: Record = setup | environment()
        self.done = {record["key"]: record for record in records.read()} if records else {}
        self.result: list[Record] = []
        self.warmed_up = False
        #: What a warm method must still decode before its next record: prompts whose records were there already.
        self.unseen: dict[Method, list[list[int]]] = {}

    def all(self) -> list[Record]:
        for repeat in range(self.options.repeats):
            workload = None
            for number, prompt in enumerate(self.prompts):
                if prompt.workload != workload:
                    # Two workloads may share prompts, and a warm method must not have seen the prompt itself.
                    self._forget()
                    workload = prompt.workload
                self._prompt(number, prompt, repeat)
        self.progress(self.total, self.total, "")
        return self.result

    def _forget(self) -> None:
        self.unseen.clear()
        for method in self.methods:
            method.forget()

    def _prompt(self, number: int, prompt: Prompt, repeat: int) -> None:
        answers: list[str] = []
        plain, *others = self.methods
        shift = (number + repeat) % max(1, len(others))
        for turn in range(len(prompt.turns)):
            tokens = prompt.tokens(self.model.tokenizer, answers)
            reference: list[int] | None = None
            for method in [plain, *others[shift:], *others[:shift]]:
                self.progress(len(self.result), self.total, f"{prompt.id}, {method.label} {method.state}")
                key = self._key(number, turn, method, repeat)
                record = self.done.get(key)
                if record is None:
                    record = {"schema": 1, "key": key, "repeat": repeat, "turn": turn}
                    record |= self._measure(prompt, tokens, method, reference)
                    if turn == len(prompt.turns) - 1:
                        record["reference"] = prompt.reference
                    if self.records is not None:
                        self.records.append(record)
                elif method.state == "warm" and "skipped" not in record:
                    self.unseen.setdefault(method, []).append(tokens)
                self.result.append(record)
                if method is plain:
                    reference = record.get("tokens", [])
                    answers.append(record.get("text", ""))

    def _key(self, number: int, turn: int, method: Method, repeat: int) -> str:
        prompt, earlier = self.prompts[number], None
        if method.state == "warm":
            earlier = [(p.id, p.ids) for p in self.prompts[:number] if p.workload == prompt.workload]
        settings = [method.label, method.state, method.settings]
        return key_of(self.common, asdict(prompt), turn, settings, repeat, earlier)

    def _measure(
        self, prompt: Prompt, tokens: list[int], method: Method, reference: list[int] | None
    ) -> Record:
        """The record of one text, decoded now; ``reference`` is plain decoding's, None where this is it."""
        model, options = self.model, self.options
        record: Record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "workload": prompt.workload,
            "prompt": prompt.id,
            "category": prompt.category,
            "method": method.label,
            "state": method.state,
            "settings": method.settings,
            **self.common,
            "load": load_average(),
            "prompt_tokens": len(tokens),
        }
        if not tokens or len(tokens) + options.max_new_tokens > model.max_positions:
            record["skipped"] = (
                f"{len(tokens)} prompt tokens and {options.max_new_tokens} new ones do not fit in "
                f"{model.max_positions} positions"
            )
            return record
        self._prepare(method, tokens)
        outcome = method.decode(model, tokens, options)
        stats, text = outcome.stats, ""
        if model.tokenizer is not None:
            text = model.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
        record |= {
            "new_tokens": len(outcome.tokens),
            "prefill_tokens": outcome.prefill_tokens,
            "steps": stats.steps,
            "rows": stats.rows,
            "prefill_seconds": outcome.prefill_seconds,
            "decode_seconds": sum(outcome.step_seconds),
            "compression_ratio": stats.compression_ratio if stats.steps else None,
            "acceptance_rate": stats.acceptance_rate if stats.drafted else None,
            "acceptance_by_position": stats.acceptance_by_position,
            "loop_free": loop_free(outcome.tokens),
            "step_tokens": outcome.step_tokens,
            "step_rows": outcome.step_rows,
            "step_ms": [round(seconds * 1e3, 4) for seconds in outcome.step_seconds],
            "drafter": dict(stats.drafter),
            "tokens": outcome.tokens,
            "text": text,
        }
        plain = outcome.tokens if reference is None else reference
        return record | self._equality(method, tokens, outcome.tokens, plain)

    def _prepare(self, method: Method, tokens: list[int]) -> None:
        """Before anything is measured each method decodes once; a warm one also what it has missed."""
        if not self.warmed_up:
            for each in self.methods:
                self.progress(len(self.result), self.total, f"warm-up: {each.label}")
                each.decode(self.model, tokens, self.options)
                each.forget()
            self.warmed_up = True
        for earlier in self.unseen.pop(method, []):
            method.decode(self.model, earlier, self.options)

    def _equality(self, method: Method, prompt: list[int], tokens: list[int], plain: list[int]) -> Record:
        """Whether the text equals that of plain decoding; where not, how near a tie the model was."""
        if not method.comparable(self.options):
            return {"equal": None, "first_divergence": None, "logit_gap": None}
        place, gap = first_divergence(tokens, plain), None
        if place is not None and place < min(len(tokens), len(plain)) and self.model.model is not None:
            ids = torch.tensor([prompt + plain[:place]], device=self.model.model.device)
            with torch.no_grad():
                row = self.model.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            gap = float(row[plain[place]] - row[tokens[place]])
        return {"equal": place is None, "first_divergence": place, "logit_gap": gap}

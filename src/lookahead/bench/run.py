"""The measurement: all methods on the same prompts in one process, interleaved prompt by prompt.

For every repeat, every prompt and every turn: plain decoding first, whose text is what the others are
compared with and what the next turn follows, then the other methods in an order that rotates. So drift of
the machine hits all alike. Before that, each method decodes one prompt that is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..core import SettingsError
from ..core.stats import first_divergence
from .methods import PLAIN, Method, Outcome, RunOptions, make_methods
from .model import ModelUnderTest, load_model
from .record import SCHEMA, Record, Records, environment, key_of, load_average
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
    model = model if model is not None else load_model()
    options = options if options is not None else RunOptions()
    made: list[Method] = []
    for one in dict.fromkeys([PLAIN, *methods]):
        made += [one] if isinstance(one, Method) else make_methods(one, model, options.warm)
    several = [_as_prompt(number, prompt) for number, prompt in enumerate(prompts)]
    show = progress or (lambda done, total, what: None)
    return _Run(model, made, several, options, records, show).all()


def _as_prompt(number: int, prompt: Prompt | str | Sequence[int]) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(str(number), "prompts", (prompt,))
    return prompt if isinstance(prompt, Prompt) else Prompt(str(number), "tokens", ("",), ids=tuple(prompt))


def loop_free(tokens: Sequence[int], size: int = LOOP) -> bool:
    """Whether no n-gram of ``size`` tokens occurs twice: small models loop, and loops flatter n-gram methods."""
    grams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return len(set(grams)) == len(grams)


@dataclass
class _Run:
    model: ModelUnderTest
    methods: list[Method]
    prompts: list[Prompt]
    options: RunOptions
    records: Records | None
    progress: Progress

    def __post_init__(self) -> None:
        model, options = self.model, self.options
        self.common: dict[str, Any] = {
            "model": model.name,
            "dtype": model.dtype,
            "path": model.target.path,
            **environment(),
            "options": {
                name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "seed")
            },
        }
        self.result: list[Record] = []
        self.done = {record["key"]: record for record in self.records.read()} if self.records else {}
        self.keys = {
            (repeat, number, turn, method): self._key(number, turn, method, repeat)
            for repeat in range(options.repeats)
            for number, prompt in enumerate(self.prompts)
            for turn in range(len(prompt.turns))
            for method in self.methods
        }
        #: (repeat, workload, method) of which any record is missing
        self.incomplete = {
            (repeat, self.prompts[number].workload, method)
            for (repeat, number, _, method), key in self.keys.items()
            if key not in self.done
        }

    def all(self) -> list[Record]:
        self._warm_up()
        for repeat in range(self.options.repeats):
            for number, prompt in enumerate(self.prompts):
                # Two workloads may share prompts, and a warm method must not have seen the prompt itself.
                if not number or prompt.workload != self.prompts[number - 1].workload:
                    for method in self.methods:
                        method.forget()
                self._prompt(number, repeat)
        self.progress(len(self.keys), len(self.keys), "")
        return self.result

    def _tokens(self, prompt: Prompt, answers: list[str]) -> list[int]:
        if prompt.ids is None and self.model.tokenizer is None:
            raise SettingsError("texts need a tokenizer, and the model has none; pass token ids")
        return prompt.tokens(self.model.tokenizer, answers)

    def _too_long(self, tokens: list[int]) -> bool:
        return not tokens or len(tokens) + self.options.max_new_tokens > self.model.max_positions

    def _warm_up(self) -> None:
        """Each method decodes the first prompt that fits, without a record; nothing where all records are there."""
        for prompt in self.prompts:
            tokens = self._tokens(prompt, [])
            if self._too_long(tokens) or not self.incomplete:
                continue
            for method in self.methods:
                self.progress(0, len(self.keys), f"warm-up: {method.label}")
                method.decode(self.model, tokens, self.options)
            return

    def _key(self, number: int, turn: int, method: Method, repeat: int) -> str:
        prompt, seen = self.prompts[number], None
        if method.state == "warm":  # the prompts before this one, in order
            seen = [(p.id, p.ids) for p in self.prompts[:number] if p.workload == prompt.workload]
        return key_of(
            {
                **self.common,
                "prompt": [
                    prompt.workload,
                    prompt.id,
                    prompt.ids,
                    prompt.plain,
                    prompt.turns,
                    prompt.history,
                ],
                "turn": turn,
                "method": [method.label, method.state, method.settings],
                "repeat": repeat,
                "earlier": seen,
            }
        )

    def _prompt(self, number: int, repeat: int) -> None:
        prompt, answers = self.prompts[number], list[str]()
        plain, *others = self.methods
        shift = (number + repeat) % max(1, len(others))
        for turn in range(len(prompt.turns)):
            tokens = self._tokens(prompt, answers)
            reference: list[int] | None = None
            for method in [plain, *others[shift:], *others[:shift]]:
                what = f"{prompt.id}, {method.label} {method.state}"
                self.progress(len(self.result), len(self.keys), what)
                key = self.keys[repeat, number, turn, method]
                record = self.done.get(key)
                if record is None:
                    record = {"schema": SCHEMA, "key": key, "repeat": repeat, "turn": turn}
                    record |= self._measure(prompt, turn, tokens, method, reference)
                    if self.records is not None:
                        self.records.append(record)
                elif (repeat, prompt.workload, method) in self.incomplete and method.state == "warm":
                    method.decode(
                        self.model, tokens, self.options
                    )  # for the state that later prompts must find
                self.result.append(record)
                if method is plain:
                    reference = record.get("tokens", [])
                    answers.append(record.get("text", ""))

    def _measure(
        self, prompt: Prompt, turn: int, tokens: list[int], method: Method, reference: list[int] | None
    ) -> Record:
        """The record of one text, decoded now; ``reference`` is plain decoding's, None where this is it."""
        record = {
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
        if self._too_long(tokens):
            why = (
                f"{len(tokens)} prompt tokens and {self.options.max_new_tokens} new ones do not fit in "
                f"{self.model.max_positions} positions"
            )
            return {**record, "skipped": why}
        outcome = method.decode(self.model, tokens, self.options)
        record |= self._figures(outcome)
        plain = outcome.tokens if reference is None else reference
        record |= self._parity(method, tokens, outcome.tokens, plain)
        if turn == len(prompt.turns) - 1:
            record["reference"] = prompt.reference
        return record

    def _figures(self, outcome: Outcome) -> Record:
        tokenizer, stats = self.model.tokenizer, outcome.stats
        return {
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
            "text": tokenizer.decode(outcome.tokens, skip_special_tokens=True) if tokenizer else "",
        }

    def _parity(self, method: Method, prompt: list[int], tokens: list[int], plain: list[int]) -> Record:
        """Whether the text equals that of plain decoding; where not, how near a tie the model was."""
        if not method.comparable(self.options):
            return {"equal": None, "first_divergence": None, "logit_gap": None}
        place, gap = first_divergence(tokens, plain), None
        if place is not None and place < min(len(tokens), len(plain)) and self.model.model is not None:
            import torch

            ids = torch.tensor([prompt + plain[:place]], device=self.model.model.device)
            with torch.no_grad():
                row = self.model.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            gap = float(row[plain[place]] - row[tokens[place]])
        return {"equal": place is None, "first_divergence": place, "logit_gap": gap}

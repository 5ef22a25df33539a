"""The measurement: all methods on the same prompts in one process, interleaved prompt by prompt.

For every repeat, every prompt and every turn: plain decoding first, whose text is what the others are
compared with and what the next turn follows, then the other methods in an order that rotates. So drift of
the machine hits all alike. Before that, each method decodes one prompt that is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from ..core import SettingsError
from .methods import PLAIN, Method, Options, Outcome, Subject, make_methods
from .record import SCHEMA, Records, environment, key_of, load_average
from .workloads import Prompt

#: told (records finished, records in all, what comes next)
Progress = Callable[[int, int, str], None]
LOOP = 8


def run(
    methods: Sequence[str | Method],
    prompts: Iterable[Prompt | str | Sequence[int]],
    subject: Subject | None = None,
    options: Options | None = None,
    records: Records | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure and return one record per prompt, turn, method and repeat.

    Args:
        methods: names as in ``lookahead.bench.methods``, or ready methods; plain decoding is always among them.
        prompts: of a workload, or plain texts, or token ids.
        subject: the model; the bundled one where None.
        options: how to decode.
        records: where records go as they are made, and where finished ones are taken from.
        progress: told before every record.

    Raises:
        SettingsError: an unknown method, or one that lacks what it needs.
    """
    if subject is None:
        from .subject import load_subject

        subject = load_subject()
    options = options if options is not None else Options()
    made: list[Method] = []
    for one in dict.fromkeys([PLAIN, *methods]):
        made += [one] if isinstance(one, Method) else make_methods(one, subject, options.warm)
    return _Run(subject, made, _as_prompts(prompts), options, records, progress).all()


def _as_prompts(prompts: Iterable[Prompt | str | Sequence[int]]) -> list[Prompt | list[int]]:
    made: list[Prompt | list[int]] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            prompt = Prompt(str(number), "prompts", (prompt,))
        made.append(prompt if isinstance(prompt, Prompt) else list(prompt))
    return made


def loop_free(tokens: Sequence[int], size: int = LOOP) -> bool:
    """Whether no n-gram of ``size`` tokens occurs twice: small models loop, and loops flatter n-gram methods."""
    seen = set()
    for start in range(len(tokens) - size + 1):
        gram = tuple(tokens[start : start + size])
        if gram in seen:
            return False
        seen.add(gram)
    return True


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs; None where the texts are equal."""
    for index, (a, b) in enumerate(zip(tokens, plain, strict=False)):
        if a != b:
            return index
    return None if len(tokens) == len(plain) else min(len(tokens), len(plain))


class _Run:
    def __init__(
        self,
        subject: Subject,
        methods: list[Method],
        prompts: list[Prompt | list[int]],
        options: Options,
        records: Records | None,
        progress: Progress | None,
    ) -> None:
        self.subject = subject
        self.methods = methods
        self.prompts = prompts
        self.options = options
        self.records = records
        self.progress = progress or (lambda done, total, what: None)
        self.common: dict[str, Any] = {
            "model": subject.name,
            "dtype": subject.dtype,
            "path": subject.path,
            **environment(),
            "options": {
                name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k", "seed")
            },
        }
        self.result: list[dict[str, Any]] = []
        self.done: dict[str, dict[str, Any]] = {}
        turns = sum(len(p.turns) if isinstance(p, Prompt) else 1 for p in prompts)
        self.total = turns * len(methods) * options.repeats

    def all(self) -> list[dict[str, Any]]:
        if self.records is not None:
            self.records.mend()
            self.done = {record["key"]: record for record in self.records.read()}
        self._warm_up()
        for repeat in range(self.options.repeats):
            for method in self.methods:
                method.forget()
            for number, prompt in enumerate(self.prompts):
                # Two workloads may share prompts, and a warm method must not have seen the prompt itself.
                if number and self._workload(number) != self._workload(number - 1):
                    for method in self.methods:
                        method.forget()
                self._prompt(number, prompt, repeat)
        self.progress(self.total, self.total, "")
        return self.result

    def _tokens(self, prompt: Prompt | list[int], answers: list[str]) -> list[int]:
        if not isinstance(prompt, Prompt):
            return prompt
        if self.subject.tokenizer is None:
            raise SettingsError("texts need a tokenizer, and the subject has none; pass token ids")
        return prompt.tokens(self.subject.tokenizer, answers)

    def _too_long(self, tokens: list[int]) -> bool:
        return not tokens or len(tokens) + self.options.max_new_tokens > self.subject.max_positions

    def _warm_up(self) -> None:
        """Each method decodes the first unfinished prompt that fits, without a record."""
        for number, prompt in enumerate(self.prompts):
            tokens = self._tokens(prompt, [])
            if self._too_long(tokens) or self._finished(number, prompt):
                continue
            for method in self.methods:
                self.progress(0, self.total, f"warm-up: {method.label}")
                method.decode(self.subject, tokens, self.options)
            return

    def _key(self, number: int, prompt: Prompt | list[int], turn: int, method: Method, repeat: int) -> str:
        if isinstance(prompt, Prompt):
            what: Any = [prompt.workload, prompt.id, prompt.plain, prompt.turns, list(prompt.history)]
        else:
            what = ["tokens", number, prompt]
        return key_of(
            {**self.common, "prompt": what, "turn": turn, "method": method.label, "state": method.state,
             "settings": method.settings, "repeat": repeat, "earlier": self._earlier(number, method)}
        )  # fmt: skip

    def _earlier(self, number: int, method: Method) -> Any:
        """What a warm method has seen: the prompts before this one, in order."""
        if method.state != "warm":
            return None
        seen = [
            p for at, p in enumerate(self.prompts[:number]) if self._workload(at) == self._workload(number)
        ]
        return key_of({"seen": [p.id if isinstance(p, Prompt) else p for p in seen]})

    def _workload(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt.workload if isinstance(prompt, Prompt) else "tokens"

    def _finished(self, number: int, prompt: Prompt | list[int]) -> bool:
        turns = len(prompt.turns) if isinstance(prompt, Prompt) else 1
        return all(
            self._key(number, prompt, turn, method, repeat) in self.done
            for repeat in range(self.options.repeats)
            for turn in range(turns)
            for method in self.methods
        )

    def _prompt(self, number: int, prompt: Prompt | list[int], repeat: int) -> None:
        answers: list[str] = []
        for turn in range(len(prompt.turns) if isinstance(prompt, Prompt) else 1):
            plain, *others = self.methods
            shift = (number + repeat) % len(others) if others else 0
            tokens = self._tokens(prompt, answers)
            reference: list[int] | None = None
            for method in [plain, *others[shift:], *others[:shift]]:
                record = self._one(number, prompt, turn, tokens, method, repeat, reference)
                if method is plain:
                    reference = record.get("tokens", [])
                    answers.append(record.get("text", ""))

    def _one(
        self,
        number: int,
        prompt: Prompt | list[int],
        turn: int,
        tokens: list[int],
        method: Method,
        repeat: int,
        reference: list[int] | None,
    ) -> dict[str, Any]:
        """The record of one text: taken from the file, or measured and written."""
        what = f"{prompt.id if isinstance(prompt, Prompt) else number}, {method.label} {method.state}"
        self.progress(len(self.result), self.total, what)
        key = self._key(number, prompt, turn, method, repeat)
        if key in self.done:
            record = self.done[key]
            if (
                method.state == "warm"
                and "skipped" not in record
                and self._needed_later(number, method, repeat)
            ):
                # The state that later prompts must find is made again, without a record.
                method.decode(self.subject, tokens, self.options)
            self.result.append(record)
            return record
        record = {
            "schema": SCHEMA,
            "key": key,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "workload": self._workload(number),
            "prompt": prompt.id if isinstance(prompt, Prompt) else str(number),
            "category": prompt.category if isinstance(prompt, Prompt) else "",
            "turn": turn,
            "repeat": repeat,
            "method": method.label,
            "state": method.state,
            "settings": method.settings,
            **self.common,
            "load": load_average(),
            "prompt_tokens": len(tokens),
        }
        if self._too_long(tokens):
            record["skipped"] = (
                f"{len(tokens)} prompt tokens and {self.options.max_new_tokens} new ones do not fit in "
                f"{self.subject.max_positions} positions"
            )
        else:
            outcome = method.decode(self.subject, tokens, self.options)
            record |= self._figures(outcome)
            if reference is None:
                reference = outcome.tokens
            record |= self._parity(method, tokens, outcome.tokens, reference)
            if isinstance(prompt, Prompt) and turn == len(prompt.turns) - 1:
                record["reference"] = prompt.reference
        if self.records is not None:
            self.records.append(record)
        self.result.append(record)
        return record

    def _needed_later(self, number: int, method: Method, repeat: int) -> bool:
        return any(
            self._key(later, prompt, turn, method, repeat) not in self.done
            for later, prompt in enumerate(self.prompts)
            if later > number and self._workload(later) == self._workload(number)
            for turn in range(len(prompt.turns) if isinstance(prompt, Prompt) else 1)
        )

    def _figures(self, outcome: Outcome) -> dict[str, Any]:
        tokenizer = self.subject.tokenizer
        steps, size = len(outcome.step_tokens), sum(outcome.step_tokens)
        deepest = max(outcome.step_tokens, default=1)
        return {
            "new_tokens": len(outcome.tokens),
            "prefill_tokens": outcome.prefill_tokens,
            "steps": steps,
            "rows": sum(outcome.step_rows),
            "prefill_seconds": outcome.prefill_seconds,
            "decode_seconds": sum(outcome.step_seconds),
            "compression_ratio": size / steps if steps else None,
            "acceptance_by_position": [
                sum(tokens > place for tokens in outcome.step_tokens) / steps for place in range(1, deepest)
            ],
            "loop_free": loop_free(outcome.tokens),
            "step_tokens": outcome.step_tokens,
            "step_rows": outcome.step_rows,
            "step_ms": [round(seconds * 1e3, 4) for seconds in outcome.step_seconds],
            "drafter": outcome.drafter,
            "tokens": outcome.tokens,
            "text": tokenizer.decode(outcome.tokens, skip_special_tokens=True) if tokenizer else "",
        }

    def _parity(
        self, method: Method, prompt: list[int], tokens: list[int], plain: list[int]
    ) -> dict[str, Any]:
        """Whether the text equals that of plain decoding; where not, how near a tie the model was."""
        if not method.comparable(self.options):
            return {"equal": None, "first_divergence": None, "logit_gap": None}
        place = first_difference(tokens, plain)
        gap = None
        if place is not None and place < min(len(tokens), len(plain)) and self.subject.model is not None:
            import torch

            model = self.subject.model
            ids = torch.tensor([prompt + plain[:place]], device=model.device)
            with torch.no_grad():
                row = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            gap = float(row[plain[place]] - row[tokens[place]])
        return {"equal": place is None, "first_divergence": place, "logit_gap": gap}

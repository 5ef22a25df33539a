"""From a checked request to texts that the loop can decode: prompt, processors, chooser, drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from ..core import LookaheadConfig, SettingsError
from ..core.verify import as_choose
from ..drafters import METHODS
from ..engine.options import DraftOptions, Options
from .grammar import Grammars
from .guards import GuardedChoose, GuardedDrafter, LogProbs, guarded
from .loop import Event, Sequence
from .prediction import Predicted
from .protocol import Drafting, Generating, plain
from .settings import Settings

if TYPE_CHECKING:
    from ..engine.llm import LLM


@dataclass(slots=True)
class Choice:
    """One text of a request."""

    index: int
    sequence: Sequence
    prompt: list[int]
    logprobs: LogProbs | None
    predicted: Predicted | None


class Preparer:
    """What requests are prepared with.

    Attributes:
        context: tokens of the longest text that is taken: within the model's own, and short of where its rotary
            positions change, because sequences on both sides of that cannot share a pass.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm, self.settings, self._grammars = llm, settings, Grammars(llm)
        facts, asked = llm.probe.facts, settings.max_model_len or 4096
        boundary = facts.rope_boundary - 1 if facts is not None else asked
        self.context = min(asked, llm.context or asked, boundary)

    def warm_up(self) -> None:
        """Measure step times and compile, before the first request."""
        method, config = self.settings.drafting()
        self.llm.generate([1, 2, 3, 1, 2, 3], max_new_tokens=4, method=method, config=config)

    def encode(self, prompt: Any, param: str) -> list[int]:
        """Token ids of a prompt, with room for at least one more token.

        Raises:
            SettingsError: a prompt that cannot be taken.
        """
        ids = self.llm.encode(prompt)
        if len(ids) >= self.context:
            raise SettingsError(
                f"{param}: prompt and answer must fit the context of {self.context} tokens, "
                f"the prompt has {len(ids)}; shorten it"
            )
        return ids

    def choices(
        self,
        request: Generating,
        prompts: list[list[int]],
        deliver: Callable[[Choice, Event], None],
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        echo: bool = False,
        schema: tuple[dict[str, Any], str] | None = None,
    ) -> list[Choice]:
        """One text for each prompt and each of n.

        Args:
            deliver: told every event.
            logprobs: with so many best tokens each; None for none.
            echo: log-probabilities of the prompts, too.
            schema: of the JSON to be written, and the field that asks for it.

        Raises:
            SettingsError: a field that cannot be honoured.
        """
        n = request.n or 1
        if n * len(prompts) > self.settings.max_choices:
            raise SettingsError(
                f"n: a request may have {self.settings.max_choices} texts, got {n * len(prompts)}"
            )
        seed = random.getrandbits(62) if request.seed is None else request.seed
        made = []
        for index, ids in enumerate(ids for ids in prompts for _ in range(n)):
            options = self._options(request, ids, max_tokens, schema)
            entry = self.llm.begin(index, ids, options, seed + index if options.sampled else None)
            core, text = entry.request, entry.text
            recorder = LogProbs(as_choose(core.choose), logprobs) if logprobs is not None else None
            predicted = self._predicted(request)
            core.choose = GuardedChoose(recorder if recorder is not None else as_choose(core.choose))
            core.drafter = GuardedDrafter(core.drafter, predicted.tokens if predicted is not None else [])
            core.finished = guarded("the text", lambda token, text=text: "stop" if text.push(token) else None)
            core.read_prompt = recorder.read_prompt if recorder is not None and echo else None
            sequence = Sequence(core, text, monotonic() + self.settings.request_timeout)
            choice = Choice(index, sequence, ids, recorder, predicted)
            sequence.deliver = partial(deliver, choice)
            made.append(choice)
        return made

    def _options(
        self,
        request: Generating,
        ids: list[int],
        max_tokens: int | None,
        schema: tuple[dict[str, Any], str] | None,
    ) -> Options:
        temperature = 1.0 if request.temperature is None else request.temperature
        method, config = self._drafting(request.lookahead)
        processors = [self._bias(request.logit_bias)] if request.logit_bias else []
        if request.presence_penalty or request.frequency_penalty:
            processors.append(
                penalties(len(ids), request.presence_penalty or 0.0, request.frequency_penalty or 0.0)
            )
        if schema is not None:
            processors.append(self._grammars.json(*schema))
        room = self.context - len(ids)
        given = {
            "max_new_tokens": min(max_tokens or room, room),
            "temperature": temperature,
            "stop": request.stop or None,
            "repetition_penalty": request.repetition_penalty,
            "method": method,
            "config": config,
            "logits_processor": processors or None,
        }
        if temperature > 0:  # the best token is in any of these sets, so greedy needs none of them
            given |= {"top_p": request.top_p, "min_p": request.min_p or None}
            given["top_k"] = request.top_k if request.top_k and request.top_k > 0 else None
        return Options(**{name: value for name, value in given.items() if value is not None})

    def _bias(self, bias: dict[str, float]) -> Callable[[Any, Any], Any]:
        row = torch.zeros(self.llm.vocabulary)
        for token, value in bias.items():
            if not token.isdecimal() or int(token) >= self.llm.vocabulary:
                raise SettingsError(
                    f"logit_bias: token ids must be 0 to {self.llm.vocabulary - 1}, got {token!r:.40}"
                )
            row[int(token)] = value
        row = row.to(self.llm.model.device)
        return lambda ids, scores: scores + row

    def _predicted(self, request: Generating) -> Predicted | None:
        if request.prediction is None:
            return None
        text = plain(request.prediction.content)
        if self.llm.tokenizer is None:
            raise SettingsError(f"prediction: a text needs a tokenizer, and {self.llm.tokenizer_error}")
        return Predicted(list(self.llm.tokenizer(text, add_special_tokens=False).input_ids) if text else [])

    def _drafting(self, asked: Drafting | None) -> tuple[str, Any]:
        """(method, its settings), within the server's limits."""
        given = asked.model_dump(exclude_none=True, exclude={"stats", "trace"}) if asked is not None else {}
        if not given:
            return self.settings.drafting()
        if given.get("method", "adaptive") not in METHODS:
            raise SettingsError(
                f"lookahead.method must be one of {', '.join(METHODS)}, got {given['method']!r:.40}"
            )
        try:
            method, config = DraftOptions(**given).resolve()
        except SettingsError as error:  # these speak of options
            raise SettingsError(f"lookahead: {str(error).replace('--', '')}") from None
        if isinstance(
            config, LookaheadConfig
        ):  # what chooses the rows of a step itself is held to the budget
            rows = (config.window_size + config.guess_set_size) * (config.ngram_size - 1)
            if rows > self.settings.max_rows:
                raise SettingsError(
                    f"lookahead: a step may have {self.settings.max_rows} rows, and (W + G) (N - 1) is {rows}"
                )
        return method, config


def penalties(prompt_length: int, presence: float, frequency: float) -> Callable[[Any, Any], Any]:
    """OpenAI's penalties: off the logits of tokens that the text so far holds, prompt left out."""

    def process(ids: Any, scores: Any) -> Any:
        counts = torch.bincount(ids[0, prompt_length:], minlength=scores.shape[1])
        return scores - frequency * counts - presence * (counts > 0)

    return process

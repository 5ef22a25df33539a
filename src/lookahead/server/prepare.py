"""From a checked request to texts that the loop can decode: prompt, processors, chooser, drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from ..core import Drafter, LookaheadConfig, Request, SettingsError
from ..drafters import METHODS, OWN_SETTINGS, make_drafter
from ..engine.options import DraftOptions, Options
from ..engine.processors import make_process
from ..engine.text import TextStream
from ..sampling import SeededNoise, make_choose
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


@dataclass
class Preparer:
    """What requests are prepared with.

    Attributes:
        context: tokens of the longest text that is taken: within the model's own, and short of where its rotary
            positions change, because sequences on both sides of that cannot share a pass.
        times: step times for adaptive, shared by all; None where it chooses no rows by them.
    """

    llm: LLM
    settings: Settings
    context: int = field(init=False)
    times: Any = None
    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.llm)
        facts, asked = self.llm.probe.facts, self.settings.max_model_len or 4096
        boundary = facts.rope_boundary - 1 if facts is not None else asked
        self.context = min(asked, self.llm.context or asked, boundary)

    def warm_up(self) -> None:
        """Measure step times and compile, before the first request."""
        method, config = self.settings.drafting()
        if method == "adaptive":
            self.times = self.llm.warm_state(config=config).times
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
            process = self.grammars.json(*schema) if schema is not None else None
            length = min(max_tokens or self.context, self.context - len(ids))
            made.append(
                self._choice(index, request, ids, length, seed + index, process, logprobs, echo, deliver)
            )
        return made

    def _choice(
        self,
        index: int,
        request: Generating,
        ids: list[int],
        length: int,
        seed: int,
        grammar: Any,
        logprobs: int | None,
        echo: bool,
        deliver: Callable[[Choice, Event], None],
    ) -> Choice:
        llm, device = self.llm, self.llm.model.device
        options = self._options(request, len(ids), length, grammar)
        noise = None
        if options.sampled:
            noise = SeededNoise(seed, len(ids), llm.vocabulary, options.temperature, device)
        process = make_process(options, len(ids), llm.eos, llm.tokenizer, device)
        choose = make_choose(ids, process, noise)
        recorder = LogProbs(choose, min(logprobs, llm.vocabulary)) if logprobs is not None else None
        predicted = self._predicted(request)
        drafter = GuardedDrafter(self._drafter(request.lookahead), predicted.tokens if predicted else [])
        drafter.use_noise(noise)
        text = TextStream(llm.tokenizer, ids, options.stops)

        def finished(token: int) -> str | None:
            with guarded("the text"):
                return "stop" if token not in llm.eos and text.push(token) else None

        read = recorder.read_prompt if recorder is not None and echo else None
        guarded_choose = GuardedChoose(recorder if recorder is not None else choose)
        core = Request(ids, drafter, length, guarded_choose, llm.eos, finished, read)
        deadline = monotonic() + self.settings.request_timeout
        sequence = Sequence(core, text, lambda event: deliver(choice, event), deadline)
        choice = Choice(index, sequence, ids, recorder, predicted)
        return choice

    def _options(self, request: Generating, prompt_length: int, length: int, grammar: Any) -> Options:
        temperature = 1.0 if request.temperature is None else request.temperature
        given: dict[str, Any] = {
            "max_new_tokens": length,
            "temperature": temperature,
            "stop": request.stop or None,
        }
        given["repetition_penalty"] = request.repetition_penalty
        if temperature > 0:  # the best token is in any of these sets, so greedy needs none of them
            given["top_p"] = request.top_p
            given["top_k"] = request.top_k if request.top_k and request.top_k > 0 else None
            given["min_p"] = request.min_p or None
        processors = []
        if request.logit_bias:
            processors.append(self._bias(request.logit_bias))
        if request.presence_penalty or request.frequency_penalty:
            processors.append(
                penalties(prompt_length, request.presence_penalty or 0.0, request.frequency_penalty or 0.0)
            )
        given["logits_processor"] = [*processors, *([grammar] if grammar is not None else [])] or None
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

    def _drafter(self, asked: Drafting | None) -> Drafter:
        given = asked.model_dump(exclude_none=True, exclude={"stats", "trace"}) if asked is not None else {}
        if given.get("method", "adaptive") not in METHODS:
            raise SettingsError(
                f"lookahead.method must be one of {', '.join(METHODS)}, got {given['method']!r:.40}"
            )
        try:
            method, config = DraftOptions(**given).resolve() if given else self.settings.drafting()
            rows = 1  # a method that chooses the rows of a step itself is held to the budget
            if method not in OWN_SETTINGS:
                config = LookaheadConfig.of(
                    config if config is not None else LookaheadConfig.for_device(self.llm.model.device.type)
                )
                rows = (config.window_size + config.guess_set_size) * (config.ngram_size - 1)
        except SettingsError as error:  # these speak of options
            raise SettingsError(f"lookahead: {str(error).replace('--', '')}") from None
        if given and rows > self.settings.max_rows:
            raise SettingsError(
                f"lookahead: a step may have {self.settings.max_rows} rows here, and (W + G) (N - 1) is {rows}"
            )
        if self.llm.probe.mode != "tree":  # one row a step, so there is nothing to draft
            return make_drafter("autoregressive")
        pool = None
        if method == "adaptive":
            from ..drafters.adaptive import AdaptiveState

            pool = AdaptiveState(config, keep=False, times=self.times)
        return make_drafter(method, config, self.llm.vocabulary, pool)


def penalties(prompt_length: int, presence: float, frequency: float) -> Callable[[Any, Any], Any]:
    """OpenAI's penalties: off the logits of tokens that the text so far holds, prompt left out."""

    def process(ids: Any, scores: Any) -> Any:
        counts = torch.bincount(ids[0, prompt_length:], minlength=scores.shape[1])
        return scores - frequency * counts - presence * (counts > 0)

    return process

"""Turns a checked request into texts that the engine can decode: prompt, processors, chooser, drafter."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from ..core import Drafter, SettingsError
from ..core.verify import as_choose
from ..drafters import as_drafter
from ..engine.prompts import encode
from ..engine.results import Update
from ..llm import LLM
from ..options import Options
from .choice import Choice
from .grammar import Grammars
from .logprobs import LogProbs
from .prediction import Predicted
from .protocol import Generating, LookaheadFields, plain
from .settings import Settings


class Preparer:
    """Turns requests into choices that the loop can decode.

    Attributes:
        context: number of tokens in the longest text, prompt included. It is within the model's limit and below the
            length at which its rotary positions change, because sequences on both sides of it cannot share a pass.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm, self.settings, self._grammars = llm, settings, Grammars(llm)
        facts, asked = llm.probe.facts, settings.max_model_len or 4096
        boundary = facts.rope_boundary - 1 if facts is not None else asked
        self.context = min(asked, llm.context or asked, boundary)

    def warm_up(self) -> None:
        """Measure step times and compile, before the first request."""
        self.llm.generate([1, 2, 3, 1, 2, 3], max_new_tokens=4, drafter=self.settings.drafting())

    def encode(self, prompt: Any, param: str) -> list[int]:
        """Token ids of a prompt, with room for at least one more token.

        Raises:
            SettingsError: the prompt is not valid; ``param`` names its field.
        """
        llm = self.llm
        ids = encode(prompt, llm.tokenizer, llm.tokenizer_error, llm.vocabulary, None)
        if len(ids) >= self.context:
            raisable = self.settings.max_model_len is not None and self.context < (llm.context or 1 << 60)
            more = " or start the server with a larger --max-model-len" if raisable else ""
            raise SettingsError(
                f"{param}: the prompt must be shorter than this server's limit of {self.context} tokens for prompt "
                f"and answer together, got {len(ids)}; shorten it{more}"
            )
        return ids

    def choices(
        self,
        request: Generating,
        prompts: list[list[int]],
        deliver: Callable[[Update], None],
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        echo: bool = False,
        schema: tuple[dict[str, Any], str] | None = None,
    ) -> list[Choice]:
        """n texts for each prompt.

        Args:
            request: the checked fields.
            prompts: token ids.
            deliver: receives every update.
            max_tokens: largest number of tokens of a text; None for as many as fit.
            logprobs: number of most likely tokens to return with each log-probability; None for none at all.
            echo: whether to return log-probabilities of the prompts too.
            schema: the schema of the answer, and the field that requests it.

        Raises:
            SettingsError: a field that is not supported here.
        """
        n = request.n or 1
        if n * len(prompts) > self.settings.max_choices:
            raise SettingsError(
                f"n: a request may have at most {self.settings.max_choices} texts, got {n * len(prompts)}"
            )
        seed = random.getrandbits(62) if request.seed is None else request.seed
        choices = []
        for index, ids in enumerate(ids for ids in prompts for _ in range(n)):
            options = self._options(request, ids, max_tokens, schema)
            own_seed = seed + index if options.sampled else None
            decoded, text = self.llm.prepare(ids, options, own_seed)
            recorder = None
            if logprobs is not None:
                recorder = decoded.choose = LogProbs(as_choose(decoded.choose), logprobs)
                decoded.read_prompt = recorder.read_prompt if echo else None
            predicted = self._predicted(request, decoded.drafter)
            if predicted is not None:
                decoded.predicted = predicted.tokens
            deadline = monotonic() + self.settings.request_timeout
            choices.append(Choice(index, decoded, text, own_seed, deadline, deliver, recorder, predicted))
        return choices

    def _options(
        self,
        request: Generating,
        ids: list[int],
        max_tokens: int | None,
        schema: tuple[dict[str, Any], str] | None,
    ) -> Options:
        temperature = 1.0 if request.temperature is None else request.temperature
        processors = [self._bias(request.logit_bias)] if request.logit_bias else []
        if request.presence_penalty or request.frequency_penalty:
            processors.append(
                penalties(len(ids), request.presence_penalty or 0.0, request.frequency_penalty or 0.0)
            )
        if schema is not None:
            processors.append(self._grammars.json(*schema))
        room = self.context - len(ids)
        given: dict[str, Any] = {
            "max_new_tokens": min(max_tokens or room, room),
            "temperature": temperature,
            "stop": request.stop or None,
            "repetition_penalty": request.repetition_penalty,
            "drafter": self._drafting(request.lookahead),
            "logits_processor": processors or None,
        }
        if (
            temperature > 0
        ):  # greedy decoding needs none of these, because the most likely token passes all of them
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

    def _predicted(self, request: Generating, drafter: Drafter) -> Predicted | None:
        if request.prediction is None:
            return None
        if not drafter.uses_prediction:
            raise SettingsError(
                f"prediction: the drafter {drafter} does not use it; leave it out, or choose another drafter"
            )
        text = plain(request.prediction.content)
        if self.llm.tokenizer is None:
            raise SettingsError(f"prediction: a text needs a tokenizer, and {self.llm.tokenizer_error}")
        return Predicted(list(self.llm.tokenizer(text, add_special_tokens=False).input_ids) if text else [])

    def _drafting(self, requested: LookaheadFields | None) -> Drafter:
        """The drafter of a request, within the server's limits."""
        given = {}
        if requested is not None:
            given = requested.model_dump(exclude_none=True, exclude={"stats", "trace"})
        if not given:
            return self.settings.drafting()
        try:
            drafter = as_drafter(given)
        except SettingsError as error:
            raise SettingsError(f"lookahead: {error}") from None
        rows = drafter.max_step_rows  # None: the drafter adapts to the row budget
        if rows is not None and rows > self.settings.max_rows:
            raise SettingsError(
                f"lookahead: a step may have at most {self.settings.max_rows} rows, and {drafter} has {rows}"
            )
        return drafter


def penalties(prompt_length: int, presence: float, frequency: float) -> Callable[[Any, Any], Any]:
    """OpenAI's penalties: subtracted from the logits of tokens that occur in the text, not counting the prompt."""

    def process(ids: Any, scores: Any) -> Any:
        counts = torch.bincount(ids[0, prompt_length:], minlength=scores.shape[1])
        return scores - frequency * counts - presence * (counts > 0)

    return process

"""What is measured: our drafting methods beside transformers' and llama.cpp's own decoding, under one counter.

A method is named by a text such as ``hf-greedy``, ``prompt-lookup``, ``lookahead:15,5,15`` or
``lookahead:15,5,15:pool_from_prompt=0``; any name in ``lookahead.drafters.METHODS`` is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from ..core import Drafter, LookaheadConfig, NGramPool, Request, SettingsError, Stats, Target, decode
from ..drafters import METHODS, OWN_SETTINGS, make_drafter
from ..engine import Options
from ..engine.llm import KEEPS_STATE
from ..engine.processors import make_process
from ..sampling import SeededNoise, make_choose
from .method import LOOKUP_TOKENS, Method, Outcome, RunOptions, counted
from .model import ModelUnderTest

HUGGING_FACE = ("hf-greedy", "hf-sample", "hf-prompt-lookup")
LLAMA_CPP = ("llamacpp-greedy", "llamacpp-lookup")
PLAIN = "autoregressive"


def make_request(
    model: ModelUnderTest, prompt: Sequence[int], drafter: Drafter, options: RunOptions
) -> Request:
    """One text with our own loop; where it is sampled, the drafter is told of the noise."""
    noise = process = None
    if options.temperature:
        device = getattr(model.model, "device", None)
        noise = SeededNoise(options.seed, len(prompt), model.target.vocabulary, options.temperature, device)
        sampling = Options(temperature=options.temperature, top_k=options.top_k or None)
        process = make_process(sampling, len(prompt), model.eos, None, device)
    drafter.use_noise(noise)
    choose = make_choose(prompt, process, noise)
    return Request(prompt, drafter, options.max_new_tokens, choose, model.eos)


def timed_decode(target: Target, request: Request) -> Outcome:
    """Decode one text and note what every step gave and took.

    Raises:
        LookaheadError: what ended the text early.
    """
    last = perf_counter()
    outcome = Outcome([], Stats(), 0, 0.0)
    for step in decode(target, [request]):
        now = perf_counter()
        if step.tree is None:
            generation = step.generation
            outcome = Outcome(generation.tokens, generation.stats, len(step.tokens), now - last)
        else:
            outcome.step_tokens.append(len(step.tokens))
            outcome.step_rows.append(step.rows)
            outcome.step_seconds.append(now - last)
        last = now
    return outcome


class Drafted(Method):
    """One of ``lookahead.drafters.METHODS``, driven by the only loop; ``config`` as ``make_drafter`` takes it."""

    def __init__(self, name: str, config: Any, label: str, state: str) -> None:
        self.name, self.config, self.label, self.state = name, config, label, state
        self.settings = asdict(config) if isinstance(config, LookaheadConfig) else dict(config or {})
        self._kept: Any = None

    def forget(self) -> None:
        self._kept = None

    def _new_state(self, model: ModelUnderTest) -> Any:
        """What ``make_drafter`` takes as ``pool``. Step times are of the machine: no state forgets them."""
        if self.name == "lookahead":
            new = NGramPool(self.config.guess_set_size, self.config.max_pool_keys)
            return new if self.state == "warm" else None
        from ..drafters.adaptive import AdaptiveConfig, AdaptiveState, times_for

        config, times = AdaptiveConfig.of(self.config), None
        if config.budget and model.model is not None:
            times = times_for(model.model, model.target.path, lambda: model.target)
        return AdaptiveState(config, keep=self.state == "warm", times=times)

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        if self.state and self._kept is None:
            self._kept = self._new_state(model)
        drafter = make_drafter(self.name, self.config, model.target.vocabulary, self._kept)
        return timed_decode(model.target, make_request(model, prompt, drafter, options))


class HuggingFace(Method):
    """``model.generate`` of transformers; forward passes are counted by a hook, and tokens by a streamer."""

    def __init__(self, name: str) -> None:
        self.name = self.label = name
        self.settings = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-prompt-lookup" else {}

    def comparable(self, options: RunOptions) -> bool:
        """Only greedy texts: transformers draws from another stream of random numbers."""
        return not options.temperature and self.name != "hf-sample"

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        eos = sorted(model.eos) or None
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=options.max_new_tokens, eos_token_id=eos, pad_token_id=eos[0] if eos else 0,
            do_sample=self.name == "hf-sample" or (options.temperature > 0 and self.name != "hf-greedy"),
            **self.settings,
        )  # fmt: skip
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = options.temperature or 1.0, options.top_k, 1.0
        rows: list[int] = []
        sizes: list[int] = []
        times: list[float] = []

        class Clock:
            def put(self, tokens: Any) -> None:
                times.append(perf_counter())
                sizes.append(tokens.numel())

            def end(self) -> None:
                pass

        def count(module: Any, positional: Any, keywords: dict[str, Any]) -> None:
            rows.append(int(keywords["input_ids"].shape[1]))

        ids = torch.tensor([list(prompt)], device=model.model.device)
        mask = torch.ones_like(ids)
        torch.manual_seed(options.seed)
        hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            start = perf_counter()
            text = model.model.generate(ids, streamer=Clock(), attention_mask=mask, generation_config=config)
            end = perf_counter()
        finally:
            hook.remove()
        times = [start, *times[1:-1], end]  # what comes first is the prompt
        return counted(len(prompt), text[0, len(prompt) :].tolist(), rows[1:], sizes[1:], times)


def split_methods(texts: Sequence[str]) -> list[str]:
    """Names from a list such as ``hf-greedy,lookahead:15,5,15 jacobi``: a comma before a digit is W,N,G's own."""
    names = [name for text in texts for name in re.split(r"\s+|,(?=[A-Za-z])", text) if name]
    return list(dict.fromkeys(names))


def default_methods() -> list[str]:
    """Hugging Face's greedy and prompt lookup, and every method of ours."""
    return ["hf-greedy", "hf-prompt-lookup", *(name for name in METHODS if name != PLAIN)]


def _value(text: str) -> Any:
    """A setting's value; ``suffix+logits`` is a tuple of words, and so is ``suffix+``."""
    if "+" in text:
        return tuple(filter(None, text.split("+")))
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def make_methods(name: str, model: ModelUnderTest, warm: bool = True) -> list[Method]:
    """The method of a name; cold and warm, where it keeps state.

    Raises:
        SettingsError: an unknown name, a setting out of range, or a method that lacks what it needs.
    """
    head, *settings = name.split(":")
    if head in HUGGING_FACE:
        if settings:
            raise SettingsError(f"{head} takes no settings, got {name!r}")
        if model.model is None:
            raise SettingsError(f"{head} needs a transformers model, and there is only a target")
        return [HuggingFace(head)]
    if head in LLAMA_CPP:
        from .llamacpp import LlamaCpp

        return [LlamaCpp(head, ":".join(settings), model)]
    if head not in METHODS:
        raise SettingsError(
            f"unknown method {head!r}; known are {', '.join((*HUGGING_FACE, *LLAMA_CPP, *METHODS))}, "
            "with settings as in lookahead:15,5,15 or lookahead:7,5,7:pool_from_prompt=0"
        )
    triple = [part for part in settings if "=" not in part]
    if len(triple) > 1:
        raise SettingsError(f"W,N,G is given more than once in {name!r}")
    pairs = (part.split("=", 1) for part in settings if "=" in part)
    values = {key: _value(value) for key, value in pairs}
    config: Any = values or None
    if head not in OWN_SETTINGS or triple:
        config = LookaheadConfig.of(triple[0] if triple else None, **values)
    label = name
    if head == "lookahead" and not triple:
        label = ":".join([head, ",".join(map(str, config.triple)), *settings])
    states = ("cold", "warm")[: 1 + warm] if head in KEEPS_STATE else ("",)
    return [Drafted(head, config, label, state) for state in states]

"""What is measured: our drafting methods, and Hugging Face's own decoding, under one counter.

The counter, for both sides: the first forward pass of the target is the prefill, every later one is a step;
its rows are the positions it evaluates, its tokens those that it adds to the text, the ending token included.
A method is named by a text such as ``hf-greedy``, ``prompt-lookup``, ``lookahead:15,5,15`` or
``lookahead:15,5,15:pool_from_prompt=0``; any name in ``lookahead.drafters.METHODS`` is one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from ..core import Decoder, Drafter, LookaheadConfig, NGramPool, Request, SettingsError
from ..drafters import METHODS, OWN_SETTINGS, make_drafter
from .subject import Subject

HUGGING_FACE = ("hf-greedy", "hf-sample", "hf-prompt-lookup", "hf-assisted")
PLAIN = "autoregressive"
#: Tokens that Hugging Face's prompt lookup drafts at most; their documentation's example, and our own default.
HF_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Options:
    """How every method decodes.

    Attributes:
        max_new_tokens: at most so many tokens, at least 1.
        temperature: 0 is greedy; otherwise tokens are drawn.
        top_k: draw among the k likeliest only; 0 for all.
        seed: of the draws.
        repeats: how often every prompt is decoded.
        warm: also measure methods that keep state with the state of the earlier prompts.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    repeats: int = 1
    warm: bool = True

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("repeats", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < low:
                raise SettingsError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(slots=True)
class Outcome:
    """One text, and what it cost.

    Attributes:
        tokens: the new tokens.
        prefill_tokens: how many of them the prefill gave: 1, or more where it verified a draft too.
        prefill_seconds: until those were there.
        step_tokens, step_rows, step_seconds: per step.
        drafter: the drafting method's own figures.
    """

    tokens: list[int]
    prefill_tokens: int
    prefill_seconds: float
    step_tokens: list[int] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    drafter: dict[str, float] = field(default_factory=dict)


class Method(ABC):
    """Decodes one prompt after the other.

    Attributes:
        label: name with its settings.
        state: "cold" or "warm" where the method keeps state, else "".
        settings: for the records.
    """

    label: str
    state: str = ""
    settings: dict[str, Any]

    @abstractmethod
    def decode(self, subject: Subject, prompt: Sequence[int], options: Options) -> Outcome:
        """Decode one prompt."""

    def comparable(self, options: Options) -> bool:
        """Whether the text must equal that of plain decoding, token for token."""
        return True

    def forget(self) -> None:  # noqa: B027
        """Drop kept state; called before every repeat."""


def chooser(prompt: Sequence[int], options: Options, subject: Subject) -> tuple[Any, Any]:
    """(``choose``, the noise that it draws with, or None) for one text."""
    from ..core.decode import greedy

    if not options.temperature:
        return greedy, None
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

    from ..sampling import SeededNoise, make_choose

    process = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.top_k:
        process.append(TopKLogitsWarper(options.top_k))
    device = getattr(subject.model, "device", None)
    noise = SeededNoise(options.seed, len(prompt), subject.vocabulary, float(options.temperature), device)
    return make_choose(prompt, process, noise), noise


def _pool(config: LookaheadConfig, warm: bool, old: Any) -> Any:
    return NGramPool(config.guess_set_size, config.max_pool_keys) if warm else None


def _adaptive_state(config: Any, warm: bool, old: Any) -> Any:
    """What it has measured of the machine is kept, cold or warm; what it has learnt of texts only when warm."""
    from ..drafters.adaptive import AdaptiveState

    return AdaptiveState(config, keep=warm, times=None if old is None else old.times)


def _step_times(subject: Subject) -> Any:
    """What steps cost here: kept ones, or measured now."""
    from ..drafters.adaptive import measure_times, times_for, warm_up

    if subject.model is not None:
        path = subject.target.path
        return times_for(subject.model, path, lambda: subject.target)
    times = measure_times(subject.target, subject.vocabulary)
    warm_up(subject.target, subject.vocabulary, times)
    return times


#: Methods that keep state -> (settings, warm, the state so far or None) -> what ``make_drafter`` takes as ``pool``.
STATES: dict[str, Callable[[Any, bool, Any], Any]] = {"lookahead": _pool, "adaptive": _adaptive_state}


class Drafted(Method):
    """One of ``lookahead.drafters.METHODS``, driven by the only loop.

    Args:
        name: the method. config: its settings, as ``make_drafter`` takes them. state: "", "cold" or "warm".
    """

    def __init__(self, name: str, config: Any, label: str = "", state: str = "") -> None:
        self.name = name
        self.config = config
        self.label = label or name
        self.state = state
        self.settings = config.as_dict() if isinstance(config, LookaheadConfig) else dict(config or {})
        self._kept: Any = None

    def forget(self) -> None:
        if self.state:
            self._kept = STATES[self.name](self.config, self.state == "warm", self._kept)

    def _drafter(self, subject: Subject) -> Drafter:
        if self._kept is None:
            self.forget()
            if self.name == "adaptive":  # as ``lookahead.load`` does, and not counted here either
                self._kept.times = _step_times(subject)
        return make_drafter(self.name, self.config, subject.vocabulary, self._kept)

    def decode(self, subject: Subject, prompt: Sequence[int], options: Options) -> Outcome:
        drafter = self._drafter(subject)
        choose, noise = chooser(prompt, options, subject)
        drafter.use_noise(noise)
        decoder = Decoder(subject.target)
        start = perf_counter()
        generation = decoder.add(Request(prompt, drafter, options.max_new_tokens, choose, subject.eos))
        decoder.step()
        last = perf_counter()
        outcome = Outcome(generation.tokens, len(generation.tokens), last - start)
        while decoder.busy:
            steps = decoder.step()
            now = perf_counter()
            for step in steps:
                outcome.step_tokens.append(len(step.tokens))
                outcome.step_rows.append(step.rows)
                outcome.step_seconds.append(now - last)
            last = now
        if generation.error is not None:
            raise generation.error
        outcome.drafter = dict(generation.stats.drafter)
        return outcome


class _Clock:
    """A streamer that notes when tokens come, and how many at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(perf_counter())
        self.sizes.append(tokens.numel())

    def end(self) -> None:
        pass


class HuggingFace(Method):
    """``model.generate`` of transformers as it comes; forward passes are counted by a hook on the model."""

    def __init__(self, name: str) -> None:
        self.name = self.label = name
        self.settings = {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS} if name == "hf-prompt-lookup" else {}

    def comparable(self, options: Options) -> bool:
        """Only greedy texts: transformers draws from another stream of random numbers."""
        return not options.temperature and self.name != "hf-sample"

    def _keywords(self, subject: Subject, options: Options) -> dict[str, Any]:
        from transformers import GenerationConfig

        temperature = options.temperature or (1.0 if self.name == "hf-sample" else 0.0)
        eos = sorted(subject.eos) or None
        config = GenerationConfig(
            max_new_tokens=options.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0] if eos else 0,
            do_sample=bool(temperature) and self.name != "hf-greedy",
        )
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = float(temperature), options.top_k, 1.0
        keywords: dict[str, Any] = {"generation_config": config}
        if self.name == "hf-prompt-lookup":
            config.prompt_lookup_num_tokens = HF_LOOKUP_TOKENS
        elif self.name == "hf-assisted":
            keywords["assistant_model"] = subject.draft_model
        return keywords

    def decode(self, subject: Subject, prompt: Sequence[int], options: Options) -> Outcome:
        import torch

        model, clock, rows = subject.model, _Clock(), []

        def count(module: Any, positional: Any, keywords: dict[str, Any]) -> None:
            rows.append(int(keywords["input_ids"].shape[1]))

        ids = torch.tensor([list(prompt)], device=model.device)
        keywords = self._keywords(subject, options)
        torch.manual_seed(options.seed)
        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            start = perf_counter()
            text = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **keywords)
            end = perf_counter()
        finally:
            hook.remove()
        sizes, times = clock.sizes[1:], clock.times[1:]  # the first is the prompt
        if len(sizes) != len(rows) or text.shape[1] - len(prompt) != sum(sizes):
            raise AssertionError(
                f"{self.name}: {len(rows)} forward passes, but tokens came {len(sizes)} times"
            )
        times[-1] = end
        between = [b - a for a, b in pairwise(times)]
        return Outcome(
            text[0, len(prompt) :].tolist(), sizes[0], times[0] - start, sizes[1:], rows[1:], between
        )


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


def make_methods(name: str, subject: Subject, warm: bool = True) -> list[Method]:
    """The method of a name; cold and warm, where it keeps state.

    Raises:
        SettingsError: an unknown name, a setting out of range, or a method that lacks what it needs.
    """
    head, *settings = name.split(":")
    if head in HUGGING_FACE:
        if settings:
            raise SettingsError(f"{head} takes no settings, got {name!r}")
        if subject.model is None:
            raise SettingsError(f"{head} needs a transformers model, and the subject has only a target")
        if head == "hf-assisted" and subject.draft_model is None:
            raise SettingsError("hf-assisted needs a draft model; give one with --draft-model")
        return [HuggingFace(head)]
    if head not in METHODS:
        raise SettingsError(
            f"unknown method {head!r}; known are {', '.join((*HUGGING_FACE, *METHODS))}, "
            "with settings as in lookahead:15,5,15 or lookahead:7,5,7:pool_from_prompt=0"
        )
    triple = [part for part in settings if "=" not in part]
    pairs = dict(part.split("=", 1) for part in settings if "=" in part)
    if len(triple) > 1:
        raise SettingsError(f"W,N,G is given more than once in {name!r}")
    values = {key: _value(value) for key, value in pairs.items()}
    config: Any = values or None
    if head not in OWN_SETTINGS or triple:
        config = LookaheadConfig.of(triple[0] if triple else None, **values)
    label = name
    if head == "lookahead" and not triple:
        label = ":".join([head, ",".join(map(str, config.triple)), *settings])
    if head not in STATES:
        return [Drafted(head, config, label)]
    states = ("cold", "warm") if warm else ("cold",)
    return [Drafted(head, config, label, state) for state in states]

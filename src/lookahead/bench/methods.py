"""The objects of a measurement: a model, ways to decode a prompt with it, and the cost of each completion.

The cost is counted in the same way for every method, ours or another library's. The first forward pass of the target
is the prefill, every later pass is a step. The rows of a step are the positions that it evaluates, and its tokens are
those that it adds to the completion, including the end token.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from ..core import Drafter, Engine, Request, SettingsError, Stats, Target
from ..drafters import Adaptive, Lookahead, NGramPool, Plain, as_drafter
from ..drafters.adaptive.base_files import wait_for_tables
from ..drafters.adaptive.model_curves import measure_wanted
from ..drafters.checks import all_settings
from ..drafters.names import METHODS
from ..drafters.notice import notice
from ..drafters.prepare import Preparation
from ..llm import LLM, chooser_of
from ..loading import load
from ..model import NO_LIMIT, Model
from ..options import OF_LLAMA_CPP, Options

#: Plain decoding, with which every other method is compared.
PLAIN = Plain.name
#: The most elements of one tensor in ``ModelUnderTest.weights``.
SAMPLES = 1 << 16


@dataclass(slots=True)
class ModelUnderTest:
    """A model and the target that evaluates it."""

    name: str  # for the records
    target: Target  # evaluates the steps of our methods
    model: Model | None = None  # None if there is only a target
    tokenizer: Any = None  # a transformers tokenizer; None if prompts are token ids
    eos: frozenset[int] = frozenset()  # tokens that end a sequence
    max_positions: int = NO_LIMIT  # the model's maximum sequence length, in tokens
    dtype: str = "float32"  # for the records
    gguf: str | None = None  # the file that the model was read from, if it is a GGUF file
    parameter_count: int | None = None  # the number of its weights; None if there is only a target
    drafts: bool = True  # whether it can evaluate drafts
    loading: dict[str, Any] = field(default_factory=dict)  # device and options of llama.cpp, for the records

    @classmethod
    def of(cls, llm: LLM, path: str = "auto") -> ModelUnderTest:
        """A loaded model with a target of the given path (see ``LLM.target``)."""
        return cls(
            llm.name,
            llm.target(path),
            llm.model,
            llm.tokenizer,
            llm.eos,
            llm.context or NO_LIMIT,
            llm.dtype,
            parameter_count=llm.parameter_count,
            drafts=llm.model.probe.drafts,
        )

    def prepare(self, drafter: Drafter) -> Drafter:
        """The drafter prepared for the model, as in ``LLM``: with cost curve, base table and light head.

        At the first use of a model, this waits until its table is counted, and then measures its curve.
        """
        target = self.target
        if self.model is None:
            return drafter
        prepare = Preparation(self.model, self.drafts, lambda: target)
        prepare(drafter, target)
        wait_for_tables()
        measure_wanted(self.model, lambda: target, notice)
        return prepare(drafter, target)

    def weights(self) -> int | None:
        """A checksum of samples of the weights: models of one name may differ. None if there is only a target."""
        return None if self.model is None else self.model.checksum(SAMPLES)

    def learned(self) -> dict[str, str]:
        """Digests of the base table and of the light head that drafters find for the model, by kind."""
        from ..drafters.adaptive.base_files import base_table_of, key_of
        from ..drafters.adaptive.heads import find_head

        if self.model is None:
            return {}
        model = self.model
        table = base_table_of(model.tokenizer, key_of(model), model.shape.vocabulary)
        files = {"table": table and table.path, "head": find_head(self.model.shape.name)}
        return {kind: sha256(file.read_bytes()).hexdigest()[:12] for kind, file in files.items() if file}


def load_model(path_or_id: str | None = None, path: str = "auto", **options: Any) -> ModelUnderTest:
    """The model of ``lookahead.load(path_or_id, **options)`` with a target of the given path."""
    llm = load(path_or_id, **options)
    file = Path(path_or_id or "-")
    if file.exists():
        llm.name = file.resolve().name  # records must not reveal this machine's folders
    model = ModelUnderTest.of(llm, path)
    model.gguf = str(file) if file.suffix == ".gguf" else None
    given = {name: options.get(name) for name in ("device", "engine", *OF_LLAMA_CPP)}
    model.loading = {name: str(value) for name, value in given.items() if value is not None}
    return model


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How every method decodes."""

    max_new_tokens: int = 128  # at least 1
    temperature: float = 0.0  # 0 is greedy; above it, tokens are sampled
    top_k: int = 0  # sample from the k most likely tokens; 0 for all
    seed: int = 0  # seed of the random numbers
    repeats: int = 1  # how often every prompt is decoded
    warm: bool = True  # measure methods that keep state twice: without and with the state of earlier prompts
    once: tuple[str, ...] = ()  # labels of methods that decode each prompt only in the first repeat

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("repeats", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < low:
                raise SettingsError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(slots=True)
class Outcome:
    """One completion and its cost.

    The prefill of another library may also verify a draft. Its tokens beyond the first are in ``tokens`` and
    ``prefill_tokens``, not in ``stats``.
    """

    tokens: list[int]  # the new tokens
    stats: Stats
    prefill_tokens: int  # how many of the tokens came from the prefill
    prefill_seconds: float  # seconds until they were emitted
    step_tokens: list[int] = field(default_factory=list)  # tokens of each step
    step_rows: list[int] = field(default_factory=list)  # rows of each step
    step_seconds: list[float] = field(default_factory=list)  # duration of each step
    knows_rows: bool = True  # False if the library does not report how many tokens it drafts


class Method(ABC):
    """Decodes prompts one at a time."""

    label: str  # name with settings
    state: str = ""  # "cold" or "warm" if the method keeps state between prompts
    settings: dict[str, Any]  # for the records

    @abstractmethod
    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome | str:
        """Decode one prompt. Another library's method may return why it failed."""

    def comparable(self, options: RunOptions) -> bool:
        """Whether the completion must equal that of plain decoding, token for token."""
        return True

    def forget(self) -> None:  # noqa: B027
        """Drop the state that is kept between prompts; called before every repeat."""


def make_request(
    model: ModelUnderTest,
    prompt: Sequence[int],
    drafter: Drafter,
    options: RunOptions,
) -> Request:
    """A request for the library's loop. When sampling, the drafter also gets the noise.

    Args:
        model: the model under test.
        prompt: token ids.
        drafter: the drafter with its settings.
        options: the length, and the options of sampling.
    """
    sampling = Options()
    if options.temperature:
        sampling = Options(temperature=options.temperature, top_k=options.top_k or None)
    seed = options.seed if sampling.sampled else None
    device = "cpu" if model.model is None else model.model.device
    choose, noise = chooser_of(model.model)(
        sampling, prompt, seed, model.eos, None, model.target.vocabulary, device
    )
    return Request(prompt, drafter, options.max_new_tokens, choose, model.eos, noise=noise)


def timed_decode(model: ModelUnderTest, request: Request) -> Outcome:
    """Decode one prompt and record the tokens, rows and seconds of every step.

    As in ``LLM``, the drafter gets the model's cost curve, base table and light head; reading them is not timed.

    Raises:
        LookaheadError: the error that ended decoding early.
    """
    request = replace(request, drafter=model.prepare(request.drafter))
    last = perf_counter()
    outcome = Outcome([], Stats(), 0, 0.0)
    engine = Engine(lambda: model.target, target=model.target)
    engine.add(request)
    while engine.busy:
        for update in engine.step():
            now = perf_counter()
            if update.result is not None:
                update.result.checked()
            if not update.tokens:
                continue
            if update.tree is None:
                sequence = update.sequence
                outcome = Outcome(sequence.tokens, sequence.stats, len(update.tokens), now - last)
            else:
                outcome.step_tokens.append(len(update.tokens))
                outcome.step_rows.append(update.rows)
                outcome.step_seconds.append(now - last)
            last = now
    return outcome


class Drafted(Method):
    """One of our drafters, driven by the library's loop.

    Args:
        drafter: the drafter with its settings.
        label: its name in records.
        state: "warm" to keep the pool or the learned state between prompts; "cold" or "" to start each prompt afresh.
    """

    def __init__(self, drafter: Drafter, label: str, state: str) -> None:
        self.drafter = drafter
        self.label = label
        self.state = state
        self.settings = {"drafter": str(drafter), **all_settings(drafter)}
        self._kept: Drafter | None = None

    def forget(self) -> None:
        self._kept = None

    def _with_state(self) -> Drafter:
        """The drafter with a new pool or state that is kept between prompts."""
        if isinstance(self.drafter, Lookahead):
            pool = NGramPool(self.drafter.guess_set_size, self.drafter.max_pool_keys)
            return replace(self.drafter, pool=pool)
        from ..drafters.adaptive.state import AdaptiveState

        assert isinstance(self.drafter, Adaptive)
        return replace(self.drafter, state=AdaptiveState(self.drafter))

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        drafter = self.drafter
        if self.state == "warm":
            if self._kept is None:
                self._kept = self._with_state()
            drafter = self._kept
        return timed_decode(model, make_request(model, prompt, drafter, options))


#: Makes the methods for one name: cold and warm if the method keeps state, unless ``warm`` is False.
MakeMethods = Callable[[str, ModelUnderTest, bool], list[Method]]


def split_methods(texts: Sequence[str]) -> list[str]:
    """The names in lists such as ``jacobi,lookahead:15,5,15 adaptive``; a comma before a digit is part of W,N,G."""
    names = [name for text in texts for name in re.split(r"\s+|,(?=[A-Za-z])", text) if name]
    return list(dict.fromkeys(names))


def default_methods() -> list[str]:
    """All our methods except plain decoding, which is always measured."""
    return [name for name in METHODS if name != PLAIN]


def make_methods(name: str, model: ModelUnderTest, warm: bool = True) -> list[Method]:
    """The methods for a name in the format of ``lookahead.as_drafter``, such as
    ``lookahead:7,5,7:pool_from_prompt=0``.

    Raises:
        SettingsError: the name is unknown, or a setting is out of range.
    """
    drafter = as_drafter(name)
    label = str(drafter) if name == Lookahead.name else name
    if isinstance(drafter, Plain):
        label = PLAIN
    states = ("cold", "warm")[: 1 + warm] if isinstance(drafter, (Lookahead, Adaptive)) else ("",)
    return [Drafted(drafter, label, state) for state in states]

"""A loaded model with three verbs: generate, stream and run. The loop itself is ``lookahead.core.Decoder``.

Every call has a target of its own (a KV cache that grows with the text), so calls leave nothing behind, and
several threads may call one LLM. What one call decodes together shares forward passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from ..core import LookaheadConfig, NGramPool, Request, SettingsError, Target
from ..drafters import OWN_SETTINGS, make_drafter, method_for
from ..sampling import SeededNoise, make_choose
from .fields import keywords_of
from .options import BatchOptions, Options
from .processors import make_process
from .prompts import OnePrompt, Prompt, as_list, encode
from .results import Result, Stream, Update
from .running import Running, decode_prompts
from .states import cold_state, warm_state
from .text import TextStream

if TYPE_CHECKING:
    from ..drafters.adaptive import AdaptiveState, StepTimes
    from ..parallel import RankGroup
    from ..targets.factory import Probe

#: Methods that can go on from what an earlier call has learnt.
KEEPS_STATE = ("lookahead", "adaptive")


class LLM:
    """A model, its tokenizer, and how to draft for it. Made by ``lookahead.load``, or from a model in hand.

    Args:
        model: a transformers causal language model in eval mode.
        tokenizer: None where there is none; prompts are then token ids.
        method, config: how to draft unless a call says otherwise. Without a method: "adaptive", or "lookahead"
            where ``config`` is a (W, N, G).
        probe: what ``lookahead.targets.factory.probe`` found; None takes it now.
        name: for people.
        tokenizer_error: why there is no tokenizer.

    Attributes:
        rank_group: the ranks that evaluate together (``lookahead.parallel``), or None for this process alone.

    Raises:
        SettingsError: an unknown method, or settings that it cannot take.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: str | None = None,
        config: Any = None,
        probe: Probe | None = None,
        name: str = "",
        tokenizer_error: str | None = None,
    ) -> None:
        from ..targets.factory import probe as take_probe

        self.model = model
        self.tokenizer = tokenizer
        self.tokenizer_error = tokenizer_error or "none was given"
        self.rank_group: RankGroup | None = None
        self.method = method_for(method, config)
        # Some methods have settings of their own kind; their drafter checks them.
        if self.method not in OWN_SETTINGS:
            given = config if config is not None else LookaheadConfig.for_device(model.device.type)
            config = LookaheadConfig.of(given)
        self.config = config
        make_drafter(self.method, self.config)
        self.probe = probe if probe is not None else take_probe(model)
        self.name = name or type(model).__name__

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.dtype}, {self.model.device}, {self.method})"

    @property
    def dtype(self) -> str:
        """Of the weights, as in "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """V, columns of the logits."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def context(self) -> int | None:
        """The longest text in tokens, prompt included; None where the model names no limit."""
        text_config = self.model.config.get_text_config(decoder=True)
        limit = getattr(text_config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def eos(self) -> frozenset[int]:
        """End tokens: those of the generation config; where it names none, the tokenizer's."""
        given = getattr(self.model.generation_config, "eos_token_id", None)
        if given is None:
            given = getattr(self.tokenizer, "eos_token_id", None)
        if given is None:
            return frozenset()
        return frozenset([given] if isinstance(given, int) else given)

    @property
    def path(self) -> str:
        """What evaluates steps, as ``Target.path`` names it."""
        return self.target().path

    def target(self, path: str = "auto") -> Target:
        """A fresh target on this model; its ``path`` and ``reason`` say which kind and why.

        Args:
            path: what ``lookahead.targets.factory.make_target`` takes, to force one of the kinds.

        Raises:
            SettingsError: the forced path is not there for this model.
        """
        from ..targets.factory import make_target

        if self.rank_group is not None and path == "auto":
            from ..parallel import ParallelTarget

            return ParallelTarget(self.rank_group)
        return make_target(self.model, path=path)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt (text, chat messages or token ids).

        Raises:
            SettingsError: a prompt that cannot be taken; see ``lookahead.engine.prompts.encode``.
        """
        return encode(prompt, self.tokenizer, self.tokenizer_error, self.vocabulary, self.context)

    @overload
    @keywords_of(BatchOptions)
    def generate(self, prompt: OnePrompt, **options: Any) -> Result: ...  # type: ignore[overload-overlap]

    @overload
    @keywords_of(BatchOptions)
    def generate(self, prompt: Sequence[OnePrompt], **options: Any) -> list[Result]: ...

    @overload
    @keywords_of(BatchOptions)
    def generate(self, prompt: torch.Tensor, **options: Any) -> Result | list[Result]: ...

    @keywords_of(BatchOptions)
    def generate(self, prompt: Any, **options: Any) -> Any:
        """The text that follows a prompt, or a list of texts for a list of prompts.

        Args:
            prompt: a text, chat messages, token ids, or a list of these.
            {options}

        Returns:
            A ``Result``, or a list of them in the order of the prompts.

        Raises:
            SettingsError: an option or a prompt that cannot be honoured; nothing has been decoded then.
            NumericalError, OutOfMemory: decoding failed. ``run`` keeps what was done until then.
        """
        prompts, several = as_list(prompt)
        if options.get("batch_size") is None:
            options["batch_size"] = max(1, len(prompts))
        results: dict[int, Result] = {}
        for update in self.run(prompts, **options):
            if update.result is not None:
                if update.result.error is not None:
                    raise update.result.error
                results[update.index] = update.result
        in_order = [results[i] for i in range(len(prompts))]
        return in_order if several else in_order[0]

    @keywords_of(Options)
    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """The text of one prompt in pieces, as tokens are accepted; see ``Stream``.

        Args:
            prompt: a text, chat messages or token ids.
            {options}

        Raises:
            SettingsError: at once, before the first piece.
        """
        prompts, several = as_list(prompt)
        if several:
            raise SettingsError(f"stream takes one prompt, got a list of {len(prompts)}; use run or generate")
        return Stream(self.run(prompts, **options))

    @keywords_of(BatchOptions)
    def run(self, prompts: Sequence[Prompt], **options: Any) -> Iterator[Update]:
        """Decode a list of prompts and yield every step of each; what all else here is made of.

        At most ``batch_size`` prompts are in flight; the next one joins as soon as one is done. An error of
        one prompt ends that prompt alone: its last update has ``finish_reason`` "error".

        Args:
            prompts: texts, chat messages or token ids.
            {options}

        Raises:
            SettingsError: at once, if an option or any prompt cannot be honoured.
        """
        chosen = BatchOptions.of(options)
        if isinstance(chosen.pool, NGramPool) and len(prompts) > 1:
            raise SettingsError(f"a pool is kept for one prompt at a time, got {len(prompts)} prompts")
        seeds = chosen.seeds
        if seeds is not None and len(seeds) != len(prompts):
            raise SettingsError(f"seeds must be one per prompt ({len(prompts)}), got {len(seeds)}")
        if seeds is None:
            first = chosen.seed
            if first is None:  # greedy must not touch torch's generator
                first = int(torch.randint(2**62, ())) if chosen.sampled else 0
            seeds = range(first, first + len(prompts))
        waiting = [
            self._begin(i, prompt, chosen, seeds[i] if chosen.sampled else None)
            for i, prompt in enumerate(prompts)
        ]
        return decode_prompts(self.target, waiting, chosen.batch_size or 1)

    def warm_state(self, file: str | os.PathLike[str] | None = None, config: Any = None) -> AdaptiveState:
        """A state for ``pool=``, in which adaptive keeps what it learns from call to call.

        Args:
            file: what ``state.save`` wrote for such a model; where it does not exist the state begins empty.
            config: settings of adaptive; None for those of ``load``.

        Raises:
            SettingsError: the file is of another model, or no such file.
        """
        text = self.model.config.get_text_config(decoder=True)
        scope = f"{text.model_type} {text.hidden_size} x {text.num_hidden_layers}, {self.vocabulary} tokens"
        times = self._step_times if self.probe.mode == "tree" else lambda: None
        return warm_state(self._config_of("adaptive", config), times, scope, file)

    def _step_times(self) -> StepTimes:
        """Kept ones, or measured now, once."""
        from ..drafters.adaptive import times_for

        return times_for(self.model, self.path, self.target)

    def _method_of(self, options: Options) -> str:
        """The method of a call: as told, or of the kind of its settings, or else that of ``load``."""
        if options.method is not None:
            return options.method
        if options.config is None and options.pool is None:
            return self.method
        kind = method_for(None, options.config, options.pool)
        return self.method if (kind in OWN_SETTINGS) == (self.method in OWN_SETTINGS) else kind

    def _config_of(self, method: str, given: Any) -> Any:
        """Settings for a method: those of the call, or else those of ``load`` where they are of its kind."""
        if given is not None or method == self.method:
            return self.config if given is None else given
        if method in OWN_SETTINGS:
            return None
        if isinstance(self.config, LookaheadConfig):
            return self.config
        return LookaheadConfig.for_device(self.model.device.type)

    def _begin(self, index: int, prompt: Prompt, options: Options, seed: int | None) -> Running:
        """One prompt with its drafter, chooser and text, ready to be decoded."""
        ids = self.encode(prompt)
        length = options.max_new_tokens
        if self.context is not None:
            length = min(length, self.context - len(ids))
        if options.stops and self.tokenizer is None:
            raise SettingsError(f"stop strings need a tokenizer, and {self.tokenizer_error}")
        eos = frozenset() if options.ignore_eos else self.eos
        process = make_process(options, len(ids), eos, self.tokenizer, self.model.device)
        method = self._method_of(options)
        if options.pool is not None and method not in KEEPS_STATE:
            raise SettingsError(f"a pool needs a method of {', '.join(KEEPS_STATE)}, got {method!r}")
        config = self._config_of(method, options.config)
        pool = options.pool
        if pool is None and method == "adaptive" and self.probe.mode == "tree":
            pool = cold_state(config, self._step_times)
        drafter = make_drafter(method, config, self.vocabulary, pool)
        if self.probe.mode != "tree":  # one row a step, so there is nothing to draft
            drafter = make_drafter("autoregressive")
        noise = None
        if seed is not None:
            noise = SeededNoise(seed, len(ids), self.vocabulary, options.temperature, self.model.device)
            drafter.use_noise(noise)
        request = Request(ids, drafter, length, make_choose(ids, process, noise), eos)
        text = None if self.tokenizer is None else TextStream(self.tokenizer, ids, options.stops)
        entry = Running(index, request, text, seed)
        if options.stops:
            request.finished = entry.finished
        return entry

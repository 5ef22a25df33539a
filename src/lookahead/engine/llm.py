"""A loaded model with three verbs: generate, stream and run. The loop itself is ``lookahead.core.Decoder``.

Every call has a target of its own (a KV cache that grows with the text) or one that ``prefix_cache`` lends to it
alone, so several threads may call one LLM. What one call decodes together shares forward passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from ..core import LookaheadConfig, NGramPool, Request, SettingsError, Target
from ..drafters import OWN_SETTINGS, make_drafter, method_for
from ..sampling import SeededNoise, make_choose
from ..targets.factory import make_target, probe
from ..targets.fingerprint import fingerprint
from .fields import keywords_of
from .options import BatchOptions, Options
from .prefix_cache import PrefixCache
from .processors import make_process
from .progress import said_where_slow
from .prompts import OnePrompt, Prompt, as_list, encode
from .results import Entry, Result, Stream, Updates, decode_prompts
from .text import TextStream

if TYPE_CHECKING:
    from ..drafters.adaptive import AdaptiveState
    from ..parallel import RankGroup

#: Methods that can go on from what an earlier call has learnt.
KEEPS_STATE = ("lookahead", "adaptive")


class LLM:
    """A model, its tokenizer, and how to draft for it. Made by ``lookahead.load``, or from a model in hand.

    Args:
        model: a transformers causal language model in eval mode.
        tokenizer: None where there is none; prompts are then token ids.
        method, config: how to draft unless a call says otherwise. Without a method: "adaptive", or "lookahead"
            where ``config`` is a (W, N, G).
        exact: only paths on which drafting changes no bit of a text.
        name: for people.
        tokenizer_error: why there is no tokenizer.
        prefix_cache: finished texts whose keys and values are kept for prompts that begin like them.

    Attributes:
        probe: what ``lookahead.targets.factory.probe`` found.
        rank_group: the ranks that evaluate together (``lookahead.parallel``), or None for this process alone.

    Raises:
        SettingsError: an unknown method, or settings that it cannot take; no exact path.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, method: str | None = None, config: Any = None,
        exact: bool = False, name: str = "", tokenizer_error: str = "none was given", prefix_cache: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.tokenizer_error = model, tokenizer, tokenizer_error
        self.rank_group: RankGroup | None = None
        self.name = name or type(model).__name__
        self.method = method_for(method, config)
        if self.method not in OWN_SETTINGS:  # whose drafter checks them
            usual = LookaheadConfig.for_device(model.device.type)
            config = LookaheadConfig.of(usual if config is None else config)
        self.config = config
        make_drafter(self.method, self.config)
        self.probe = probe(model)
        self.exact, self._path = exact, ""  # the path of the last target
        self._prefixes = PrefixCache(lambda: self.target(), prefix_cache, lambda: fingerprint(model))
        if exact:
            self.target()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.dtype}, {self.model.device}, {self.method})"

    @property
    def dtype(self) -> str:
        """Of the weights, as in "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """V, columns of the logits."""
        return int(self._text_config.vocab_size)

    @property
    def context(self) -> int | None:
        """The longest text in tokens, prompt included; None where the model names no limit."""
        limit = getattr(self._text_config, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def eos(self) -> frozenset[int]:
        """End tokens: those of the generation config; where it names none, the tokenizer's."""
        given = getattr(self.model.generation_config, "eos_token_id", None)
        if given is None:
            given = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset([given] if isinstance(given, int) else given or ())

    @property
    def path(self) -> str:
        """What evaluates steps, as ``Target.path`` names it."""
        return self.target().path

    def target(self, path: str = "auto") -> Target:
        """A fresh target on this model; see ``lookahead.targets.factory.make_target``, which raises SettingsError."""
        if self.rank_group is not None and path == "auto":
            from ..parallel import ParallelTarget

            return ParallelTarget(self.rank_group)
        with said_where_slow("preparing the model (the first time here, compiling for this processor)"):
            target = make_target(self.model, path=path, exact=self.exact)
        self._path = target.path if path == "auto" else self._path
        return target

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt (text, chat messages or token ids); SettingsError where it cannot be taken."""
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
                results[update.index] = update.result.checked()
        return [results[i] for i in range(len(prompts))] if several else results[0]

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
    def run(self, prompts: Sequence[Prompt], **options: Any) -> Updates:
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
        seeds: Sequence[int | None] | None = chosen.seeds
        if seeds is not None and len(seeds) != len(prompts):
            raise SettingsError(f"seeds must be one per prompt ({len(prompts)}), got {len(seeds)}")
        if not chosen.sampled:  # greedy must not touch torch's generator
            seeds = [None] * len(prompts)
        elif seeds is None:
            first = int(torch.randint(2**62, ())) if chosen.seed is None else chosen.seed
            seeds = range(first, first + len(prompts))
        entries = [self.begin(i, prompt, chosen, seeds[i]) for i, prompt in enumerate(prompts)]
        return decode_prompts(self._prefixes.lend, entries, chosen.batch_size or 1)

    def warm_state(self, file: str | os.PathLike[str] | None = None, config: Any = None) -> AdaptiveState:
        """A state for ``pool=``, in which adaptive keeps what it learns from call to call.

        Args:
            file: what ``state.save`` wrote for such a model; where it does not exist the state begins empty.
            config: settings of adaptive.

        Raises:
            SettingsError: the file is of another model, or no such file.
        """
        return self._state(config, keep=True, file=file)

    def tune(
        self, rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int], repeats: int,
        progress: Callable[[int, int, int, float], None],
    ) -> Path | None:  # fmt: skip
        """Measure the times of steps of all these sizes and keep them for adaptive, this machine and this model.

        Args:
            rows: per sequence; must contain 1, which is plain decoding.
            contexts: committed tokens; what does not fit the model is left out.
            batches: sequences in one pass.
            repeats: measurements of each size, at least 1.
            progress: told (batch, context, rows, seconds) of each size.

        Returns:
            The file that holds the times; None where no context fits.
        """
        from ..drafters.adaptive import measure_times, model_key, save_times

        target = self.target()
        times = measure_times(target, self.vocabulary, rows, contexts, batches, repeats, progress, inf)
        return save_times(model_key(self.model, target.path), times) if times.bins else None

    def _state(self, config: Any, keep: bool, file: str | os.PathLike[str] | None = None) -> AdaptiveState:
        """What adaptive learns into, with the step times of this model here: kept ones, or measured now."""
        from ..drafters.adaptive import AdaptiveConfig, AdaptiveState, times_for

        text = self._text_config
        scope = f"{text.model_type} {text.hidden_size} x {text.num_hidden_layers}, {self.vocabulary} tokens"
        settings, times = AdaptiveConfig.of(self._config_of("adaptive", config)), None
        with said_where_slow("measuring steps of this model (once; their times are kept)"):
            # To make a target only to ask for its path would take a step's time.
            if settings.budget and self.probe.mode != "plain":
                times = times_for(self.model, self._path or self.path, self.target)
        if file is not None and os.path.exists(file):
            return AdaptiveState.load(os.fspath(file), settings, times, scope=scope)
        return AdaptiveState(settings, keep, times, scope)

    def _method_of(self, options: Options) -> str:
        """The method of a call: as told, or of the kind of its settings, or else that of ``load``."""
        if options.method is not None or (options.config is None and options.pool is None):
            return options.method or self.method
        kind = method_for(None, options.config, options.pool)
        return self.method if (kind in OWN_SETTINGS) == (self.method in OWN_SETTINGS) else kind

    def _config_of(self, method: str, given: Any) -> Any:
        """Settings for a method: those of the call, or else those of ``load`` where they are of its kind."""
        if given is not None:
            return given
        if (method in OWN_SETTINGS) == (self.method in OWN_SETTINGS):
            return self.config
        return None if method in OWN_SETTINGS else LookaheadConfig.for_device(self.model.device.type)

    def begin(self, index: int, prompt: Prompt, options: Options, seed: int | None) -> Entry:
        """One prompt with its drafter, chooser and text, ready to be decoded."""
        ids, device = self.encode(prompt), self.model.device
        length = options.max_new_tokens
        if self.context is not None:
            length = min(length, self.context - len(ids))
        if options.stops and self.tokenizer is None:
            raise SettingsError(f"stop strings need a tokenizer, and {self.tokenizer_error}")
        eos = frozenset() if options.ignore_eos else self.eos
        process = make_process(options, len(ids), eos, self.tokenizer, device)
        method, pool = self._method_of(options), options.pool
        if pool is not None and method not in KEEPS_STATE:
            raise SettingsError(f"a pool needs a method of {', '.join(KEEPS_STATE)}, got {method!r}")
        if pool is None and method == "adaptive":
            pool = self._state(options.config, keep=False)
        drafter = make_drafter(method, self._config_of(method, options.config), self.vocabulary, pool)
        if self.probe.mode == "plain":  # one row a step, so there is nothing to draft
            drafter = make_drafter("autoregressive")
        noise = None
        if seed is not None:
            noise = SeededNoise(seed, len(ids), self.vocabulary, options.temperature, device)
            drafter.use_noise(noise)
        text = TextStream(self.tokenizer, ids, options.stops)
        finished = (lambda token: "stop" if text.push(token) else None) if options.stops else None
        request = Request(ids, drafter, length, make_choose(ids, process, noise), eos, finished)
        return Entry(index, request, text, seed)

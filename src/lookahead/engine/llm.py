"""A loaded model with three verbs: generate, stream and run. The loop itself is ``lookahead.core.Decoder``.

Every call has a target of its own (a KV cache that grows with the text), so calls leave nothing behind, and
several threads may call one LLM. What one call decodes together shares forward passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch

from ..core import (
    Decoder,
    LookaheadConfig,
    NGramPool,
    Request,
    SettingsError,
)
from ..drafters import OWN_SETTINGS, make_drafter, method_for
from ..sampling import SeededNoise, make_choose
from .options import OptionFields, Options
from .prompts import Prompt, as_list, encode
from .results import Result, Running, Update
from .states import cold_state, warm_state
from .text import TextStream

#: Methods that can go on from what an earlier call has learnt.
KEEPS_STATE = ("lookahead", "adaptive")


class LLM:
    """A model, its tokenizer, and how to draft for it. Made by ``lookahead.load``, or from a model in hand.

    Args:
        model: a transformers causal language model in eval mode.
        tokenizer: None where there is none; prompts are then token ids.
        method, config: how to draft unless a call says otherwise. Without a method: "adaptive", or "lookahead"
            where ``config`` is a (W, N, G).
        probe: the verdict of ``lookahead.targets.factory``; None takes it now.
        name: for people.
        tokenizer_error: why there is no tokenizer.

    Attributes:
        team: the ranks that evaluate together (``lookahead.parallel``), or None for this process alone.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: str | None = None,
        config: Any = None,
        probe: Any = None,
        name: str = "",
        tokenizer_error: str | None = None,
    ) -> None:
        from ..targets.factory import probe as take_probe

        self.model = model
        self.tokenizer = tokenizer
        self.tokenizer_error = tokenizer_error or "none was given"
        self.team: Any = None
        self._path: str | None = None
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
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"LLM({self.name!r}, {dtype}, {self.model.device}, {self.method})"

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
        """What evaluates steps: "cpu", "transformers", "cuda-graph", ... as ``target`` finds."""
        if self._path is None:
            self._path = self.target().path
        return self._path

    def target(self, path: str = "auto") -> Any:
        """A fresh ``lookahead.core.Target`` on this model; its ``path`` and ``reason`` say which kind and why.

        Args:
            path: "cpu", "cuda-graph" or "transformers" to force one of those that evaluate trees.
        """
        from ..targets.factory import make_target

        if self.team is not None and path == "auto":
            return self.team.target()
        return make_target(self.model, path=path)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt (text, chat messages or token ids), checked."""
        return encode(prompt, self.tokenizer, self.tokenizer_error, self.vocabulary, self.context)

    def generate(
        self, prompt: Prompt, *, batch_size: int | None = None, **options: Unpack[OptionFields]
    ) -> Any:
        """The text that follows a prompt, or a list of texts for a list of prompts.

        Args:
            prompt: a text, chat messages, token ids, or a list of these.
            batch_size: how many prompts of a list share forward passes; None for all.
            **options: see ``Options``.

        Returns:
            A ``Result``, or a list of them in the order of the prompts.

        Raises:
            SettingsError: an option or a prompt that cannot be honoured; nothing has been decoded then.
            NumericalError, OutOfMemory: decoding failed. ``run`` keeps what was done until then.
        """
        prompts, several = as_list(prompt)
        size = batch_size if batch_size is not None else max(1, len(prompts))
        results: list[Result | None] = [None] * len(prompts)
        for update in self.run(prompts, batch_size=size, **options):
            if update.result is not None:
                if update.result.error is not None:
                    raise update.result.error
                results[update.index] = update.result
        return results if several else results[0]

    def stream(self, prompt: Prompt, **options: Unpack[OptionFields]) -> Stream:
        """The text of one prompt in pieces, as tokens are accepted; see ``Stream``.

        Raises:
            SettingsError: at once, before the first piece.
        """
        prompts, several = as_list(prompt)
        if several:
            raise SettingsError(f"stream takes one prompt, got a list of {len(prompts)}; use run or generate")
        return Stream(self.run(prompts, **options))

    def run(
        self,
        prompts: list[Prompt],
        *,
        batch_size: int = 1,
        seeds: Sequence[int] | None = None,
        **options: Unpack[OptionFields],
    ) -> Iterator[Update]:
        """Decode a list of prompts and yield every step of each; what all else here is made of.

        At most ``batch_size`` prompts are in flight; the next one joins as soon as one is done. An error of
        one prompt ends that prompt alone: its last update has ``finish_reason`` "error".

        Args:
            prompts: texts, chat messages or token ids.
            batch_size: at least 1.
            seeds: one per prompt, in place of seed + i.
            **options: see ``Options``.

        Raises:
            SettingsError: at once, if an option or any prompt cannot be honoured.
        """
        chosen = Options.of(options)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise SettingsError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        if isinstance(chosen.pool, NGramPool) and len(prompts) > 1:
            raise SettingsError(f"a pool is kept for one prompt at a time, got {len(prompts)} prompts")
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
        return self._decode(waiting, batch_size)

    def _decode(self, waiting: list[Running], batch_size: int) -> Iterator[Update]:
        decoder = Decoder(self.target())
        waiting = waiting[::-1]
        running: dict[int, Running] = {}
        try:
            while waiting or running:
                while waiting and len(running) < batch_size:
                    joining = waiting.pop()
                    joining.generation = decoder.add(joining.request)
                    running[id(joining.generation)] = joining
                steps = {id(step.generation): step for step in decoder.step()}
                for key, entry in list(running.items()):
                    assert entry.generation is not None
                    done = entry.generation.finish_reason is not None
                    if done:
                        del running[key]
                    if done or key in steps:
                        yield entry.update(steps.get(key))
        finally:  # also where the caller stops listening
            for entry in running.values():
                assert entry.generation is not None
                decoder.cancel(entry.generation)

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

    def warm_state(self, file: str | os.PathLike[str] | None = None, config: Any = None) -> Any:
        """A state for ``pool=``, in which adaptive keeps what it learns from call to call.

        Args:
            file: what ``state.save`` wrote for such a model; where it does not exist the state begins empty.
            config: settings of adaptive; None for those of ``load``.

        Raises:
            SettingsError: the file is of another model, or no such file.
        """
        return warm_state(self, file, self._config_of("adaptive", config))

    def _begin(self, index: int, prompt: Prompt, options: Options, seed: int | None) -> Running:
        ids = self.encode(prompt)
        room = options.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(ids))
        if options.stops and self.tokenizer is None:
            raise SettingsError(f"stop strings need a tokenizer, and {self.tokenizer_error}")
        eos = frozenset() if options.ignore_eos else self.eos
        process = options.process(len(ids), eos, self.tokenizer, self.model.device)
        method = self._method_of(options)
        if options.pool is not None and method not in KEEPS_STATE:
            raise SettingsError(f"a pool needs a method of {', '.join(KEEPS_STATE)}, got {method!r}")
        config = self._config_of(method, options.config)
        pool = options.pool
        if pool is None and method == "adaptive" and self.probe.mode == "tree":
            pool = cold_state(self, config)
        drafter = make_drafter(method, config, self.vocabulary, pool)
        if self.probe.mode != "tree":  # one row a step, so there is nothing to draft
            drafter = make_drafter("autoregressive")
        noise = None
        if seed is not None:
            noise = SeededNoise(seed, len(ids), self.vocabulary, options.temperature, self.model.device)
            drafter.use_noise(noise)
        request = Request(ids, drafter, room, make_choose(ids, process, noise), eos)
        text = None if self.tokenizer is None else TextStream(self.tokenizer, ids, options.stops)
        entry = Running(index, request, text, seed)
        if options.stops:
            entry.streams_by_token = True
            request.finished = entry.finished
        return entry


class Stream:
    """Pieces of text; iterate once. ``result`` is there when the iteration is over.

    Closing it (or leaving a ``with`` block) ends the generation.
    """

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates
        self.result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for update in self._updates:
            if update.result is not None:
                self.result = update.result
                if update.result.error is not None:
                    raise update.result.error
            if update.piece:
                return update.piece
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation; what has been shown stays."""
        close = getattr(self._updates, "close", None)
        if close is not None:
            close()

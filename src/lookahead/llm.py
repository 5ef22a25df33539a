"""A loaded model with three methods for decoding: generate, stream and run.

Each call drives its own ``Engine``, so several threads may use one LLM; their steps take turns, except on the
compiled CPU path and with llama.cpp. The sequences of a call share forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import randbits
from threading import Lock
from typing import TYPE_CHECKING, Any, Unpack, overload

from .core import UNLIMITED_ROWS, Choose, Engine, Request, Result, SettingsError, Stats, Target, Update
from .core.prefix_cache import with_prefixes
from .drafters import Lookahead, as_drafter
from .drafters.prepare import Preparation
from .model import Model
from .option import refuse_unknown
from .options import BatchKeywords, BatchOptions, Keywords, Options, Process
from .text.decoder import TextDecoder, split_stops
from .text.prompts import OnePrompt, Prompt, as_list, encode

if TYPE_CHECKING:
    import torch

    from .drafters.adaptive.cost import CostCurve
    from .parallel import RankGroup
    from .sampling.noise import SeededNoise


Updates = Generator[Update, None, None]


def chooser_of(model: Model | None) -> Callable[..., tuple[Choose, SeededNoise | None]]:
    """``make_choose`` for the rows of a model: of tensors, or of arrays. None stands for a target without a model."""
    if model is not None and model.gives_tensors:
        from .hf import sampling as of_tensors

        return of_tensors.make_choose
    from .sampling import choose as of_arrays

    return of_arrays.make_choose


class Stream:
    """An iterator over pieces of text. ``result`` is set at the end of the iteration.

    Closing it or leaving its ``with`` block ends the generation.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self.result: Result | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for update in self._updates:
            self.result = update.result
            if update.result is not None:
                update.result.checked()
            if update.piece:
                return update.piece
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation."""
        self._updates.close()


class LLM:
    """A model, its tokenizer and its default drafter; returned by ``lookahead.load``.

    Args:
        model: a ``lookahead.model.Model``, or a transformers causal language model in eval mode.
        tokenizer: None if there is none; prompts must then be token ids.
        drafter: the default drafter of calls: anything that ``as_drafter`` accepts; None for ``Adaptive()``.
        exact: allow only paths on which drafting leaves the logits bit-identical.
        name: a display name.
        tokenizer_error: why there is no tokenizer, for error messages.
        prefix_cache: number of finished sequences whose keys and values are kept for prompts with the same prefix.

    Attributes:
        model: the ``lookahead.model.Model``; the transformers model of an ``HFModel`` is its ``module``.
        rank_group: the ranks that evaluate together (``lookahead.parallel``); None for this process alone.

    Raises:
        SettingsError: the drafter is not valid, or ``exact`` is set and the model has no exact path.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafter: Any = None,
        exact: bool = False,
        name: str = "",
        tokenizer_error: str = "none was given",
        prefix_cache: int = 0,
    ) -> None:
        if not isinstance(model, Model):
            from .hf.model import HFModel  # imports torch

            model = HFModel(model)
        self.model: Model = model
        self.tokenizer = model.tokenizer = tokenizer
        self.tokenizer_error = tokenizer_error
        self.rank_group: RankGroup | None = None
        self.name = name or self.model.description.partition(",")[0]
        self.drafter = as_drafter(drafter)
        self.exact = exact
        self._prefix_cache = prefix_cache
        self._lent = Lock()
        #: The target of the last call's engine, for the next call, and the model's version at that time.
        self._kept: tuple[Target, Any] | None = None
        with self.model.lock():
            _ = self.model.probe  # rejects a model that cannot be used
            if exact:
                self.target()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.dtype}, {self.model.device}, {self.drafter})"

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as "float32", or the types of packed weights, such as "Q4_K + Q6_K"."""
        return self.model.weights

    @property
    def parameter_count(self) -> int:
        """The number of parameters; tied weights count once."""
        return self.model.parameter_count

    @property
    def vocabulary(self) -> int:
        """V, the vocabulary size."""
        return self.model.shape.vocabulary

    @property
    def context(self) -> int | None:
        """The context length in tokens, including the prompt; None if the model has no limit."""
        return self.model.context

    @property
    def eos(self) -> frozenset[int]:
        """The end tokens: the model's, or else the tokenizer's."""
        given = getattr(self.tokenizer, "eos_token_id", None)
        return self.model.eos or (frozenset() if given is None else frozenset([given]))

    @property
    def path(self) -> str:
        """How steps are evaluated; see ``Target.path``."""
        return self.target().path

    def target(self, path: str = "auto") -> Target:
        """A new target for this model; see ``Model.make_target``, which raises SettingsError."""
        if self.rank_group is not None and path == "auto":
            from .parallel import ParallelTarget

            return ParallelTarget(self.rank_group)
        with self.model.lock():
            return self.model.make_target(path, self.exact)

    def engine(
        self,
        *,
        prefix_cache: int = 0,
        prompt_rows: int = UNLIMITED_ROWS,
        row_budget: int | None = UNLIMITED_ROWS,
        **options: Any,
    ) -> Engine:
        """An engine for this model.

        Args:
            prefix_cache: number of finished sequences whose keys and values are kept for prompts with the same
                prefix.
            prompt_rows: largest number of prompt rows in one forward pass; longer prompts are evaluated in chunks, if
                the model can evaluate chunks.
            row_budget: largest number of rows of all trees in one forward pass; None to take it from the model's cost
                curve (``CostCurve.budget``), but at least 64.
            **options: other keywords of ``Engine``.
        """
        with self.model.lock():
            probe = self.model.probe
            if probe.mode != "tree" or self.exact:  # a chunk of a prompt is evaluated as a tree
                prompt_rows = UNLIMITED_ROWS
            prepare = Preparation(self.model, probe.drafts, self.target, limits_rows=row_budget is None)
            return Engine(
                lambda: with_prefixes(self.target(), prefix_cache),
                prepare=prepare,
                prompt_rows=prompt_rows,
                row_budget=prepare.row_budget if row_budget is None else row_budget,
                **options,
            )

    @contextmanager
    def _lend(self, max_sequences: int) -> Iterator[Engine]:
        """An engine for one call. Only one caller at a time can reuse the sequences that the last call kept."""
        if not self._prefix_cache or not self._lent.acquire(blocking=False):
            with closing(self.engine(max_sequences=max_sequences)) as engine:
                yield engine
            return
        try:
            kept, self._kept = self._kept, None
            with self.model.lock():
                version = self.model.version
                engine = self.engine(
                    target=kept[0] if kept is not None and kept[1] == version else None,
                    max_sequences=max_sequences,
                    prefix_cache=self._prefix_cache,
                )
            try:
                yield engine
            finally:
                target = engine.close()
                self._kept = (target, version) if target is not None else None
        finally:
            self._lent.release()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of one prompt: a string, chat messages or token ids. Raises SettingsError if invalid."""
        return encode(prompt, self.tokenizer, self.tokenizer_error, self.vocabulary, self.context)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: OnePrompt, **keywords: Unpack[BatchKeywords]
    ) -> Result: ...

    @overload
    def generate(self, prompt: Sequence[OnePrompt], **keywords: Unpack[BatchKeywords]) -> list[Result]: ...

    @overload
    def generate(self, prompt: torch.Tensor, **keywords: Unpack[BatchKeywords]) -> Result | list[Result]: ...

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        min_new_tokens: int | None = None,
        drafter: Any = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float | None = None,
        repetition_penalty: float | None = None,
        no_repeat_ngram_size: int | None = None,
        seed: int | None = None,
        bad_words: Sequence[str | Sequence[int]] | None = None,
        logits_processor: Process | Sequence[Process] | None = None,
        batch_size: int | None = None,
        seeds: Sequence[int] | None = None,
        **unknown: Any,
    ) -> Any:
        """The completion of a prompt, or a list of completions for a list of prompts.

        Args:
            prompt: a string, chat messages, token ids, or a list of these.
            max_new_tokens: largest number of new tokens; the model's context length may end a sequence earlier.
            stop: stop string, before which the completion ends; a list for several.
            ignore_eos: continue after the model's end tokens.
            min_new_tokens: smallest number of new tokens; end tokens are excluded before that.
            drafter: how to draft: a ``Drafter`` such as ``Lookahead(15, 5, 15)``, or anything that ``as_drafter``
                accepts; None for the drafter of ``load``. State shared by calls is a field: ``Lookahead(pool=...)``,
                for one prompt at a time, or ``Adaptive(state=...)``.
            temperature: 0 is greedy; above 0 samples.
            top_k: sample from the k most likely tokens.
            top_p: sample from the most likely tokens that together have probability p.
            min_p: sample from tokens with at least p times the probability of the most likely one.
            typical_p: sample from locally typical tokens that together have probability p (Meister et al., 2023).
            repetition_penalty: above 1 discourages tokens of the prompt and the completion; 1 is neutral.
            no_repeat_ngram_size: never repeat an n-gram of this size.
            seed: sampling seed; by default a random one. Prompt i uses seed + i.
            bad_words: strings, or lists of token ids, that never appear.
            logits_processor: callables (ids (1, L), scores (1, V)) -> scores (1, V), applied before temperature.
            batch_size: number of prompts that share forward passes; None for all.
            seeds: a seed per prompt, instead of seed + i.
            **unknown: any other name is an error, which suggests the nearest option.

        Returns:
            A ``Result``, or a list of them in the order of the prompts.

        Raises:
            SettingsError: an option or a prompt is not valid; nothing was decoded.
            NumericalError, OutOfMemory: decoding failed. ``run`` would yield the steps before that.
        """
        refuse_unknown(BatchOptions, unknown)
        prompts, several = as_list(prompt)
        options = BatchOptions(
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            min_new_tokens=min_new_tokens,
            drafter=drafter,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            seed=seed,
            bad_words=bad_words,
            logits_processor=logits_processor,
            batch_size=max(1, len(prompts)) if batch_size is None else batch_size,
            seeds=seeds,
        )
        results: dict[int, Result] = {}
        for update in self._run(prompts, options):
            if update.result is not None:
                results[update.index] = update.result.checked()
        return [results[i] for i in range(len(prompts))] if several else results[0]

    def stream(self, prompt: Prompt, options: Options | None = None, **keywords: Unpack[Keywords]) -> Stream:
        """The completion of one prompt, in pieces as tokens are accepted; see ``Stream``.

        Args:
            prompt: a string, chat messages or token ids.
            options: the options of the generation.
            **keywords: the same options as keywords, documented in ``generate``.

        Raises:
            SettingsError: an option or the prompt is not valid; raised immediately, before the first piece.
        """
        prompts, several = as_list(prompt)
        if several:
            raise SettingsError(f"stream takes one prompt, got a list of {len(prompts)}; use run or generate")
        return Stream(self._run(prompts, BatchOptions.of(Options.of(options, keywords), {})))

    def run(
        self, prompts: Sequence[Prompt], options: Options | None = None, **keywords: Unpack[BatchKeywords]
    ) -> Updates:
        """Decode a list of prompts and yield every step of each.

        At most ``batch_size`` prompts (by default one) are decoded concurrently; whenever one ends, the next one
        joins. An error in one prompt ends only that prompt: its last update has a result with ``finish_reason``
        "error".

        Args:
            prompts: strings, chat messages or token ids.
            options: the options of the generation; ``BatchOptions`` also has the batch size.
            **keywords: the same options as keywords, documented in ``generate``.

        Raises:
            SettingsError: an option or a prompt is not valid; raised immediately.
            RankError: a rank of the group has been lost, so no further prompt can be decoded.
        """
        given, several = as_list(prompts)
        if not several and given != [[]]:
            raise SettingsError(
                "run takes a list of prompts, got one; use generate or stream, or give [prompt]"
            )
        return self._run(given if several else [], BatchOptions.of(options, keywords))

    def _run(self, prompts: Sequence[Prompt], chosen: BatchOptions) -> Updates:
        drafter = chosen.drafting(self.drafter)
        if isinstance(drafter, Lookahead) and drafter.pool is not None and len(prompts) > 1:
            raise SettingsError(f"a pool can be used for one prompt at a time, got {len(prompts)} prompts")

        # One seed per prompt.
        seeds: Sequence[int | None] | None = chosen.seeds
        if seeds is not None and len(seeds) != len(prompts):
            raise SettingsError(f"seeds must be one per prompt ({len(prompts)}), got {len(seeds)}")
        if not chosen.sampled:
            seeds = [None] * len(prompts)
        elif seeds is None:
            first = randbits(62) if chosen.seed is None else chosen.seed
            seeds = range(first, first + len(prompts))
        stops = self.split_stops(chosen)
        requests = [
            self.prepare(prompt, chosen, seed, stops) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return self._decode(requests, chosen.batch_size or 1)

    def _decode(self, requests: Sequence[Request], batch_size: int) -> Updates:
        with self._lend(batch_size) as engine:
            for index, request in enumerate(requests):
                request.tag = index
                engine.add(request)
            while engine.busy:
                with self.model.lock(engine.target):
                    updates = engine.step()
                if self.rank_group is not None and self.rank_group.error is not None:
                    raise self.rank_group.error  # no later prompt could be decoded
                yield from updates
                for update in updates:
                    if update.result is not None and engine.target is not None:
                        self._measure(engine.target, update.result.stats)

    def _measure(self, target: Target, stats: Stats) -> None:
        """Measure the cost of steps, after the first text on a machine or if that text shows that it has changed."""
        curves = self.model.state.get("curves")
        if not curves:
            return
        from .drafters.adaptive.model_curves import forget_outdated, measure_wanted
        from .drafters.notice import notice

        forget_outdated(self.model, target, stats)
        if None in curves.values():
            with self.model.lock():
                measure_wanted(self.model, self.target, notice)

    def tune(self) -> tuple[CostCurve, Path | None]:
        """Measure the cost of steps again, and save the curve that adaptive uses for this model and machine.

        Returns:
            (the curve, its file, or None if it was not saved because other work disturbed the measurement).

        Raises:
            SettingsError: the model has too few positions or tokens, or the cache folder cannot be written.
        """
        from .drafters.adaptive.model_curves import tune

        return tune(self.model, self.target())

    def split_stops(self, options: Options) -> tuple[list[str], frozenset[int]]:
        """The stop strings and stop tokens of the options (``text.decoder.split_stops``).

        Raises:
            SettingsError: there are stop strings but no tokenizer, or one of them is not valid.
        """
        if options.stops and self.tokenizer is None:
            raise SettingsError(f"stop strings need a tokenizer, but {self.tokenizer_error}")
        return split_stops(self.tokenizer, options.stops)

    def prepare(
        self,
        prompt: Prompt,
        options: Options,
        seed: int | None = None,
        stops: tuple[list[str], frozenset[int]] | None = None,
    ) -> Request:
        """The request for one prompt, for ``engine.add``.

        Args:
            prompt: a string, chat messages or token ids.
            options: the options of the generation.
            seed: sampling seed; None for greedy decoding.
            stops: ``split_stops`` of the options, if several requests share it.

        Raises:
            SettingsError: the prompt or an option is not valid.
        """
        ids = self.encode(prompt)
        length = options.max_new_tokens
        if self.context is not None:
            length = min(length, self.context - len(ids))
        strings, stop_tokens = self.split_stops(options) if stops is None else stops
        eos = frozenset() if options.ignore_eos else self.eos
        make_choose = chooser_of(self.model)
        choose, noise = make_choose(
            options, ids, seed, eos, self.tokenizer, self.vocabulary, self.model.device
        )
        return Request(
            ids,
            options.drafting(self.drafter),
            length,
            choose,
            eos | stop_tokens,
            noise=noise,
            detokenizer=TextDecoder(self.tokenizer, ids, strings),
            seed=seed,
        )

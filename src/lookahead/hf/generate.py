"""``model.generate(custom_generate=lookahead.generate)``: the same output, in fewer forward passes.

transformers prepares inputs, logits processors and stopping criteria and then calls ``generate`` below in
place of its own loop. Every token is chosen as that loop would choose it: processors see the token's true
prefix, stopping criteria are asked after every token, and sampling uses the same random numbers in the same
order. Options that cannot be honoured are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core import LookaheadConfig, Request, SettingsError, Stats, Target, decode
from ..drafters import OWN_SETTINGS, make_drafter, method_for
from ..sampling import GeneratorNoise
from ..targets.factory import make_target, probe
from ..targets.transformers import TransformersTarget
from .refusals import caller_arguments, refuse
from .rows import Criteria, Row, may_draw_ahead, row_processors

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    method: str | None = None,
    lookahead_config: Any = None,
    window_size: int | None = None,
    ngram_size: int | None = None,
    guess_set_size: int | None = None,
    pool: Any = None,
    stats: list[Stats] | None = None,
    exact: bool = False,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode with lookahead; pass this function to ``model.generate(custom_generate=...)``.

    Settings come from these keywords, which ``model.generate`` passes on, or else from ``lookahead_method``
    and ``lookahead_config`` of the model's generation config, or else from the defaults.

    Args:
        model: any decoder-only transformers model.
        input_ids: prompts, shape (B, L), left-padded.
        logits_processor, stopping_criteria, generation_config: as transformers prepares them.
        streamer: given to ``model.generate`` or bound with ``functools.partial``; one sequence only.
        method: a drafting method; by default "adaptive", or "lookahead" where a (W, N, G) is given.
        lookahead_config: anything that ``LookaheadConfig.of`` takes, or settings of adaptive.
        window_size, ngram_size, guess_set_size: W, N and G.
        pool: what to keep across calls: an n-gram pool for lookahead, one sequence at a time, or an
            ``AdaptiveState`` for adaptive.
        stats: a list that receives one ``Stats`` per sequence.
        exact: only a path on which drafting changes no bit of a text (docs/exactness.md).
        **model_kwargs: what transformers prepared for its own loop.

    Returns:
        What ``model.generate`` returns without ``custom_generate``: the sequences (B, L + new), or a
        ``GenerateDecoderOnlyOutput`` if return_dict_in_generate is set.

    Raises:
        SettingsError: an option that cannot be honoured, by name.
    """
    given = caller_arguments()
    streamer = streamer if streamer is not None else given.get("streamer")
    config = generation_config if generation_config is not None else model.generation_config
    processors = logits_processor if logits_processor is not None else LogitsProcessorList()
    stopping_criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    found = probe(model)  # refuses what is no decoder-only language model
    refuse(config, processors, input_ids, synced_gpus, streamer, model_kwargs, given)
    triple = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
    sizes = {key: value for key, value in triple.items() if value is not None}
    if lookahead_config is None:
        lookahead_config = getattr(config, "lookahead_config", None)
    method = method or getattr(config, "lookahead_method", None)
    name, settings = _drafting(method, lookahead_config, sizes, pool, model.device.type)

    batch, prompt_length = input_ids.shape
    criteria = Criteria(stopping_criteria)
    limit = min(criteria.max_length, config.max_length or prompt_length + 20) - prompt_length
    if limit < 1:
        raise SettingsError(f"max_new_tokens must be at least 1, got room for {limit}")
    returns = bool(config.return_dict_in_generate)
    cache = model_kwargs.get("past_key_values")
    keeps = batch == 1 and (returns or getattr(cache, "_is_user_defined", False))
    keeps = keeps and found.facts is not None
    # The compiled path's cache is of another form than the one that is handed back.
    path = "transformers" if keeps and model.device.type == "cpu" else "auto"
    fresh = partial(make_target, model, path=path, exact=exact)
    target = fresh()
    if keeps:
        target = cast(Target, _Keeping(cast(TransformersTarget, target)))
    if found.mode == "plain":  # one row a step, so there is nothing to draft
        make_drafter(name, settings, target.vocabulary)  # refuses settings that it cannot take, as elsewhere
        name, settings = "autoregressive", None
    if pool is None and name == "adaptive":  # nothing of earlier texts, but the step times measured here
        from ..drafters.adaptive import AdaptiveConfig, AdaptiveState, times_for

        settings = AdaptiveConfig.of(settings)
        times = times_for(model, target.path, fresh) if settings.budget else None
        pool = AdaptiveState(settings, keep=False, times=times)
    noise = GeneratorNoise(batch, target.vocabulary, input_ids.device) if config.do_sample else None
    ahead = may_draw_ahead(processors, stopping_criteria)
    temperature = float(config.temperature or 1.0)

    rows = [
        Row(
            b, input_ids[b], limit, row_processors(processors, b, batch), criteria, noise, temperature,
            [] if returns and config.output_scores else None, [] if returns and config.output_logits else None,
            streamer,
        )
        for b in range(batch)
    ]  # fmt: skip

    def run(some: Sequence[Row], texts: Sequence[list[int]], limits: Sequence[int]) -> list[Stats]:
        """Decode rows together; ``texts`` are their tokens so far without padding."""
        requests = []
        for row, text, left in zip(some, texts, limits, strict=True):
            drafter = make_drafter(name, settings, target.vocabulary, pool)
            if ahead:
                drafter.use_noise(row.noise())
            requests.append(Request(text, drafter, left, row.choose(), criteria.eos, row.finished))
        found: list[Stats] = []
        for step in decode(target, requests):
            if step.tree is None:
                found.append(step.generation.stats)
            if noise is not None:
                furthest = max(row.emitted for row in rows)
                noise.forget(min((row.emitted for row in rows if row.draws), default=furthest), furthest)
        return found

    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    all_stats = run(rows, prompts, [limit] * batch)
    if stats is not None:
        stats.extend(all_stats)
    longest = max(row.emitted for row in rows)
    pad = _pad_token(config, criteria)
    # Rows that ended early go on as in transformers: with padding, or, where nothing pads, with their text.
    # Padding by itself needs no model; scores of padded places do.
    early = [
        row for row in rows if row.emitted < longest and (row.records or pad is None or not criteria.pads)
    ]
    if early:
        for row in early:
            row.fill = pad if criteria.pads else None
        texts = [prompts[row.index] + row.tokens().tolist() for row in early]
        run(early, texts, [longest - row.emitted for row in early])
    if noise is not None:
        noise.settle(longest)
    if streamer is not None:
        streamer.end()

    sequences = input_ids.new_full((batch, prompt_length + longest), pad if pad is not None else 0)
    sequences[:, :prompt_length] = input_ids
    for row in rows:
        sequences[row.index, prompt_length : prompt_length + row.emitted] = row.tokens()
    cache = target.filled_cache(cache) if isinstance(target, _Keeping) else None
    if not returns:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=_by_time([row.scores for row in rows]),
        logits=_by_time([row.logits for row in rows]),
        past_key_values=cache,
    )


def _drafting(
    method: str | None, config: Any, sizes: dict[str, int], pool: Any, device: str
) -> tuple[str, Any]:
    """(method, its settings) from what was given; the device's (W, N, G) where none was."""
    name = method_for(method, config if config is not None or not sizes else sizes, pool)
    if name not in OWN_SETTINGS:
        if config is None and not sizes:
            config = LookaheadConfig.for_device(device)
        return name, LookaheadConfig.of(config, **sizes)
    if not sizes:
        return name, config
    if config is not None and not isinstance(config, Mapping):
        raise SettingsError(
            f"{next(iter(sizes))} and lookahead_config cannot be given together to {name}; use one of them"
        )
    return name, {**(config or {}), **sizes}


def _unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Each row's own tokens. Left padding is dropped, since padded places are never seen by attention."""
    if mask is None:
        return input_ids.tolist()
    if not bool((mask[:, -1] == 1).all()):
        raise SettingsError("prompts must be padded on the left; the attention mask ends with 0 in some row")
    return [ids[seen.bool()].tolist() for ids, seen in zip(input_ids, mask, strict=True)]


def _pad_token(config: GenerationConfig, criteria: Criteria) -> int | None:
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        pad = config.pad_token_id
    if pad is None and criteria.eos:
        pad = min(criteria.eos)
    return None if pad is None else int(pad)


def _by_time(rows: list[list[torch.Tensor] | None]) -> Any:
    """From (1, V) per row and time step to a tuple of (B, V) per time step; None where nothing was kept."""
    kept = [row for row in rows if row is not None]
    return tuple(torch.cat(step) for step in zip(*kept, strict=True)) if kept else None


class _Keeping:
    """A target of one sequence whose cache the caller wants: it is kept after the sequence has ended."""

    def __init__(self, target: TransformersTarget) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def release(self, slot: int) -> None:
        """Keep the slot."""

    def filled_cache(self, given: Any) -> DynamicCache:
        """The sequence's keys and values in transformers' own cache: in the one that was given if it is empty."""
        cache = given
        if not isinstance(cache, DynamicCache) or cache.get_seq_length() > 0:
            cache = DynamicCache(config=self._target.facts.config)
        for layer, pair in enumerate(self._target.cache.read(0, self._target.lengths[0])):
            if pair is not None:
                cache.update(*pair, layer)
        return cache

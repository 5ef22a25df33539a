"""``model.generate(custom_generate=lookahead.generate)``: the same output, in fewer forward passes.

transformers prepares inputs, logits processors and stopping criteria and then calls ``generate`` below in
place of its own loop. Every token is chosen as that loop would choose it: processors see the token's true
prefix, stopping criteria are asked after every token, and sampling uses the same random numbers in the same
order. Options that cannot be honoured are refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers import StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .core import Decoder, Drafter, NGramPool, Request, SettingsError, Stats, make_drafter
from .core.config import LookaheadConfig
from .core.target import Scores
from .targets.probe import make_target, probe
from .targets.transformers import FAR, TransformersTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

#: Keywords that transformers prepares itself and that need nothing more from us.
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_params"}


class NoiseStream:
    """The random numbers of ``torch.multinomial``, drawn in time order and kept until every row has used them.

    torch.multinomial(p, 1) is argmax(p / q) with q exponential noise of p's shape from the same generator.
    Rows of a batch reach a time step in different forward passes, and a drafter may look ahead; the
    generator still ends where plain sampling would have left it.

    Args:
        batch: B. vocabulary: V. device: of the noise.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (batch, vocabulary)
        self._device = device
        self._noise: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each step's draw
        self._drawn = 0
        self._next = [0] * batch

    def at(self, step: int) -> torch.Tensor:
        """Exponential noise (B, V) of time step ``step``."""
        while self._drawn <= step:
            self._states[self._drawn] = self._generator_state()
            noise = torch.empty(self._shape, dtype=torch.float32, device=self._device)
            self._noise[self._drawn] = noise.exponential_(1)
            self._drawn += 1
        return self._noise[step]

    def used(self, row: int, step: int) -> None:
        """Row ``row`` needs no noise up to and including ``step`` any more."""
        self._next[row] = step + 1
        oldest = min(self._next)
        for old in [key for key in self._noise if key < oldest]:
            del self._noise[old], self._states[old]

    def settle(self, steps: int) -> None:
        """Leave the generator as after ``steps`` time steps of plain sampling, if more were drawn ahead."""
        if steps < self._drawn:
            self._set_generator_state(self._states[steps])

    def _generator_state(self) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set_generator_state(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


class Row:
    """One sequence of the batch: chooses its tokens as transformers' loop does, and knows when it ends.

    Args:
        index: place in the batch.
        ids: the prompt as transformers sees it, padding included, shape (L,).
        processors: applied to the logits with the true prefix; None for none.
        noise: for sampling; None for greedy.
        keep_scores, keep_logits: collect what output_scores and output_logits return.
    """

    def __init__(
        self,
        index: int,
        ids: torch.Tensor,
        length: int,
        processors: LogitsProcessorList | None,
        criteria: Criteria,
        noise: NoiseStream | None,
        keep_scores: bool,
        keep_logits: bool,
        streamer: BaseStreamer | None,
    ) -> None:
        self.index = index
        self._ids = torch.empty(1, len(ids) + length, dtype=torch.long, device=ids.device)
        self._ids[0, : len(ids)] = ids
        self._prompt = self._end = len(ids)
        self._processors = processors
        self._criteria = criteria
        self._noise = noise
        self._streamer = streamer
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        #: Once the sequence has ended: it is only carried on to the length of the longest one,
        self.ended = False
        #: with this token, or with its own text where that is None.
        self.fill: int | None = None

    @property
    def emitted(self) -> int:
        """Tokens so far."""
        return self._end - self._prompt

    def tokens(self) -> torch.Tensor:
        """The tokens emitted."""
        return self._ids[0, self._prompt : self._end]

    def choose(self, scores: Scores, node: int) -> int:
        """The token under ``node``, by the processors, the noise and the true prefix."""
        plain = self._processors is None and self._noise is None
        if plain and self.scores is None and self.logits is None:
            token = scores.best(node)
        else:
            token = self._choose(scores.row(node).float(), scores.best(node))
        if self.fill is not None:
            token = self.fill
        if self._noise is not None and not self.ended:
            self._noise.used(self.index, self.emitted)
        self._ids[0, self._end] = token
        self._end += 1
        return token

    def _choose(self, logits: torch.Tensor, best: int) -> int:
        values = logits[None].clone()
        if self.logits is not None:
            self.logits.append(values.clone())
        if self._processors is not None:
            values = self._processors(self._ids[:, : self._end], values)
        if self.scores is not None:
            self.scores.append(values)
        if self._noise is not None and self.fill is None:
            p = torch.nn.functional.softmax(values, dim=-1)
            noise = self._noise.at(self.emitted)[self.index]
            return int((p[0] / noise).argmax())
        return best if self._processors is None else int(values.argmax())

    def finished(self, token: int) -> str | None:
        """Whether the stopping criteria end the sequence after its newest token."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self.ended:
            return None
        scores = tuple(self.scores) if self.scores is not None else None
        reason = self._criteria.reason(self._ids[:, : self._end], token, scores)
        if reason is not None and self._noise is not None and self._criteria.pads:
            self._noise.used(self.index, FAR)  # padding draws nothing
        return reason


class Criteria:
    """Stopping criteria of one row; the two that every call has are answered without tensors."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.eos: frozenset[int] = frozenset()
        self.max_length = 1 << 60
        self._others = StoppingCriteriaList()
        for one in criteria:
            if type(one) is EosTokenCriteria:
                self.eos |= frozenset(int(t) for t in one.eos_token_id.flatten())
            elif type(one) is MaxLengthCriteria:
                self.max_length = min(self.max_length, one.max_length)
            else:
                self._others.append(one)
        #: transformers pads rows that have ended only where such a criterion is present.
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)

    def reason(self, ids: torch.Tensor, token: int, scores: tuple[torch.Tensor, ...] | None) -> str | None:
        """A finish reason, or None to go on. Every criterion is asked for every token, as plain decoding does."""
        stop = any([bool(one(ids, scores).any()) for one in self._others])
        if stop or token in self.eos:
            return "stop"
        return "length" if ids.shape[1] >= self.max_length else None


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
    pool: NGramPool | None = None,
    stats: list[Stats] | None = None,
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
        method: a drafting method, "lookahead" by default.
        lookahead_config: anything that ``LookaheadConfig.of`` takes.
        window_size, ngram_size, guess_set_size: W, N and G.
        pool: an n-gram pool to keep across calls; one sequence at a time.
        stats: a list that receives one ``Stats`` per sequence.
        **model_kwargs: what transformers prepared for its own loop.

    Returns:
        What ``model.generate`` returns without ``custom_generate``: the sequences (B, L + new), or a
        ``GenerateDecoderOnlyOutput`` if return_dict_in_generate is set.

    Raises:
        SettingsError: an option that cannot be honoured, by name.
    """
    given = _caller_arguments()
    streamer = streamer if streamer is not None else given.get("streamer")
    config = generation_config if generation_config is not None else model.generation_config
    processors = logits_processor if logits_processor is not None else LogitsProcessorList()
    stopping_criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    found = probe(model)  # refuses what is no decoder-only language model
    _refuse(config, processors, input_ids, synced_gpus, streamer, model_kwargs, given)
    settings = LookaheadConfig.of(
        lookahead_config if lookahead_config is not None else getattr(config, "lookahead_config", None),
        window_size=window_size,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
    )
    name = method or getattr(config, "lookahead_method", None) or "lookahead"

    batch, prompt_length = input_ids.shape
    criteria = Criteria(stopping_criteria)
    room = min(criteria.max_length, config.max_length or prompt_length + 20) - prompt_length
    if room < 1:
        raise SettingsError(f"max_new_tokens must be at least 1, got room for {room}")
    returns = bool(config.return_dict_in_generate)
    if found.mode == "plain":
        name = "autoregressive"
    cache = model_kwargs.get("past_key_values")
    keeps = returns or getattr(cache, "_is_user_defined", False)
    target = _Keeping(model, found.facts) if keeps and found.mode == "tree" else make_target(model)
    noise = NoiseStream(batch, target.vocabulary, input_ids.device) if config.do_sample else None
    rows = [
        Row(
            b,
            input_ids[b],
            room,
            _row_processors(processors, b, batch),
            criteria,
            noise,
            returns and bool(config.output_scores),
            returns and bool(config.output_logits),
            streamer,
        )
        for b in range(batch)
    ]
    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))

    def drafter() -> Drafter:
        return make_drafter(name, settings, target.vocabulary, pool)

    def decode(some: Sequence[Row], texts: Sequence[list[int]], limits: Sequence[int]) -> list[Stats]:
        decoder = Decoder(target)
        running = [
            decoder.add(Request(text, drafter(), limit, row.choose, criteria.eos, row.finished))
            for row, text, limit in zip(some, texts, limits, strict=True)
        ]
        while decoder.busy:
            decoder.step()
        for generation in running:
            if generation.error is not None:
                raise generation.error
        return [generation.stats for generation in running]

    all_stats = decode(rows, prompts, [room] * batch)
    if stats is not None:
        stats.extend(all_stats)
    longest = max(row.emitted for row in rows)
    pad = _pad_token(config, criteria)
    _go_on_to(longest, rows, prompts, pad if criteria.pads else None, decode)
    if noise is not None:
        noise.settle(longest)
    if streamer is not None:
        streamer.end()

    sequences = input_ids.new_full((batch, prompt_length + longest), pad if pad is not None else 0)
    sequences[:, :prompt_length] = input_ids
    for row in rows:
        sequences[row.index, prompt_length : prompt_length + row.emitted] = row.tokens()
    if keeps:
        cache = _filled_cache(target, cache, batch)
    if not returns:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_time([row.scores for row in rows]),
        logits=_by_time([row.logits for row in rows]),
        past_key_values=cache,
    )


def _go_on_to(
    longest: int,
    rows: list[Row],
    prompts: list[list[int]],
    fill: int | None,
    decode: Callable[[list[Row], list[list[int]], list[int]], Any],
) -> None:
    """Rows that ended early go on as in transformers: with padding, or, where nothing pads, with their text.

    Padding by itself needs no model; scores of padded places do.
    """
    early = [row for row in rows if row.emitted < longest]
    if fill is not None:
        early = [row for row in early if row.scores is not None or row.logits is not None]
    if not early:
        return
    texts = [prompts[row.index] + row.tokens().tolist() for row in early]
    for row in early:
        row.ended, row.fill = True, fill
    decode(early, texts, [longest - row.emitted for row in early])


def _refuse(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    input_ids: torch.Tensor,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
    given: dict[str, Any],
) -> None:
    """Name every option that this loop cannot honour."""
    batch = input_ids.shape[0]
    plain = "leave it out, or call model.generate without custom_generate"
    refused = [
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams} (beam search)", "use num_beams=1"),
        (given.get("assistant_model") is not None, "assistant_model", "lookahead needs no draft model"),
        (bool(config.prompt_lookup_num_tokens), "prompt_lookup_num_tokens", 'use method="prompt-lookup"'),
        (bool(getattr(config, "penalty_alpha", None)), "penalty_alpha (contrastive search)", plain),
        (bool(getattr(config, "dola_layers", None)), "dola_layers", plain),
        (bool(getattr(config, "constraints", None)), "constraints", plain),
        (bool(getattr(config, "force_words_ids", None)), "force_words_ids", plain),
        (
            config.cache_implementation in ("quantized", "offloaded", "offloaded_static", "paged"),
            f"cache_implementation={config.cache_implementation!r}",
            "lookahead keeps a cache of its own; leave it out",
        ),
        (bool(getattr(config, "prefill_chunk_size", None)), "prefill_chunk_size", plain),
        (bool(config.output_attentions), "output_attentions", plain),
        (bool(config.output_hidden_states), "output_hidden_states", plain),
        (bool(synced_gpus), "synced_gpus", plain),
        (streamer is not None and batch > 1, f"streamer with {batch} sequences", "stream one sequence"),
        (model_kwargs.get("inputs_embeds") is not None, "inputs_embeds", "pass input_ids"),
        (input_ids.shape[1] == 0, "an empty prompt", "pass at least one token"),
    ]
    for one in processors:
        if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            refused.append((True, "guidance_scale", plain))
        if isinstance(one, SynthIDTextWatermarkLogitsProcessor) and batch > 1:
            refused.append((True, "a SynthID watermark for several sequences", "pass one sequence"))
    cache = model_kwargs.get("past_key_values")
    if cache is not None and getattr(cache, "_is_user_defined", False):
        refused.append(
            (
                cache.get_seq_length() > 0,
                f"past_key_values that hold {cache.get_seq_length()} tokens",
                "pass the whole prompt",
            )
        )
        refused.append((batch > 1, "past_key_values for several sequences", "pass one sequence"))
        refused.append(
            (not isinstance(cache, DynamicCache), f"past_key_values of type {type(cache).__name__}", plain)
        )
    for key, value in model_kwargs.items():
        if key not in PREPARED and value is not None and key != "inputs_embeds":
            refused.append((True, f"the model input {key}", "only input_ids and attention_mask are supported"))
    for condition, what, cure in refused:
        if condition:
            raise SettingsError(f"lookahead.generate cannot honour {what}; {cure}")


def _unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Each row's own tokens. Left padding is dropped, since padded places are never seen by attention."""
    if mask is None:
        return input_ids.tolist()
    if not bool((mask[:, -1] == 1).all()):
        raise SettingsError("prompts must be padded on the left; the attention mask ends with 0 in some row")
    rows = [ids[seen.bool()].tolist() for ids, seen in zip(input_ids, mask, strict=True)]
    return rows


def _row_processors(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList | None:
    """Processors see one row at a time, so one that asks for the row's number is told it."""
    if not processors:
        return None
    return processors if batch == 1 else LogitsProcessorList(_row_processor(p, row, batch) for p in processors)


def _row_processor(processor: Any, row: int, batch: int) -> Any:
    """A copy that holds what ``processor`` keeps for this row; ``processor`` itself where it keeps nothing."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    for name in ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams"):
        kept = getattr(processor, name, None)
        if kept is not None and not isinstance(kept, int):
            own = copy.copy(processor)
            # With num_return_sequences there are fewer entries than rows.
            place = row * len(kept) // batch
            setattr(own, name, kept[place : place + 1])
            if hasattr(own, "batch_size"):
                own.batch_size = 1
            return own
    return processor


def _pad_token(config: GenerationConfig, criteria: Criteria) -> int | None:
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        pad = config.pad_token_id
    if pad is None and criteria.eos:
        pad = min(criteria.eos)
    return None if pad is None else int(pad)


def _by_time(rows: list[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """From (1, V) per row and time step to (B, V) per time step."""
    if rows[0] is None:
        return None
    return tuple(torch.cat(step) for step in zip(*rows, strict=True))  # type: ignore[arg-type]


def _caller_arguments() -> dict[str, Any]:
    """``streamer`` and ``assistant_model`` of the running ``model.generate``.

    transformers hands neither to a callable, and a streamer that is silently ignored leaves its reader
    waiting for ever; so they are read where they are.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    try:
        for _ in range(6):
            frame = frame.f_back if frame is not None else None
            if frame is not None and frame.f_code is code:
                return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}
        return {}
    finally:
        del frame


class _Keeping(TransformersTarget):
    """A target that keeps released slots, because the caller wants the cache."""

    def release(self, slot: int) -> None:
        self._pending.pop(slot, None)


def _filled_cache(target: Any, cache: Any, batch: int) -> Any:
    """The keys and values of one sequence in transformers' own cache; None for several."""
    if batch > 1 or not isinstance(target, _Keeping):
        return None
    if not isinstance(cache, DynamicCache) or cache.get_seq_length() > 0:
        cache = DynamicCache(config=target.facts.config)
    for layer, pair in enumerate(target.cache.read(0, target.lengths[0])):
        if pair is not None:
            cache.update(*pair, layer)
    return cache

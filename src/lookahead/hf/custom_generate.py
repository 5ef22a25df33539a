"""``model.generate(custom_generate=lookahead.generate)``: the same output, in fewer forward passes.

transformers prepares inputs, logits processors and stopping criteria, and then calls ``generate`` below instead of
its own loop. Each token is chosen as in that loop: processors see the token's true prefix, stopping criteria are
called after every token, and sampling uses the same random numbers in the same order. Unsupported options are
rejected by name. ``lookahead.core.Engine`` decodes the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core import Engine, LookaheadError, Request, SettingsError, Stats, Target
from ..drafters import as_drafter
from ..drafters.adaptive.model_curves import measure_wanted
from ..drafters.notice import notice
from ..drafters.prepare import Preparation
from .batch_sequence import Criteria, Row, for_row, may_draw_ahead, row_processors
from .caller import DROPPED, CustomGenerate
from .masks import LayerTypes
from .model import HFModel
from .past_key_values import KeepingTarget, fill_cache
from .paths import limit_graphs, warn_about_shortfall
from .refusals import refuse
from .sampling import GeneratorNoise

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer


@CustomGenerate
def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    drafter: Any = None,
    stats: list[Stats] | None = None,
    exact: bool = False,
    graph_memory: float | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode with lookahead. Pass this function to ``model.generate(custom_generate=...)``.

    Settings come from these keywords, which ``model.generate`` passes on, else from ``lookahead_drafter`` in the
    model's generation config, else from the defaults.

    Args:
        model: a decoder-only transformers model.
        input_ids: prompts, shape (B, L), left-padded.
        logits_processor, stopping_criteria, generation_config: as prepared by transformers.
        synced_gpus: must be False. transformers sets it under FSDP and DeepSpeed ZeRO-3, where every process must
            run the same number of passes.
        streamer: given to ``model.generate`` or bound with ``functools.partial``; one sequence only.
        drafter: how to draft: a ``Drafter`` such as ``lookahead.Lookahead(15, 5, 15)``, or anything that
            ``lookahead.as_drafter`` accepts; by default ``Adaptive()``.
        stats: a list; one ``Stats`` per sequence is appended.
        exact: allow only paths on which drafting changes no bit of the logits (docs/exactness.md).
        graph_memory: on a GPU: share of its memory for captured passes of this model, in this call and later ones;
            initially 0.1.
        tokenizer: as for ``model.generate``, for ``stop_strings``; a base table is used only if it is given.
        **model_kwargs: the inputs that transformers prepared for its own loop.

    Returns:
        What ``model.generate`` returns without ``custom_generate``: the sequences (B, L + new), or a
        ``GenerateDecoderOnlyOutput`` if return_dict_in_generate is set. Its ``past_key_values`` is None for several
        sequences, and for models whose token trees do not work here.

    Raises:
        SettingsError: an option is not supported; the message names it.
    """
    given = model_kwargs.pop(DROPPED, {})
    streamer = streamer if streamer is not None else given.get("streamer")
    assert generation_config is not None  # CustomGenerate requires it
    config = generation_config
    processors = logits_processor if logits_processor is not None else LogitsProcessorList()
    stopping_criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    ours = HFModel(model)  # rejects models other than decoder-only language models
    ours.tokenizer = tokenizer
    with ours.lock():
        probed = ours.probe
    facts: Any = probed.facts
    refuse(
        model, config, processors, input_ids, synced_gpus, streamer, model_kwargs, given, facts is not None
    )
    # The drafter, the length limit, and what to return.
    named = drafter if drafter is not None else getattr(config, "lookahead_drafter", None)
    chosen = as_drafter(named)
    input_ids = input_ids.long()  # transformers returns int64 for any integers
    batch, prompt_length = input_ids.shape
    criteria = Criteria(stopping_criteria)
    # A caller's criterion replaces that of config.max_length. If the prompt already meets it, one token is emitted.
    longest_text = criteria.max_length or config.max_length or prompt_length + 20
    limit = max(1, longest_text - prompt_length)
    returns = bool(config.return_dict_in_generate)
    cache = model_kwargs.get("past_key_values")
    wants_cache = cache is not None and batch == 1 and (returns or getattr(cache, "_is_user_defined", False))

    def fresh() -> Target:
        with ours.lock():
            return ours.make_target(exact=exact)

    # The target and the engine.
    if graph_memory is not None:
        limit_graphs(ours, graph_memory)
    target = fresh()
    warn_about_shortfall(model, target, "lookahead.generate runs this model", again=False, stacklevel=2)
    keeping = KeepingTarget(target) if wants_cache and facts is not None else None
    engine = Engine(
        fresh,
        target=keeping if keeping is not None else target,
        prepare=Preparation(ours, probed.drafts, fresh),
    )
    noise = GeneratorNoise(batch, target.vocabulary, input_ids.device) if config.do_sample else None
    ahead = may_draw_ahead(processors, stopping_criteria)
    temperature = float(config.temperature or 1.0)

    # Decode all rows together.
    rows = [
        Row(
            b,
            input_ids[b],
            limit,
            row_processors(processors, b, batch),
            Criteria(for_row(stopping_criteria, batch), batch),
            noise,
            temperature,
            model.device,
            [] if returns and config.output_scores else None,
            [] if returns and config.output_logits else None,
            streamer,
        )
        for b in range(batch)
    ]

    def run(subset: Sequence[Row], texts: Sequence[list[int]], limits: Sequence[int]) -> list[Stats]:
        """Decode rows together. ``texts`` are their tokens so far, without padding."""
        sequences = []
        for row, text, left in zip(subset, texts, limits, strict=True):
            # A finished row continues past end tokens, which may include the padding token.
            eos = frozenset[int]() if row.ended else criteria.eos
            row_noise = row.noise() if ahead else None
            request = Request(text, chosen, left, row.choose(), eos, row.finished, noise=row_noise)
            sequences.append(engine.add(request))
        while engine.busy:
            with ours.lock(engine.target):
                updates = engine.step()
            for update in updates:
                if update.result is not None:
                    _raise(update.result.error)
            if noise is not None:
                furthest = max(row.emitted for row in rows)
                noise.forget([row.emitted if row.draws else furthest for row in rows], furthest)
        return [sequence.result.stats for sequence in sequences if sequence.result is not None]

    prompts = _unpadded(model, input_ids, model_kwargs.get("attention_mask"))
    all_stats = run(rows, prompts, [limit] * batch)
    if stats is not None:
        stats.extend(all_stats)
    longest = max(row.emitted for row in rows)
    pad = _pad_token(config, criteria)
    # Rows that ended early continue as in transformers: with padding or, if no criterion pads, with their own tokens.
    # Padding needs no model, but the scores at padded positions do.
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
    with ours.lock():
        measure_wanted(ours, fresh, notice)  # after the first text on a machine

    # The result, in transformers' form.
    sequences = input_ids.new_full((batch, prompt_length + longest), pad if pad is not None else 0)
    sequences[:, :prompt_length] = input_ids
    for row in rows:
        sequences[row.index, prompt_length : prompt_length + row.emitted] = row.tokens()
    cache = fill_cache(keeping, cache, model_kwargs.get("attention_mask")) if keeping is not None else None
    if not returns:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=_by_time([row.scores for row in rows]),
        logits=_by_time([row.logits for row in rows]),
        past_key_values=cache,
    )


def _unpadded(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Each row's tokens without those that the mask hides, because full attention never sees them.

    Raises:
        SettingsError: the padding is on the right, or inside the text of a model with windows, which count it.
    """
    if mask is None:
        return input_ids.tolist()
    if not bool((mask[:, -1] == 1).all()):
        raise SettingsError("prompts must be padded on the left; the attention mask ends with 0 in some row")
    whole = LayerTypes.of(model.config.get_text_config()).names == ("full_attention",)
    if not whole and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise SettingsError(
            "prompts of models with windows must be padded on the left only; the attention mask has a 0 after a 1"
        )
    return [ids[seen.bool()].tolist() for ids, seen in zip(input_ids, mask, strict=True)]


def _pad_token(config: GenerationConfig, criteria: Criteria) -> int | None:
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        pad = config.pad_token_id
    if pad is None and criteria.eos:
        pad = min(criteria.eos)
    return None if pad is None else int(pad)


def _by_time(rows: list[list[torch.Tensor] | None]) -> Any:
    """From (1, V) per row and time step to a tuple of (B, V) per time step; None if nothing was recorded."""
    kept = [row for row in rows if row is not None]
    return tuple(torch.cat(step) for step in zip(*kept, strict=True)) if kept else None


def _raise(error: LookaheadError | None) -> None:
    """Raise the error that ended a row: the original exception of the model, a processor or a criterion."""
    if error is not None:
        raise error.__cause__ or error

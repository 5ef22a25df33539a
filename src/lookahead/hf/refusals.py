"""Options of ``model.generate`` that are not supported here. Each is rejected by name, with an alternative."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..core import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Model inputs that transformers prepares for its own loop, and that are not needed here.
PREPARED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_params",
    "mm_encoder_outputs",  # empty without images
}
#: Inputs of multimodal models that mark the tokens of images and other media; 0 marks text.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
#: Substrings of the names of image, video and audio inputs.
MEDIA = ("pixel", "image", "video", "audio", "input_features", "input_values")
#: Options that are rejected with any value.
UNSUPPORTED = (
    "dola_layers",
    "constraints",
    "force_words_ids",
    "prefill_chunk_size",
    "output_attentions",
    "output_hidden_states",
    "use_mtp",
    "assistant_early_exit",
)


def refuse(
    model: PreTrainedModel,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    input_ids: torch.Tensor,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
    given: dict[str, Any],
    has_cache: bool,
) -> None:
    """Raise SettingsError for the first option that is not supported.

    Arguments as in ``generate``.

    Args:
        given: the assistant model and ``synced_gpus``, if any.
        has_cache: whether the sequences of this model have keys and values that a caller's cache can receive.
    """
    # Options and inputs that are always rejected: (whether it is given, its name, what to do).
    batch = input_ids.shape[0]
    plain = "omit it, or call model.generate without custom_generate"
    refused = [
        ((config.num_beams or 1) > 1, f"num_beams={config.num_beams} (beam search)", "use num_beams=1"),
        (given.get("assistant_model") is not None, "assistant_model", "lookahead needs no draft model"),
        (bool(config.prompt_lookup_num_tokens), "prompt_lookup_num_tokens", 'use drafter="prompt-lookup"'),
        (bool(getattr(config, "penalty_alpha", None)), "penalty_alpha (contrastive search)", plain),
        *((bool(getattr(config, key, None)), key, plain) for key in UNSUPPORTED),
        (
            config.cache_implementation in ("quantized", "offloaded", "offloaded_static", "paged"),
            f"cache_implementation={config.cache_implementation!r}",
            "lookahead has its own cache; omit it",
        ),
        (
            bool(synced_gpus or given.get("synced_gpus")),
            "synced_gpus (set by FSDP and DeepSpeed ZeRO-3)",
            plain,
        ),
        (_learns_prompts(model), "a PEFT adapter with virtual tokens (prompt, prefix or P-tuning)", plain),
        (streamer is not None and batch > 1, f"a streamer with {batch} sequences", "stream one sequence"),
        (model_kwargs.get("inputs_embeds") is not None, "inputs_embeds", "pass input_ids"),
        (input_ids.shape[1] == 0, "an empty prompt", "pass at least one token"),
    ]
    # Logits processors that evaluate the model themselves, or keep the state of one sequence.
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            refused.append((True, "guidance_scale", plain))
        if isinstance(processor, SynthIDTextWatermarkLogitsProcessor) and batch > 1:
            refused.append((True, "a SynthID watermark for several sequences", "pass one sequence"))
    # A caller's cache must be an empty DynamicCache for one sequence.
    cache = model_kwargs.get("past_key_values")
    if cache is not None and getattr(cache, "_is_user_defined", False):
        length = cache.get_seq_length()
        refused += [
            (length > 0, f"past_key_values with {length} tokens", "pass the whole prompt"),
            (batch > 1, "past_key_values for several sequences", "pass one sequence"),
            (not isinstance(cache, DynamicCache), f"past_key_values of type {type(cache).__name__}", plain),
            (config.use_cache is False, "past_key_values with use_cache=False", "omit one of them"),
            (not has_cache, "past_key_values with a model whose token trees do not work here", plain),
        ]
    state = model_kwargs.get("cache_params")
    refused += [
        (
            state is not None and getattr(state, "_is_user_defined", False),
            "cache_params",
            "pass the whole prompt",
        ),
        (
            _are_own_positions(model_kwargs, input_ids.shape[1]),
            "position_ids other than 0, 1, 2, ...",
            "omit them",
        ),
    ]
    # Images, audio and video. By now, transformers has encoded them, and processors of such models mark their tokens
    # in the prompt.
    multimodal = "mm_encoder_outputs" in model_kwargs
    text_only = "pass a text-only prompt, or call model.generate without custom_generate"
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    for modality in encoded:
        named = "audio inputs" if modality == "audio" else f"{modality}s"
        refused.append((True, f"{named} in the prompt", text_only))
    for key, value in model_kwargs.items():
        media = value is not None and any(part in key for part in MEDIA)
        refused.append((media, f"the model input {key}", text_only))
        if multimodal and key in TOKEN_TYPES and value is not None:
            refused.append((bool(value.any()), f"{key} that mark images or other media", text_only))
    # All other keywords.
    supported = "only input_ids and attention_mask are supported"
    for key, value in model_kwargs.items():
        needed = key not in PREPARED and not (multimodal and key in TOKEN_TYPES)
        refused.append((needed and value is not None, f"the model input {key}", supported))
    # Report the first.
    for condition, what, cure in refused:
        if condition:
            raise SettingsError(f"lookahead.generate does not support {what}; {cure}")


def _learns_prompts(model: PreTrainedModel) -> bool:
    """Whether PEFT adds virtual tokens in ``prepare_inputs_for_generation``, which is not called here.

    While its ``generate`` runs, PEFT replaces that method of the model with its own.
    """
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    return bool(getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False))


def _are_own_positions(model_kwargs: dict[str, Any], length: int) -> bool:
    """Whether position_ids (B, L) differ from those that transformers prepares, at tokens that are not padding."""
    positions = model_kwargs.get("position_ids")
    if positions is None or positions.dim() != 2:
        return False
    mask = model_kwargs.get("attention_mask")
    mask = positions.new_ones(1, length) if mask is None else mask.to(positions.device)
    if positions.shape[-1] != mask.shape[-1]:
        return True
    return bool(((positions != mask.long().cumsum(-1) - 1) & mask.bool()).any())

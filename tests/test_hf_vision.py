"""Vision-language models in the drop-in: text-only prompts decode exactly, images are refused by name."""

import functools

import pytest
import torch
import transformers

import lookahead
from lookahead.core import SettingsError
from lookahead.hf.refusals import refuse

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
#: Rotary positions on three axes: time, height and width.
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
#: Class and config by family.
FAMILIES = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        lambda: transformers.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            **QWEN,
        ),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
            },
            **QWEN,
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(**VISION),
            image_token_index=90,
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16),
            vision_config=transformers.SiglipVisionConfig(**VISION),
            mm_tokens_per_image=4,
            image_token_index=90,
            boi_token_index=91,
            eoi_token_index=92,
        ),
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        lambda: transformers.Idefics3Config(
            text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=90
        ),
    ),
}


@functools.cache
def model_of(family):
    name, config = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(config()).eval()


def prompts(batch):
    half = torch.randint(10, 80, (batch, 7), generator=torch.Generator().manual_seed(2))
    ids = torch.cat([half, half], dim=1)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(family, batch, **options):
    """What model.generate returns without and with drafts."""
    model = model_of(family)  # before the seed is set: making it draws random numbers
    results = []
    for extra in ({}, {"custom_generate": lookahead.generate, "drafter": "5,4,7"}):
        torch.manual_seed(7)
        made = model.generate(**prompts(batch), max_new_tokens=32, **options, **extra)
        results.append(made.tolist())
    return results


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_only_prompt_decodes_as_without_drafts(family, batch, sampled):
    plain, ours = both(family, batch, do_sample=sampled)
    assert ours == plain


def test_equality_fails_when_a_wrong_node_is_accepted(accept_a_wrong_node):
    plain, ours = both("llava", 1, do_sample=False)
    assert ours != plain


def test_the_drop_in_and_llm_agree():
    inputs = prompts(1)
    ours = model_of("qwen2_vl").generate(**inputs, max_new_tokens=24, custom_generate=lookahead.generate)
    llm = lookahead.LLM(model_of("qwen2_vl"))
    result = llm.generate(inputs["input_ids"][0].tolist(), max_new_tokens=24)
    assert ours[0, inputs["input_ids"].shape[1] :].tolist() == result.tokens


def test_token_types_of_text_alone_are_no_media():
    """These models' processors return them with every prompt."""
    inputs = prompts(1)
    types = torch.zeros_like(inputs["input_ids"])
    model, options = model_of("qwen2_vl"), {"max_new_tokens": 24}
    plain = model.generate(**inputs, mm_token_type_ids=types, **options)
    drafted = model.generate(**inputs, mm_token_type_ids=types, **options, custom_generate=lookahead.generate)
    assert drafted.tolist() == plain.tolist()
    with pytest.raises(SettingsError, match="does not support mm_token_type_ids that mark images"):
        model.generate(**inputs, mm_token_type_ids=types + 1, **options, custom_generate=lookahead.generate)


@pytest.mark.parametrize(("family", "shape"), [("llava", (1, 3, 28, 28)), ("gemma3", (1, 3, 28, 28))])
def test_images_are_refused_by_name(family, shape):
    with pytest.raises(SettingsError, match="does not support images in the prompt; pass a text-only prompt"):
        model_of(family).generate(
            **prompts(1),
            pixel_values=torch.zeros(shape),
            max_new_tokens=4,
            custom_generate=lookahead.generate,
        )


def test_audio_is_refused_by_name():
    inputs, encoded = prompts(1)["input_ids"], {"mm_encoder_outputs": {"audio": None}}
    with pytest.raises(SettingsError, match="does not support audio inputs in the prompt"):
        refuse(model_of("llava"), transformers.GenerationConfig(), [], inputs, False, None, encoded, {}, True)

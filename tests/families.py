"""Tiny random models of many families, with the only table of what each needs beyond the common sizes."""

from lookahead.hf import testing

EAGER = {"attn_implementation": "eager"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
NTK = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
#: name -> (model type in transformers, config fields)
TABLE = {
    "llama": ("llama", {}),
    "llama-dynamic-ntk": ("llama", {"max_position_embeddings": 48, "rope_parameters": NTK}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 8}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, **EAGER, **SLIDING}),
    "gemma3": ("gemma3_text", {"head_dim": 16, **SLIDING}),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"rotary_dim": 8, **EAGER}),
    "gpt-bigcode": ("gpt_bigcode", {"num_key_value_heads": 1}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", SLIDING),
    "olmoe": ("olmoe", EXPERTS),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "moe_intermediate_size": 32, **EXPERTS}),
    "falcon": ("falcon", {"alibi": False, "new_decoder_architecture": False}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "starcoder2": ("starcoder2", {}),
    "granite": ("granite", {}),
    "granite-moe": ("granitemoe", LOCAL_EXPERTS),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", SLIDING),
    "glm4": ("glm4", {"head_dim": 16}),
    "deepseek-v2": ("deepseek_v2", MLA),
    "deepseek-v3": ("deepseek_v3", MLA),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, **LOCAL_EXPERTS, **EAGER, **SLIDING}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"expansion_ratio": 2, "max_seq_len": 256}),
    "mamba": ("mamba", {"state_size": 8}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
FAMILIES = tuple(TABLE)
#: They do not evaluate token trees. All but mamba draft by batch rows.
NO_TREES = ("bloom", "mpt", "falcon-alibi", "mamba", "lfm2")


def tiny_model(family="llama", seed=0, **overrides):
    """``lookahead.hf.testing.tiny_model`` for a family in ``FAMILIES``."""
    model_type, special = TABLE[family]
    return testing.tiny_model(model_type, seed, **{**special, **overrides})

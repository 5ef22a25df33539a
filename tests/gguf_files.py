"""Small GGUF files of all architectures and block types, as written by llama.cpp's converter, and references.

    write_gguf(path, "gemma3", ("Q4_K", "Q6_K"), seed=1)   a file; linears cycle through the types
    decoded(path)                                          its tensors in float32, from the gguf package
    reference_model(path)                                  the equivalent transformers model, in float32

``reference_model`` uses neither transformers' GGUF reader, which drops settings (softcaps, Phi-3's sliding
windows, StarCoder2's rotary bases, scaled frequencies), nor our names: it takes the settings that
``write_gguf`` was given and stored in the file's metadata, and the names of the gguf package.
"""

import json
from types import SimpleNamespace

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES

from toy import VOCABULARY, trained

#: Types whose blocks are written by hand because the gguf package cannot quantize to them.
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
#: The same, for types that the compiled path decodes to bf16.
WITHOUT_KERNEL = ("Q2_K", "Q3_K", "IQ4_NL")
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS, "F16", "BF16", "F32")
#: Many types in one file.
MIXED = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "BF16", "Q5_1", "Q4_1", "Q5_0", "F16", "F32")
#: Inner sizes are multiples of 256, the block size of the K types. The head size is not hidden / heads.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
#: Head size and scale are what transformers' reader assumes, as it ignores the file's values.
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
#: general.architecture -> (transformers class without "Config", config fields beyond ``SMALL``).
ARCHITECTURES = {
    "llama": ("Llama", {"head_dim": 128, "rope_theta": 500000.0}),
    "mistral": ("Mistral", {"head_dim": 128, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 128, "rope_theta": 1000000.0, "num_key_value_heads": 1}),
    "gemma": ("Gemma", {"head_dim": 128, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 6}),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2",
        {"n_inner": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": True},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4}),
}
#: Architectures whose files use a different name than this module.
WRITTEN_AS = {"mistral": "llama", "olmo3": "olmo2"}
#: Supported by transformers' own reader, which reads Mistral as Llama.
KNOWN_TO_TRANSFORMERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "starcoder2",
    "gpt2",
)
PERMUTED = ("llama", "mistral", "granite", "smollm3")
#: Norm weights are stored with 1 added.
OFFSET = ("gemma", "gemma2", "gemma3")
SENTENCEPIECE = ("gemma", "gemma2", "gemma3", "phi3")
#: Our own metadata, for ``reference_model``.
ARCHITECTURE_KEY, CONFIG_KEY = "lookahead.architecture", "lookahead.config"


def write_gguf(
    path, architecture, types="Q8_0", seed=0, frequency_factors=None, chat_template=None, **changes
):
    """Write a file with random weights.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        types: one or more of ``BLOCK_TYPES`` and ``WITHOUT_KERNEL``; embedding, head and linears cycle
            through them.
        frequency_factors: values of ``rope_freqs.weight``, which divide the rotary frequencies (Llama 3).
        chat_template: a Jinja template.
        changes: transformers config fields.

    Returns:
        The metadata, key -> value.
    """
    import torch
    import transformers

    config = make_config(architecture, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = tensors_of(model, WRITTEN_AS.get(architecture, architecture))
    return _write(path, architecture, types, seed, config, tensors, changes, frequency_factors, chat_template)


def write_llama(path, types="Q8_0", seed=0, chat_template=None):
    """``write_gguf`` of a Llama without torch and transformers."""
    config = SimpleNamespace(
        **(SMALL | {"max_position_embeddings": 2048}),
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (4 * 128, hidden),
        "attn_k": (2 * 128, hidden),
        "attn_v": (2 * 128, hidden),
        "attn_output": (hidden, 4 * 128),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    tensors = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,), "output": (vocabulary, hidden)}
    tensors |= {
        f"blk.{n}.{name}": shape for n in range(config.num_hidden_layers) for name, shape in layer.items()
    }
    named = [(f"{name}.weight", shape) for name, shape in tensors.items()]
    return _write(path, "llama", types, seed, config, named, {}, None, chat_template)


def _write(path, architecture, types, seed, config, tensors, changes, frequency_factors, chat_template):
    rng = np.random.default_rng(seed)
    types = (types,) if isinstance(types, str) else tuple(types)
    writer = gguf.GGUFWriter(path, WRITTEN_AS.get(architecture, architecture))
    write_settings(writer, architecture, config)
    write_tokenizer(writer, architecture)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_string(ARCHITECTURE_KEY, architecture)
    writer.add_string(CONFIG_KEY, json.dumps(changes))
    number = 0
    for name, shape in tensors:
        if len(shape) == 1:
            weights = rng.normal(0, 0.1, shape) if name.endswith(".bias") else rng.uniform(0.5, 3, shape)
            writer.add_tensor(name, weights.astype(np.float32))
        elif name == "position_embd.weight":  # the converter never quantizes it
            writer.add_tensor(name, rng.normal(0, 0.05, shape).astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType[types[number % len(types)]]
            number += 1
            writer.add_tensor(name, quantized(rng, shape, kind), raw_dtype=kind)
    if frequency_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(frequency_factors, np.float32))
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()
    return {key: value.value for part in writer.kv_data for key, value in part.items()}


def make_config(architecture, **changes):
    """The transformers config of a small model."""
    import transformers

    name, fields = ARCHITECTURES[architecture]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config_class = getattr(transformers, f"{name}Config")
    return config_class(**{**SMALL, **fields, **special, **changes})


def tensors_of(model, written_as):
    """(name in the file, shape (outputs, inputs)) of each weight of a transformers model."""
    from transformers.pytorch_utils import Conv1D

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[written_as], model.config.num_hidden_layers)
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        yield name, tuple(weight.shape[::-1] if key in transposed else weight.shape)


def write_settings(writer, architecture, config):
    """Write a config's metadata as the converter does."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(f"tiny {architecture}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.n_inner if architecture == "gpt2" else config.intermediate_size)
    writer.add_head_count(heads)
    if architecture in ("gpt2", "starcoder2"):
        epsilon = config.layer_norm_epsilon if architecture == "gpt2" else config.norm_epsilon
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gpt2":
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    rotary = config.rope_parameters
    rotary = rotary.get("full_attention", rotary)
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])
    if architecture in PERMUTED or architecture == "phi3":
        partial = rotary.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_size * partial))
        writer.add_vocab_size(config.vocab_size)
    window = getattr(config, "sliding_window", None)
    if window is not None and architecture not in ("mistral", "qwen2", "qwen3", "smollm3"):
        writer.add_sliding_window(window)
    if architecture == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def write_tokenizer(writer, architecture):
    """Write a byte-level tokenizer, or SentencePiece where the architecture's files use it."""
    if architecture in SENTENCEPIECE:
        tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = [3, 3, 3, 2] + [6] * 256  # control, unknown, byte
        pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁a", "▁the", "on", "an", "in", "er"]
        tokens += pieces + [f"<unused{n}>" for n in range(VOCABULARY - len(tokens) - len(pieces))]
        kinds += [1] * len(pieces) + [3] * (VOCABULARY - len(kinds) - len(pieces))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_token_types(kinds)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(True)
    else:
        state = json.loads(trained())["model"]
        tokens = sorted(state["vocab"], key=state["vocab"].get)
        kinds = [3, 3, 3] + [1] * (len(tokens) - 3) + [5] * (VOCABULARY - len(tokens))  # 5 is unused
        tokens += [f"<unused{n}>" for n in range(VOCABULARY - len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2" if architecture in ("qwen2", "qwen3") else "gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def quantized(rng, shape, kind, spread=0.06):
    """Random weights of about this standard deviation, as stored in the file."""
    if kind.name in (*K_QUANTS, *WITHOUT_KERNEL):
        return k_blocks(rng, shape, kind, spread)
    return gguf.quantize(rng.normal(0, spread, shape).astype(np.float32), kind)


def k_blocks(rng, shape, kind, spread):
    """Blocks with random contents, and super-block scales that give the standard deviation.

    Layouts in bytes (ggml-common.h). Blocks have 256 numbers (IQ4_NL: 32). In Q4_K and Q5_K, each 32 numbers
    have a 6-bit sc and m, packed in ``scales``; in Q2_K, each 16 have 4-bit ones, and in Q3_K, a 6-bit sc:

        Q2_K    scales 16, q 64, d f16, dmin f16          d * sc * q - dmin * m,  q of 2 bits
        Q3_K    qh 32, q 64, scales 12, d f16             d * (sc - 32) * (q - 4), q of 3 bits
        Q4_K    d f16, dmin f16, scales 12, q 128         d * sc * q - dmin * m,  q of 4 bits
        Q5_K    d f16, dmin f16, scales 12, qh 32, q 128  the same,               q of 5 bits
        Q6_K    ql 128, qh 64, sc 16 (8-bit), d f16       d * sc * (q - 32),      q of 6 bits
        IQ4_NL  d f16, q 16                               d * table[q],           table from -127 to 113
    """
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    jitter = rng.uniform(0.5, 1.5, blocks.shape[:-1])
    if kind.name == "Q6_K":
        blocks[..., 192:208] = rng.integers(-32, 32, (*blocks.shape[:-1], 16), dtype=np.int8).view(np.uint8)
        blocks[..., 208:210] = halves(jitter * spread / 340)
    elif kind.name == "Q2_K":
        d = jitter * spread / 13
        blocks[..., 80:82], blocks[..., 82:84] = halves(d), halves(d * 1.5)
    elif kind.name == "Q3_K":
        blocks[..., 108:110] = halves(jitter * spread / 42)
    elif kind.name == "IQ4_NL":
        blocks[..., 0:2] = halves(jitter * spread / 70)
    else:
        middle = 7.5 if kind.name == "Q4_K" else 15.5  # centers the numbers on 0
        d = jitter * spread / (35 * middle)
        blocks[..., 0:2], blocks[..., 2:4] = halves(d), halves(d * middle)
    return blocks.reshape(*shape[:-1], -1)


def halves(numbers):
    """float16 numbers as bytes, (..., 2)."""
    return numbers.astype(np.float16)[..., None].view(np.uint8)


def decoded(path):
    """name -> float32 array, from the gguf package."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1]).copy()
        for tensor in gguf.GGUFReader(path).tensors
    }


def reference_model(path):
    """The float32 transformers model equivalent to a file from ``write_gguf``."""
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    reader = gguf.GGUFReader(path)
    architecture = reader.get_field(ARCHITECTURE_KEY).contents()
    config = make_config(architecture, **json.loads(reader.get_field(CONFIG_KEY).contents()))
    weights = decoded(path)
    # With sdpa, transformers 5.20 and older ignore Gemma 2's soft caps.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        numbers[WRITTEN_AS.get(architecture, architecture)], config.num_hidden_layers
    )
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    state = {}
    for key in model.state_dict():
        tied = key == "lm_head.weight" and config.tie_word_embeddings
        name = "token_embd.weight" if tied else names.get_name(key, try_suffixes=(".weight", ".bias"))
        weight = weights[name]
        part = name.split(".")[-2]
        if part in heads and architecture in PERMUTED:
            weight = unpermuted(weight, heads[part])
        if name.endswith("norm.weight") and architecture in OFFSET:
            weight = weight - 1
        state[key] = torch.from_numpy(np.ascontiguousarray(weight.T if key in transposed else weight))
    model.load_state_dict(state)
    if (factors := weights.get("rope_freqs.weight")) is not None:
        model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    return model


def unpermuted(weight, heads):
    """Reorder each head's rows from 0 3 1 4 2 5 to 0 1 2 3 4 5."""
    rows = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)

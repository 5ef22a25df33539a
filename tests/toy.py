"""A checkpoint small enough to create in a test: a random Llama and a byte-level tokenizer, on disk."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 320
TEXT = ["def add(a, b):\n    return a + b\n", "the quick brown fox", "für 東京 🙂 naïve"] * 3
CHAT = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def trained():
    """Byte-level BPE over every byte, with a few merges, as JSON."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    return raw.to_str()


def tokenizer(chat=False):
    """A tokenizer of its own, of one training."""
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(trained())
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    if chat:
        made.chat_template = CHAT
    return made


def save(folder, chat=False, **config):
    """Write model and tokenizer; return the folder."""
    from lookahead.hf.testing import tiny_model  # imports torch, which the tests of GGUF files do without

    model = tiny_model("llama", vocab_size=VOCABULARY, **config)
    model.save_pretrained(folder)
    tokenizer(chat).save_pretrained(folder)
    return folder

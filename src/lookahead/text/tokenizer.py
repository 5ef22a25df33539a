"""The tokenizer of a GGUF file, built from its metadata with the ``tokenizers`` library.

``GGUFTokenizer`` has the methods that this library calls, and creates the transformers class only if another one is.

Two kinds of vocabulary are supported. For others, ``build_tokenizer`` returns None and transformers reads the file.

- "gpt2": byte-level BPE. Bytes are written as 256 printable characters (``byte_alphabet``), the file lists the
  merges, and ``tokenizer.ggml.pre`` names the regular expression that splits text into pieces before merging.
- "llama": SentencePiece BPE. A space is written as "▁", unknown characters fall back to bytes, and the merges are
  derived from the vocabulary: every split of a token into two tokens, best token first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..core import SettingsError
from ..core.errors import Unsupported, first_line, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Types of tokens in ``tokenizer.ggml.token_type``.
CONTROL, USER_DEFINED = 3, 4
#: Roles of ``tokenizer.ggml.{role}_token_id`` whose tokens end a completion: end of a text, a turn and a message, and
#: what is between the files of a repository in training on code.
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
#: The same tokens by their text, because many files declare only one of them, as in llama.cpp (llama-vocab.cpp).
ENDS = frozenset(
    (
        *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[EOS]", "[e~["),
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("<|eom_id|>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<|tool_response>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
        *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)

# Regular expressions that split text into pieces. A merge never crosses a piece boundary.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+#|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*#"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS.replace("#", "") + r"|\p{N}" + _OTHERS
GPT4O = _WORDS.replace("#", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _OTHERS
#: Vocabularies of Llama 3, whose texts begin with the beginning-of-sequence token unless the file says otherwise.
WITH_BOS = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
)
#: Vocabularies in which a piece that equals a token becomes this token, regardless of the merges.
IGNORE_MERGES = (*WITH_BOS, "falcon3")
#: Vocabularies in which every digit is a separate piece, as in llama.cpp and in the models' own tokenizer.json.
#: transformers does not do this, so results differ for spaces before a digit.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
GPT2 = ("", "default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion")
#: ``tokenizer.ggml.pre`` -> the expression, as in llama.cpp, which defines the names; "" for that of GPT-2, which is
#: built into ``tokenizers``.
PIECES = {
    **dict.fromkeys((*GPT2, "exaone4", *DIGITS_APART), ""),
    **dict.fromkeys((*IGNORE_MERGES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "grok-2"), QWEN2
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "tekken": TEKKEN,
    "qwen35": QWEN35,
}
#: The key of the chat template; a file's other templates have its keys with their names appended.
TEMPLATE = "tokenizer.chat_template"
#: Options of transformers' ``apply_chat_template`` that are no variables of the template.
OF_TRANSFORMERS = {
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
}
#: The most characters of a token.
LONGEST = 10_000
#: The most characters of a text that is encoded by a part of a vocabulary, because a longer one needs more of it.
SHORT = 4096


def byte_alphabet() -> dict[int, str]:
    """Byte -> its character in a byte-level vocabulary (GPT-2): itself if it is printable, else one from 256 on.

    65 -> "A", 32 (a space) -> "Ġ", 10 (a newline) -> "Ċ".
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def read_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer | None:
    """The tokenizer of a file; None if its kind is not supported here.

    Raises:
        Unsupported, SettingsError: as ``build_tokenizer``.
    """
    if metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.merges" in metadata:
        _check_kind(metadata)
        _check_vocabulary(metadata)
        with _building():
            return GGUFTokenizer(None, metadata)
    backend = build_tokenizer(metadata)
    return None if backend is None else GGUFTokenizer(backend, metadata)


def _check_kind(metadata: Mapping[str, Any]) -> None:
    """Check the names of a vocabulary's kind and of the rule that splits text.

    Raises:
        Unsupported: the rule is not known here; transformers would use GPT-2's.
        SettingsError: a name is not a string.
    """
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre", "general.architecture"):
        if not isinstance(metadata.get(key, ""), str):
            raise SettingsError(f"{key} must be a string, got {metadata[key]!r:.60}")
    pre = metadata.get("tokenizer.ggml.pre", "")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in PIECES:
        raise Unsupported(
            f"it splits text by a rule that is not known here (tokenizer.ggml.pre is {shown(pre)})"
        )


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of the library ``tokenizers``; None if its kind is not supported here.

    Raises:
        Unsupported: it splits text by a rule that is not known here; transformers would use GPT-2's.
        SettingsError: the vocabulary is inconsistent.
    """
    _check_kind(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    architecture = metadata.get("general.architecture", "")
    make: Callable[[Mapping[str, Any]], Tokenizer]
    if kind == "gpt2" and "tokenizer.ggml.merges" in metadata:
        make = _byte_level
    elif kind == "llama":
        make = _gemma if architecture in ("gemma", "gemma2", "gemma3") else _sentencepiece
    else:
        return None
    _check_vocabulary(metadata)
    with _building():
        tokenizer = make(metadata)
        _add_whole_tokens(tokenizer, metadata)
        _begin_with_bos(tokenizer, metadata)
    return tokenizer


@contextmanager
def _building() -> Iterator[None]:
    """Raise SettingsError for the block's errors."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:  # the library tokenizers has no class for its errors
        raise SettingsError(f"no tokenizer can be built from its vocabulary: {first_line(error)}") from None


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a completion: those that the file declares, and those known by their text."""
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in END_ROLES]
    listed = np.asarray(metadata.get("tokenizer.ggml.eos_token_ids", ())).ravel().tolist()
    # Some files write -1 as an unsigned number for a missing token.
    ends = {token for token in [*named, *listed] if isinstance(token, int) and 0 <= token < 1 << 31}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return sorted(ends)
    template = metadata.get(TEMPLATE)
    types = np.atleast_1d(metadata.get("tokenizer.ggml.token_type", ()))[: len(tokens)]
    for index in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist():
        text = tokens[index]
        # In a vocabulary with <|return|> (Harmony), <|end|> ends only a part of an answer.
        if text not in ENDS or (text == "<|end|>" and "<|return|>" in tokens):
            continue
        # Some files mark the end of a turn as user-defined; then it ends only the turns of the file's own template.
        if types[index] == CONTROL or (isinstance(template, str) and text in template):
            ends.add(index)
    return sorted(ends)


def _check_vocabulary(metadata: Mapping[str, Any]) -> None:
    """Check the types and lengths of the entries of a vocabulary."""
    tokens, merges, template = (
        metadata.get(key)
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")
    )
    if not isinstance(tokens, list):
        raise SettingsError(f"tokenizer.ggml.tokens must be a list of strings, got {tokens!r:.60}")
    if not isinstance(merges, list | None):
        raise SettingsError(f"tokenizer.ggml.merges must be a list of strings, got {merges!r:.60}")
    if not isinstance(template, str | None):
        raise SettingsError(f"tokenizer.chat_template must be a string, got {template!r:.60}")
    longest = max(map(len, tokens), default=0)
    if longest > LONGEST:  # merges_of takes the square of the length
        raise SettingsError(f"a token must have at most {LONGEST:,} characters, got one of {longest:,}")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        numbers = np.asarray(metadata.get(key, [0] * len(tokens)))
        if numbers.shape != (len(tokens),) or numbers.dtype.kind not in "iuf":
            raise SettingsError(
                f"{key} must have a number for each of the {len(tokens)} tokens, got {numbers!r:.60}"
            )


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """A tokenizer that merges pairs of tokens, the first pair of the list first."""
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception:  # the library tokenizers has no class for its errors
        _check_merges(vocabulary, merges)
        raise


def _check_merges(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, ...]]) -> None:
    """Raise SettingsError unless each merge joins two tokens of the vocabulary into a third."""
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise SettingsError(
                f"each of its merges must join two tokens of the vocabulary into a third, got {pair!r:.80}"
            )


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    return _byte_level_of(metadata, _byte_level_vocabulary(metadata), _given_merges(metadata))


def _byte_level_vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token, in the byte alphabet -> id."""
    tokens = metadata["tokenizer.ggml.tokens"]
    alphabet = byte_alphabet()
    if set("".join(tokens)) <= set(alphabet.values()):  # in a fifth of the time
        return dict(zip(tokens, range(len(tokens)), strict=True))
    spelled = re.compile("[" + re.escape("".join(alphabet.values())) + "]*").fullmatch
    whole = _whole_tokens(metadata)  # these are written as they are, such as "<｜User｜>" of DeepSeek
    return {
        token
        if index in whole or spelled(token)
        else "".join(alphabet[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }


def _byte_level_of(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> Tokenizer:
    """The tokenizer of a byte-level vocabulary, or of a part of it."""
    from tokenizers import Regex, decoders, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "")
    tokenizer = _bpe(
        vocabulary,
        merges,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
        ignore_merges=pre in IGNORE_MERGES,
    )
    tokenizer.decoder = decoders.ByteLevel()
    if PIECES[pre]:
        split = pre_tokenizers.Split(Regex(PIECES[pre]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS_APART else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


class ByteLevel:
    """A byte-level vocabulary that encodes short texts without building its tokenizer.

    Building that of 152,000 tokens takes half a second and 100 MB. The ids of a text depend only on the tokens that
    occur in its pieces, so a tokenizer of these alone gives the same ids. For the text "to the":

        pieces    to, Ġthe
        tokens    those of  t  o  to  Ġ  h  e  Ġt  th  he  Ġth  the  Ġthe  that are in the vocabulary
        merges    those that make one of them

    Args:
        metadata: a file's metadata, which ``build_tokenizer`` accepts.

    Attributes:
        vocabulary: token, in the byte alphabet -> id.

    Raises:
        SettingsError: a merge has no token.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.vocabulary = _byte_level_vocabulary(metadata)
        self._merges = merges = metadata["tokenizer.ggml.merges"]
        # All at once first, which takes a fifth of the time; parts that are no tokens are met when a text has them.
        lines = "\n".join(merges)
        joined = lines.replace(" ", "").split("\n") if merges else []
        if lines.count(" ") != len(merges) or not all(map(self.vocabulary.__contains__, joined)):
            _check_merges(self.vocabulary, _given_merges(metadata))
        self._whole = _whole_tokens(metadata)
        whole = [metadata["tokenizer.ggml.tokens"][index] for index in self._whole]
        self._always = {token: self.vocabulary[token] for token in whole if token in self.vocabulary}
        # Splits a text into its pieces, and the pieces into bytes.
        letters = {letter: len(self.vocabulary) + byte for byte, letter in byte_alphabet().items()}
        self._splitter = self._tokenizer(letters | self._always, [])
        self._longest = max(map(len, self.vocabulary))
        self._texts = dict(zip(self.vocabulary.values(), self.vocabulary, strict=True))

    def _tokenizer(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        tokenizer = _byte_level_of(self._metadata, vocabulary, merges)
        _add_whole_tokens(tokenizer, self._metadata)
        _begin_with_bos(tokenizer, self._metadata)
        return tokenizer

    def of(self, text: str) -> Tokenizer:
        """A tokenizer that encodes this text as the whole vocabulary does."""
        split = self._splitter.encode(text, add_special_tokens=False)
        known, vocabulary = self.vocabulary, dict(self._always)
        pieces = dict[int | None, str]()
        for word, token in zip(split.word_ids, split.tokens, strict=True):
            # A byte that the vocabulary lacks is left out, and its neighbours may become a token.
            if token in known:
                pieces[word] = pieces.get(word, "") + token
        for piece in set(pieces.values()):
            for begin in range(len(piece)):
                for end in range(begin + 1, min(len(piece), begin + self._longest) + 1):
                    part = piece[begin:end]
                    if part in known:
                        vocabulary[part] = known[part]
        splits = {
            f"{token[:at]} {token[at:]}": (token[:at], token[at:])
            for token in vocabulary
            for at in range(1, len(token))
        }
        # One look at each merge costs less than a table of all.
        merges = [splits[merge] for merge in self._merges if merge in splits]
        return self._tokenizer(vocabulary, merges)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids."""
        skipped = {index for index, special in self._whole.items() if special} if skip_special_tokens else ()
        texts = [self._texts[token] for token in tokens if token in self._texts and token not in skipped]
        text: str = self._splitter.decoder.decode(texts)
        return text


def _gemma(metadata: Mapping[str, Any]) -> Tokenizer:
    """Gemma's vocabulary: tokens of spaces are stored as real spaces, and the vocabulary's order gives the merges."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokens = [
        "▁" * len(token) if token.isspace() and " " in token else token
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    merges = merges_of(tokens, range(0, -len(tokens), -1))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token({"tokenizer.ggml.unknown_token_id": 3, **metadata}, "unknown")
    tokenizer = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    if "tokenizer.ggml.merges" in metadata:
        merges = _given_merges(metadata)
    elif "tokenizer.ggml.scores" in metadata:
        merges = merges_of(tokens, metadata["tokenizer.ggml.scores"].tolist())
    else:
        raise SettingsError("a SentencePiece vocabulary must have merges or scores, and has neither")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = _bpe(vocabulary, merges, fuse_unk=True, byte_fallback=True)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if metadata.get("general.architecture") == "phi3":  # a space begins the text even before a space
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _given_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    return cast("list[tuple[str, str]]", pairs)


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a vocabulary without a list of them: each split of a token into two tokens, best token first.

    For the tokens "a", "b", "c", "ab", "bc", "abc" with falling scores: a+b, b+c, then ab+c before a+bc (the longer
    left part first).

    Args:
        tokens: the vocabulary.
        scores: one per token, higher is better.
    """
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    best_first = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    for _, group in groupby(best_first, key=scores.__getitem__):
        start = len(merges)
        several = False
        for index in group:
            several = len(merges) > start
            token = tokens[index]
            for at in range(len(token) - 1, 0, -1):
                if token[:at] in known and token[at:] in known:
                    merges.append((token[:at], token[at:]))
        if several:  # splits of tokens with equal scores are sorted by the lengths of their parts
            merges[start:] = sorted(merges[start:], key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return merges


def _whole_tokens(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """The tokens that are never split, and whether decoding may skip each: control and end tokens, not user-defined
    ones.

    Some files mark the end of a turn as user-defined; llama.cpp treats it as a control token as well.
    """
    types = np.atleast_1d(metadata.get("tokenizer.ggml.token_type", ()))
    ends = end_tokens(metadata)
    return {
        index: bool(types[index] == CONTROL or index in ends)
        for index in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist()
    }


def _add_whole_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add the tokens that are never split."""
    from tokenizers import AddedToken

    tokens = metadata["tokenizer.ggml.tokens"]
    added = [
        AddedToken(tokens[index], normalized=False, special=special)
        for index, special in _whole_tokens(metadata).items()
        if tokenizer.token_to_id(tokens[index]) is not None  # Gemma's spaces have another spelling here
    ]
    if added:
        tokenizer.add_tokens(added)


def _begin_with_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Prepend the beginning-of-sequence token if the file requests it, by default for SentencePiece and Llama 3."""
    bos = _token(metadata, "bos")
    by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in WITH_BOS
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", by_default):
        from tokenizers import processors

        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
        )


def _token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The token of a role: "bos", "eos", "unknown" or "padding"."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    # Some files write -1 as an unsigned number for a missing token.
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


class GGUFTokenizer:
    """A tokenizer with the methods of the transformers class that this library calls. It needs no transformers.

    Other methods are delegated to ``as_transformers``, the transformers class around the same backend, created on
    first use.

    Args:
        backend: the result of ``build_tokenizer``, or None to build it when it is needed. None is for byte-level
            vocabularies.
        metadata: the file's metadata.

    Attributes:
        chat_template: the Jinja template, or name -> template if the file has several; None if it has none.
        bos_token, eos_token, unk_token, pad_token: tokens as strings; None for a missing token.
        eos_token_id: the token that ends a sequence, or None.
    """

    def __init__(self, backend: Tokenizer | None, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._words = ByteLevel(metadata) if backend is None else None
        if backend is not None:
            self.backend_tokenizer = backend
        self.chat_template = _chat_templates(metadata)
        roles = (_token(metadata, name) for name in ("bos", "eos", "unknown", "padding"))
        # transformers would add a token that is spelled differently here, with an id beyond the vocabulary.
        known = (token if token and self._knows(token) else None for token in roles)
        self.bos_token, self.eos_token, self.unk_token, self.pad_token = known
        end = metadata.get("tokenizer.ggml.eos_token_id")
        self.eos_token_id: int | None = end if _token(metadata, "eos") is not None else None

    def _knows(self, token: str) -> bool:
        if self._words is not None:
            return token in self._words.vocabulary
        return self.backend_tokenizer.token_to_id(token) is not None

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the library ``tokenizers``."""
        built = build_tokenizer(self._metadata)
        assert built is not None
        return built

    def __call__(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """Encode a string; the token ids are ``input_ids`` of the result."""
        if options or not isinstance(text, str):
            return self.as_transformers(text, add_special_tokens=add_special_tokens, **options)
        # Other than ``encode``, this releases the interpreter: a million digits take seconds.
        backend = self._backend_for(text)
        (made,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return _Encoding(input_ids=made.ids, attention_mask=[1] * len(made.ids))

    def _backend_for(self, text: str) -> Tokenizer:
        """A tokenizer that encodes this text."""
        if self._words is None or len(text) > SHORT or "backend_tokenizer" in self.__dict__:
            return self.backend_tokenizer
        return self._words.of(text)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, in a thousandth of the time that counting them takes."""
        longest, absent = self._longest
        return -(-len(text.encode().translate(None, absent)) // longest) if longest else 0

    @cached_property
    def _longest(self) -> tuple[int, bytes]:
        """(the most bytes of a text in one token, 0 for no limit; bytes that become no token)."""
        from tokenizers import decoders

        words = self._words
        vocabulary = self.backend_tokenizer.get_vocab() if words is None else words.vocabulary
        longest = max(len(token.encode()) for token in vocabulary)
        if words is not None or isinstance(self.backend_tokenizer.decoder, decoders.ByteLevel):
            alphabet = byte_alphabet()
            return longest, bytes(byte for byte in alphabet if alphabet[byte] not in vocabulary)
        whole = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))  # otherwise any text may be <unk>
        return longest if whole else 0, b""

    def __len__(self) -> int:
        if self._words is not None:
            return len(self._words.vocabulary)
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of token ids, including special tokens unless they are skipped."""
        if not options.get("clean_up_tokenization_spaces", True):  # as without the option
            del options["clean_up_tokenization_spaces"]
        if options or not isinstance(token_ids, list):
            return self.as_transformers.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        if self._words is not None:
            return self._words.decode(token_ids, skip_special_tokens)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Role -> token, as in "bos_token"; templates have these variables."""
        roles = {f"{role}_token": getattr(self, f"{role}_token") for role in ("bos", "eos", "unk", "pad")}
        return {role: token for role, token in roles.items() if token is not None}

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """A conversation as text, token ids, or a mapping with ``input_ids``; see ``chat.render_chat``.

        Args:
            conversation: messages {"role", "content", ...}.
            tools: JSON schemas of functions; transformers, if it is installed, also accepts Python functions.
            chat_template: a template, or the name of one of the file's; None for the file's own choice.
            tokenize: whether to return token ids, not text.
            return_dict: whether token ids are in a mapping.
            variables: ``documents``, ``add_generation_prompt``, ``continue_final_message``, the template's own
                variables, and transformers' options for its result, which need transformers.
        """
        own = all(isinstance(each, Mapping) for each in (*conversation, *(tools or ())))
        if not own or OF_TRANSFORMERS & variables.keys():
            given = {
                "tools": tools,
                "chat_template": chat_template,
                "tokenize": tokenize,
                "return_dict": return_dict,
            }
            return self.as_transformers.apply_chat_template(conversation, **given, **variables)
        from .chat import choose_template, render_chat  # Jinja takes a tenth of a second

        template = choose_template(self.chat_template, chat_template, tools)
        text = render_chat(template, conversation, tools=tools, **self.special_tokens_map | variables)
        if not tokenize:
            return text
        made = self(text, add_special_tokens=False)
        return made if return_dict else made.input_ids

    @cached_property
    def as_transformers(self) -> Any:
        """A transformers fast tokenizer around the same backend.

        Raises:
            SettingsError: transformers is not installed.
        """
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise SettingsError(
                "this use of a GGUF file's tokenizer needs transformers; install it with "
                "pip install '.[transformers]' in the project's folder"
            ) from None
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            unk_token=self.unk_token,
            pad_token=self.pad_token,
            add_bos_token=self.backend_tokenizer.post_processor is not None,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look these up
            raise AttributeError(name)
        try:
            return getattr(self.as_transformers, name)
        except SettingsError as error:  # hasattr must not fail
            raise AttributeError(f"{name}: {error}") from None


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """``GGUFTokenizer.chat_template``."""
    default = metadata.get(TEMPLATE)
    others = {
        key.removeprefix(f"{TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{TEMPLATE}.") and isinstance(value, str)
    }
    if not others:
        return default
    return others if default is None else {"default": default} | others


class _Encoding(dict[str, Any]):
    """Fields by key and as attributes, like BatchEncoding of transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

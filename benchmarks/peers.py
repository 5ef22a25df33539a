"""Other libraries' decoding alongside ours, with the same counters (``lookahead.bench.methods``).

    hf-greedy                     ``model.generate`` of transformers
    hf-prompt-lookup              its prompt lookup, 10 tokens
    hf-compiled                   greedy, compiled by ``torch.compile``, with a static KV cache
    llamacpp-server[:FILE[:MODE]] llama.cpp's own server on the GGUF file of the model, or on FILE, without drafts, or
                                  in a mode of drafting (see ``benchmarks.llamacpp_server``)
    openvino-greedy[:FILE[:f32]]  OpenVINO GenAI on a GGUF file (see ``benchmarks.openvino``), computing in float32
    openvino-lookup[:FILE[:T,N]]  its prompt lookup, T tokens (10), n-grams of at most N (3)

Every other name is a method of ours. ``run`` takes the methods of other libraries as ``Peer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, StaticCache

from lookahead.bench import methods
from lookahead.bench.methods import Drafted, Method, ModelUnderTest, Outcome, RunOptions
from lookahead.core import SettingsError
from lookahead.hf.model import HFModel

from .llamacpp_server import LLAMA_SERVER, LlamaServer
from .openvino import OPENVINO, OpenVino
from .outcomes import LOOKUP_TOKENS, MissingPackage, outcome_of
from .page import reason_of

COMPILED = "hf-compiled"
HUGGING_FACE = ("hf-greedy", "hf-prompt-lookup", COMPILED)
#: The file that has the label of another library's method while it decodes.
DECODING = "decoding"


def default_methods(model: ModelUnderTest) -> list[str]:
    """All methods of ours, after transformers' greedy decoding and prompt lookup if it can run the model."""
    theirs = ["hf-greedy", "hf-prompt-lookup"] if isinstance(model.model, HFModel) else []
    return [*theirs, *methods.default_methods()]


def make_methods(name: str, model: ModelUnderTest, warm: bool = True) -> list[Method]:
    """The methods with this name: cold and warm for a method that keeps state.

    Raises:
        SettingsError: the name is unknown, a setting is out of range, or a method lacks a requirement.
    """
    head, _, settings = name.partition(":")
    if head in HUGGING_FACE:
        if not isinstance(model.model, HFModel):
            raise SettingsError(
                f"{head} needs a transformers model, and {model.name} in {model.dtype} is none; add --dtype bfloat16 "
                "or float32, or leave the method out"
            )
        if settings:
            raise SettingsError(f"{head} takes no settings, got {name!r}")
        return [Compiled() if head == COMPILED else HuggingFace(head)]
    if head == LLAMA_SERVER:
        return [LlamaServer(settings, model)]
    if head in OPENVINO:
        return [OpenVino(head, settings, model)]
    try:
        return methods.make_methods(name, model, warm)
    except SettingsError as error:
        others = ", ".join((*HUGGING_FACE, LLAMA_SERVER, *OPENVINO))
        raise SettingsError(f"{error}; methods of other libraries are {others}") from None


def guarded_methods(
    name: str, model: ModelUnderTest, warm: bool = True, folder: Path | None = None
) -> list[Method]:
    """As ``make_methods``, with each method of another library as a ``Peer`` whose records are in the folder."""
    made = make_methods(name, model, warm)
    return [method if isinstance(method, Drafted) else Peer(method, folder) for method in made]


class Peer(Method):
    """Another library's method: if it fails, it returns why, and the run goes on with the other methods.

    After an error it is not tried again, except after a SettingsError, which concerns one prompt. If it ends the
    whole process (an abort in native code), its label stays in the file ``decoding`` next to the records, and it is
    skipped until that file is removed.

    Args:
        method: decodes with the other library.
        folder: the folder of the records; None for no such file.
    """

    def __init__(self, method: Method, folder: Path | None = None) -> None:
        self.label = method.label
        self.settings = method.settings
        self._method = method
        self._mark = folder / DECODING if folder is not None else None
        self._broken = ""

    def comparable(self, options: RunOptions) -> bool:
        return self._method.comparable(options)

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome | str:
        if self._broken:
            return self._broken
        marked = self._mark.read_text(encoding="utf-8") if self._mark and self._mark.is_file() else ""
        if self.label in marked.splitlines():
            return f"it ended the process; remove {DECODING} next to the records to try again"
        try:
            with _noted(self._mark, marked, self.label):
                return self._method.decode(model, prompt, options)
        except Exception as error:
            reason = reason_of(error)
            if not isinstance(error, SettingsError):
                self._broken = reason
            return reason


@contextmanager
def _noted(mark: Path | None, before: str, label: str) -> Iterator[None]:
    """A context in which the label is a line of the file, after the lines before."""
    if mark is None:
        yield
        return
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{before}{label}\n", encoding="utf-8")
    try:
        yield
    finally:
        if before:
            mark.write_text(before, encoding="utf-8")
        else:
            mark.unlink()


class Absent(Method):
    """A peer whose package is not installed. Its cells on the page give the reason.

    Args:
        name: name of the method as on the command line.
        model: the model under test.
        why: the error to return instead of decoding.
    """

    def __init__(self, name: str, model: ModelUnderTest, why: MissingPackage) -> None:
        head, _, file = name.partition(":")
        gguf = file or model.gguf
        self.label = f"{head}:{Path(gguf).name}" if gguf else head
        self.settings = {}
        self.why = why

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> str:
        return reason_of(self.why)


class HuggingFace(Method):
    """Greedy ``model.generate`` of transformers; a hook counts forward passes, a streamer counts tokens."""

    compilation: CompileConfig | None = None

    def __init__(self, name: str) -> None:
        self.name = self.label = name
        self.settings = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-prompt-lookup" else {}

    def arguments(self, model: ModelUnderTest, length: int) -> dict[str, Any]:
        """Further arguments of ``generate`` for a sequence of at most ``length`` tokens with its prompt."""
        return {}

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        # The settings of generate.
        if options.temperature:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")
        eos = sorted(model.eos) or None
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=options.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0] if eos else 0,
            do_sample=False,
            **self.settings,
        )
        if self.compilation is not None:
            config.compile_config = self.compilation

        # Count rows and tokens of every pass.
        rows: list[int] = []
        sizes: list[int] = []
        times: list[float] = []

        class Clock:
            """A streamer, called with the prompt first, then with the tokens of every pass."""

            def put(self, tokens: Any) -> None:
                times.append(perf_counter())
                sizes.append(tokens.numel())

            def end(self) -> None:
                pass

        def count(module: Any, positional: Any, keywords: dict[str, Any]) -> None:
            rows.append(int(keywords["input_ids"].shape[1]))

        # Generate. The time ends when generate returns, not with the streamer's last call.
        ids = torch.tensor([list(prompt)], device=model.model.device)
        arguments = self.arguments(model, len(prompt) + options.max_new_tokens)
        # A hook would be compiled with the model, again for each sequence.
        hook = (
            None
            if self.name == COMPILED
            else model.model.module.register_forward_pre_hook(count, with_kwargs=True)
        )
        try:
            start = perf_counter()
            text = model.model.module.generate(
                ids,
                streamer=Clock(),
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                **arguments,
            )
            end = perf_counter()
        finally:
            if hook is not None:
                hook.remove()
        rows = rows or [1] * (len(sizes) - 1)
        times = [start, *times[1:-1], end]
        return outcome_of(len(prompt), text[0, len(prompt) :].tolist(), rows[1:], sizes[1:], times)


class Compiled(HuggingFace):
    """Greedy decoding whose steps of one row are compiled by ``torch.compile``; the prompt's pass is not.

    The KV cache has a fixed length, a power of two of at least ``SHORTEST``. Compilation, about a minute for each
    length on a CPU, is not in the times.
    """

    SHORTEST = 1024

    def __init__(self) -> None:
        super().__init__(COMPILED)
        self.cache: Any = None
        self.longest = 0
        self.compilation = CompileConfig(fullgraph=False, mode="default")
        self.compilation._compile_all_devices = True  # by default, generate compiles on a GPU only

    def arguments(self, model: ModelUnderTest, length: int) -> dict[str, Any]:
        if length > self.longest:
            self.longest = max(self.SHORTEST, 1 << (length - 1).bit_length())
            self.cache = StaticCache(config=model.model.module.config, max_cache_len=self.longest)
            ids = torch.zeros((1, 4), dtype=torch.long, device=model.model.device)
            few = GenerationConfig(max_new_tokens=4, min_new_tokens=4, compile_config=self.compilation)  # type: ignore[no-untyped-call]
            mask = torch.ones_like(ids)
            model.model.module.generate(
                ids, attention_mask=mask, past_key_values=self.cache, generation_config=few
            )
        self.cache.reset()
        return {"past_key_values": self.cache}

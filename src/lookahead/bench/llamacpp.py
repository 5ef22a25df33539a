"""llama.cpp beside us, through the package llama-cpp-python where it is installed: never a dependency.

    llamacpp-greedy                its plain decoding of the GGUF file that the model under test came from
    llamacpp-lookup                its prompt lookup of at most ten tokens, as the others'
    llamacpp-lookup:FILE           of another file, say a conversion by benchmarks/convert_gguf.py

Prompts are the same token ids, threads are torch's, and passes are counted where the package evaluates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..core import SettingsError
from .method import LOOKUP_TOKENS, Method, Outcome, RunOptions, counted
from .model import ModelUnderTest

PACKAGE = "llama-cpp-python"
#: Most positions that a context is made for: with prompt lookup it holds logits of the whole vocabulary for each.
CONTEXT = 4096


class LlamaCpp(Method):
    """Greedy decoding by llama.cpp.

    Args:
        name: "llamacpp-greedy" or "llamacpp-lookup".
        file: GGUF; that of the model under test where empty.
        model: under test.

    Raises:
        SettingsError: the package is not installed, or there is no such file.
    """

    def __init__(self, name: str, file: str, model: ModelUnderTest) -> None:
        try:
            self.settings = {PACKAGE: version(PACKAGE)}
        except PackageNotFoundError:
            raise SettingsError(
                f"{name} needs {PACKAGE}, which is not installed: pip install {PACKAGE} (it compiles llama.cpp, "
                "which takes ten minutes and needs cmake and g++)"
            ) from None
        found = file or model.gguf
        if found is None or not Path(found).is_file():
            raise SettingsError(
                f"{name} reads a GGUF file, and {found or model.name} is none; give one as {name}:FILE"
            )
        self.file, self.lookup = Path(found), name == "llamacpp-lookup"
        self.label = f"{name}:{self.file.name}"
        self._llama: Any = None

    def comparable(self, options: RunOptions) -> bool:
        """Never: its arithmetic is another, and so is the precision of a quantised file."""
        return False

    def _load(self, model: ModelUnderTest) -> Any:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if self.lookup else None
        threads, positions = torch.get_num_threads(), min(model.max_positions, CONTEXT)
        return Llama(
            str(self.file), n_ctx=positions, n_threads=threads, n_threads_batch=threads, draft_model=draft,
            logits_all=self.lookup, verbose=False,
        )  # fmt: skip

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        if options.temperature:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")
        if self._llama is None:
            self._llama = self._load(model)
        llama = self._llama
        if len(prompt) + options.max_new_tokens > llama.n_ctx():
            raise SettingsError(
                f"{self.label} takes {llama.n_ctx()} positions, got {len(prompt)} prompt tokens and "
                f"{options.max_new_tokens} new ones; leave the prompt out"
            )
        passes: list[tuple[int, list[int], list[float]]] = []  # rows, tokens that they gave, when
        evaluate = type(llama).eval

        def counting(tokens: Sequence[int]) -> None:
            passes.append((len(tokens), [], []))
            evaluate(llama, tokens)

        llama.reset()  # else the common prefix of two prompts would not be evaluated
        llama.eval = counting
        new: list[int] = []
        start = perf_counter()
        for token in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            passes[-1][1].append(token)
            passes[-1][2].append(perf_counter())
            new.append(token)
            if token in model.eos or len(new) == options.max_new_tokens:
                break
        rows = [size for size, _, _ in passes[1:]]
        times = [start, *(when[-1] for _, _, when in passes)]
        return counted(len(prompt), new, rows, [len(given) for _, given, _ in passes], times)

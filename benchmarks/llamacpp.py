"""llama.cpp beside ours, through the package llama-cpp-python if it is installed; it is never a dependency.

    llamacpp-greedy                plain decoding of the GGUF file that the model was read from
    llamacpp-lookup                prompt lookup of at most ten tokens, like the other libraries'
    llamacpp-lookup:FILE           another file, for example a conversion by benchmarks/convert_gguf.py

Prompts are the same token ids, the number of threads is torch's, and passes are counted where the package evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lookahead.bench.methods import Method, ModelUnderTest, Outcome, RunOptions, outcome_of
from lookahead.core import SettingsError

LLAMA_CPP = ("llamacpp-greedy", "llamacpp-lookup")
PACKAGE = "llama-cpp-python"
#: The largest context: with prompt lookup it holds the logits of the whole vocabulary for every position.
CONTEXT = 4096
#: Most tokens that prompt lookup drafts, here and in transformers: the example of transformers' documentation.
LOOKUP_TOKENS = 10


class LlamaCpp(Method):
    """Greedy decoding by llama.cpp.

    Args:
        name: "llamacpp-greedy" or "llamacpp-lookup".
        file: a GGUF file; empty for the file that the model was read from.
        model: the model under test.

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
        gguf = file or model.gguf
        if gguf is None or not Path(gguf).is_file():
            raise SettingsError(f"{name} needs a GGUF file, got {gguf or model.name}; give it as {name}:FILE")
        self.file, self.lookup = Path(gguf), name == "llamacpp-lookup"
        self.label = f"{name}:{self.file.name}"
        self._llama: Any = None

    def comparable(self, options: RunOptions) -> bool:
        """Never: it rounds differently, and a quantised file has other weights."""
        return False

    def _load(self, model: ModelUnderTest) -> Any:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if self.lookup else None
        threads, positions = torch.get_num_threads(), min(model.max_positions, CONTEXT)
        return Llama(
            str(self.file),
            n_ctx=positions,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft,
            logits_all=self.lookup,
            verbose=False,
        )

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        if options.temperature:
            raise SettingsError(f"{self.label} is greedy, got temperature {options.temperature:g}")
        if self._llama is None:
            self._llama = self._load(model)
        llama = self._llama
        if len(prompt) + options.max_new_tokens > llama.n_ctx():
            raise SettingsError(
                f"{self.label} has {llama.n_ctx()} positions, got {len(prompt)} prompt tokens and "
                f"{options.max_new_tokens} new ones; leave the prompt out"
            )
        passes: list[tuple[int, list[int], list[float]]] = []  # rows, their tokens, when these came
        evaluate = type(llama).eval

        def counting(tokens: Sequence[int]) -> None:
            passes.append((len(tokens), [], []))
            evaluate(llama, tokens)

        llama.reset()  # otherwise a prefix shared with the previous prompt would not be evaluated
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
        return outcome_of(len(prompt), new, rows, [len(given) for _, given, _ in passes], times)

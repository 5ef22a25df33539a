"""llama.cpp alongside ours, through the package llama-cpp-python if it is installed; it is never a dependency.

    llamacpp-greedy                plain decoding of the GGUF file that the model was read from
    llamacpp-lookup                prompt lookup of at most ten tokens, like the other libraries'
    llamacpp-lookup:FILE           another file, for example a conversion by benchmarks/convert_gguf.py

Prompts are the same token ids, the number of threads is torch's, and passes are counted inside the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from lookahead.bench.methods import ModelUnderTest, Outcome, RunOptions
from lookahead.core import SettingsError

from .gguf_peer import LOOKUP_TOKENS, GGUFPeer, outcome_of

LLAMA_CPP = ("llamacpp-greedy", "llamacpp-lookup")
#: The largest context. With prompt lookup it stores the logits of the whole vocabulary for every position.
CONTEXT = 4096


class LlamaCpp(GGUFPeer):
    """Greedy decoding by llama.cpp; the names are in ``LLAMA_CPP``."""

    package = "llama-cpp-python"
    installing = " (it compiles llama.cpp, which takes ten minutes and needs cmake and g++)"

    def _load(self, model: ModelUnderTest) -> Any:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if self.lookup else None
        threads = torch.get_num_threads()
        positions = min(model.max_positions, CONTEXT)
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
        self.check_greedy(options)
        if self.engine is None:
            self.engine = self._load(model)
        llama = self.engine
        if len(prompt) + options.max_new_tokens > llama.n_ctx():
            raise SettingsError(
                f"{self.label} has {llama.n_ctx()} positions, got {len(prompt)} prompt tokens and "
                f"{options.max_new_tokens} new ones; leave the prompt out"
            )
        passes: list[tuple[int, list[int], list[float]]] = []  # rows, their tokens, and when these arrived
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

"""Hugging Face's own decoding, as it comes, counted in the same way as ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from ..core import Stats
from .methods import Method, Outcome, RunOptions
from .model import ModelUnderTest

#: Tokens that prompt lookup drafts at most; the example of its documentation, and our own default.
LOOKUP_TOKENS = 10


class _Clock:
    """A streamer that notes when tokens come, and how many at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(perf_counter())
        self.sizes.append(tokens.numel())

    def end(self) -> None:
        pass


class HuggingFace(Method):
    """``model.generate`` of transformers; forward passes are counted by a hook on the model."""

    def __init__(self, name: str) -> None:
        self.name = self.label = name
        self.settings = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-prompt-lookup" else {}

    def comparable(self, options: RunOptions) -> bool:
        """Only greedy texts: transformers draws from another stream of random numbers."""
        return not options.temperature and self.name != "hf-sample"

    def _keywords(self, model: ModelUnderTest, options: RunOptions) -> dict[str, Any]:
        from transformers import GenerationConfig

        temperature = options.temperature or (1.0 if self.name == "hf-sample" else 0.0)
        eos = sorted(model.eos) or None
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=options.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0] if eos else 0,
            do_sample=bool(temperature) and self.name != "hf-greedy",
        )
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = float(temperature), options.top_k, 1.0
        if self.name == "hf-prompt-lookup":
            config.prompt_lookup_num_tokens = LOOKUP_TOKENS
        more = {"assistant_model": model.draft_model} if self.name == "hf-assisted" else {}
        return {"generation_config": config, **more}

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        import torch

        clock, rows = _Clock(), []

        def count(module: Any, positional: Any, keywords: dict[str, Any]) -> None:
            rows.append(int(keywords["input_ids"].shape[1]))

        ids = torch.tensor([list(prompt)], device=model.model.device)
        keywords = self._keywords(model, options)
        torch.manual_seed(options.seed)
        hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            start = perf_counter()
            text = model.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **keywords)
            end = perf_counter()
        finally:
            hook.remove()
        (prefill, *sizes), times = clock.sizes[1:], clock.times[1:]  # what comes first is the prompt
        tokens = text[0, len(prompt) :].tolist()
        if len(sizes) + 1 != len(rows) or len(tokens) != prefill + sum(sizes):
            raise AssertionError(
                f"{self.name}: {len(rows)} forward passes, but tokens came {len(times)} times"
            )
        times[-1] = end
        stats = Stats(prompt_tokens=len(prompt), new_tokens=1 + sum(sizes))
        for evaluated, size in zip(rows[1:], sizes, strict=True):
            stats.count_step(evaluated, evaluated - 1, size)
        between = [b - a for a, b in pairwise(times)]
        return Outcome(tokens, stats, prefill, times[0] - start, sizes, rows[1:], between)

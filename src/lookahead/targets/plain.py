"""The fallback: one row at a time through the model's own cache, for models that cannot evaluate a tree.

Recurrent and convolutional layers ignore attention masks, so a tree's logits would be silently wrong there.
Every sequence has a cache and a pass of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import Scores, TokenTree
from .facts import RotaryReset, max_positions, memory_errors
from .logits import LogitsBatch, LogitsRows


class PlainTarget:
    """Trees of one node on any causal language model. Fulfils ``lookahead.core.Target``."""

    path = "plain"

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        self.model = model
        self.reason = reason
        self.config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(self.config.vocab_size)
        self.max_positions = max_positions(self.config)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._takes_rows = "logits_to_keep" in parameters
        self._caches: dict[int, Any] = {}
        self._rotary = RotaryReset(model)
        self.lengths: dict[int, int] = {}

    def depth_limit(self, slot: int) -> int:
        """Always 0: the root alone."""
        return 0

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        scores: list[Scores] = []
        for slot, prompt in prompts:
            self.lengths[slot] = 0
            self._caches[slot] = DynamicCache(config=self.config)
            scores.append(self._run(slot, prompt))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        for _, tree in trees:
            if len(tree) != 1:
                raise AssertionError(f"this target takes trees of one row, got {len(tree)}")
        return [self._run(slot, tree.tokens) for slot, tree in trees]

    def _run(self, slot: int, tokens: Sequence[int]) -> LogitsRows:
        device, length = self.model.device, self.lengths[slot]
        keywords: dict[str, Any] = {self._cache_name: self._caches[slot], "use_cache": True}
        if self._takes_positions:
            keywords["position_ids"] = torch.arange(length, length + len(tokens), device=device)[None]
        if self._takes_rows:
            keywords["logits_to_keep"] = 1
        self._rotary.before(length + len(tokens))
        with memory_errors(f"a pass of {len(tokens)} tokens"), torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([list(tokens)], device=device), return_dict=True, **keywords
            )
        self.lengths[slot] = length + len(tokens)
        return LogitsRows(LogitsBatch(output.logits[:, -1:]), 0)

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Nothing to do: the only row of a step is always kept."""

    def release(self, slot: int) -> None:
        self._caches.pop(slot, None)
        self.lengths.pop(slot, None)

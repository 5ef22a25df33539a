"""What a light head learns from: the positions of self-generated text with their hidden states, and what is held out.

Every twentieth text is held out. On these, ``Report`` counts by level how often the model's best token is among the
head's best 1, 2, 4 and 8, and how often guesses of each kind are right, greedy and sampled.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core import SettingsError
from ..drafters.adaptive.sources.light_head import (
    GREEDY_GUESSES,
    GUESSES,
    PROBABILITIES,
    SAMPLED_GUESSES,
    sampled_guess_kinds,
)
from .self_text import TEMPERATURE
from .table import limited
from .text_parts import read_part

Array = np.ndarray[Any, np.dtype[Any]]

#: One in this many texts is held out.
HELD_OUT = 20
#: Largest number of positions on which the accuracy is measured.
MEASURED = 20_000
#: The k of each top-k accuracy.
BEST = (1, 2, 4, 8)


class Positions:
    """The positions of a model's self-generated text, with their hidden states.

    Args:
        parts: the parts of the text, each with the file of its states (``hidden_states.collect``).

    Attributes:
        tokens: the token at each position, int64 (n,).
        ids, probabilities: the best tokens at each position and their probabilities, (n, TOP).
        bounds: the first position of each text and the one after its last, (texts, 2).
        held_out: (texts,), whether each text is held out.

    Raises:
        SettingsError: the states do not match the text, or there is no text.
    """

    def __init__(self, parts: Sequence[tuple[Path, Path]]) -> None:
        self.states = [np.load(file, mmap_mode="r", allow_pickle=False) for _, file in parts]
        #: The first position of each part, and the total number of positions.
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in self.states])]).astype(np.int64)
        tokens = []
        ids = []
        probabilities = []
        bounds = []
        held_out = []
        at = 0
        for part, _ in parts:
            for text in read_part(part):
                tokens.append(np.array(text.completion, np.int64))
                ids.append(text.ids.astype(np.int64))
                probabilities.append(np.exp(text.logprobs.astype(np.float32)))
                bounds.append((at, at + len(text.completion)))
                # A text's kind and temperature depend on the last digits of its number, so that these rotate here.
                held_out.append((text.number + text.number // HELD_OUT) % HELD_OUT == HELD_OUT - 1)
                at += len(text.completion)
        if at != self.firsts[-1] or not at:
            raise SettingsError("the hidden states must match the text; delete them to compute them again")
        self.tokens = np.concatenate(tokens)
        self.ids = np.concatenate(ids)
        self.probabilities = np.concatenate(probabilities)
        self.bounds = np.array(bounds, np.int64)
        self.held_out = np.array(held_out)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, positions: Array) -> Array:
        """Hidden states at positions of any shape, float32 (..., hidden)."""
        flat = positions.reshape(-1)
        out = np.empty((len(flat), self.states[0].shape[1]), np.float32)
        parts = np.searchsorted(self.firsts, flat, "right") - 1
        for part in np.unique(parts):
            here = parts == part
            out[here] = self.states[part][flat[here] - self.firsts[part]]
        return out.reshape(*positions.shape, -1)

    def runs(self, length: int, after: int) -> Array:
        """First positions of runs of ``length`` consecutive training positions, each followed by ``after`` more."""
        starts: list[int] = []
        for (begin, end), held_out in zip(self.bounds.tolist(), self.held_out.tolist(), strict=True):
            last = end - length - after
            if not held_out and last >= begin:
                starts += [*range(begin, last, length), last]
        return np.array(starts, np.int64)

    def measured(self, after: int) -> Array:
        """Held-out positions that are followed by ``after`` more of their text; at most ``MEASURED``."""
        ranges = [np.arange(begin, end - after) for begin, end in self.bounds[self.held_out]]
        positions = np.concatenate([np.zeros(0, np.int64), *ranges])
        step = max(1, -(-len(positions) // MEASURED))
        return positions[::step]

    def frequent(self, count: int) -> Array:
        """The most frequent tokens of the training text, ascending, int32; fewer if the text has fewer tokens."""
        kept = np.concatenate([np.arange(*each) for each in self.bounds[~self.held_out]])
        tokens, counts = np.unique(self.tokens[kept], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:count]
        shortlist: Array = np.sort(tokens[order]).astype(np.int32)
        return shortlist


class Report:
    """How often guesses are right.

    Args:
        levels: number of levels of the head.
    """

    def __init__(self, levels: int) -> None:
        self._random = np.random.default_rng(0)
        self._best = np.zeros((levels, len(BEST)))
        self._counted = np.zeros((levels, 1))
        kinds = {"greedy": GREEDY_GUESSES, "sampled": SAMPLED_GUESSES}
        self._counts = {name: np.zeros((2, levels, count)) for name, count in kinds.items()}

    def count(self, level: int, tokens: Array, logs: Array, ids: Array, probabilities: Array) -> None:
        """Count the guesses of a level at n positions.

        Args:
            tokens, logs: the guesses, best first, and their log-probabilities, (n, k).
            ids, probabilities: the model's best tokens and their probabilities, (n, TOP).
        """
        # Greedy.
        right = tokens == ids[:, :1]
        self._best[level] += [right[:, :k].sum() for k in BEST]
        self._counted[level] += len(tokens)
        kinds = np.searchsorted(PROBABILITIES, np.exp(logs[:, :GUESSES]))
        self._add("greedy", level, kinds, right[:, :GUESSES])

        # Sampled: with noise drawn for each token, whether the model or the head proposes it.
        of_model: Any = self._random.gumbel(size=ids.shape)
        same = tokens[:, :, None] == ids[:, None, :]
        fresh: Any = self._random.gumbel(size=tokens.shape)
        of_guesses: Array = np.where(same.any(2), (same * of_model[:, None, :]).sum(2), fresh)
        own = np.log(np.maximum(probabilities, 1e-9)) / TEMPERATURE + of_model
        truth = np.take_along_axis(ids, own.argmax(1)[:, None], 1)
        scores = (logs - logs[:, :1]) / TEMPERATURE + of_guesses
        order = np.argsort(-scores, axis=1)[:, :GUESSES]
        kinds = sampled_guess_kinds(np.take_along_axis(scores, order, 1))
        self._add("sampled", level, kinds, np.take_along_axis(tokens, order, 1) == truth)

    def _add(self, name: str, level: int, kinds: Array, right: Array) -> None:
        hits, trials = self._counts[name]
        np.add.at(trials[level], kinds, 1)
        np.add.at(hits[level], kinds, right)

    @property
    def accuracy(self) -> list[list[float]]:
        """The share of positions whose best token is among the best 1, 2, 4, 8 guesses, by level."""
        shares: list[list[float]] = (self._best / np.maximum(1, self._counted)).round(4).tolist()
        return shares

    @property
    def counts(self) -> dict[str, tuple[Array, Array]]:
        """``HeadWeights.counts``, with trials limited so that a sequence's own counts soon dominate."""
        counts = {}
        for name, parts in self._counts.items():
            hits, trials = limited(*parts)
            counts[name] = hits.astype(np.float32), trials.astype(np.float32)
        return counts

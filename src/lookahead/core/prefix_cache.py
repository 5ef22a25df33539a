"""Prefix caching: a prompt reuses the keys and values of a finished sequence with the same prefix.

System prompts and the earlier turns of a conversation are therefore evaluated once. On the compiled CPU path, rows
are bit-identical to those without the cache; on other paths they are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from traceback import clear_frames

from . import OutOfMemory, Scores, SettingsError, Target, TokenTree, common_prefix
from .target import adopt_properties


class PrefixTarget(Target):
    """A target that keeps finished sequences and drops the least recently used.

    If a pass does not fit in memory, it drops all of them and tries once more.

    Args:
        target: evaluates the rows; its ``keeps_prefixes`` must be true.
        kept: number of finished sequences to keep.

    Attributes:
        reused: number of prompt tokens that were reused, by slot in use.
    """

    path: str
    guarantee: str
    reason: str
    vocabulary: int

    def __init__(self, target: Target, kept: int) -> None:
        adopt_properties(self, target)
        self.reused: dict[int, int] = {}
        self._target = target
        self._kept = kept
        self._slots: dict[int, int] = {}  # the caller's slot -> the target's slot
        self._texts: dict[int, list[int]] = {}  # the target's slot -> the tokens whose rows are in it
        self._idle: list[int] = []  # the target's slots of finished sequences, the oldest first
        self._free: list[int] = []
        self._new = count()
        self._trees: dict[int, TokenTree] = {}

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        """Evaluate each prompt from the end of its longest prefix in an earlier sequence or an earlier prompt of the
        call."""
        scores: list[Scores] = []
        for slot, prompt in prompts:
            try:
                scores += self._prefill(slot, prompt)
                continue
            except OutOfMemory as error:
                if not self._idle:
                    raise
                clear_frames(error.__traceback__)
            # Outside of the handler, which would keep the tensors of the failed pass.
            self.release(slot)
            self._keep_idle(0)
            scores += self._prefill(slot, prompt)
        return scores

    def _prefill(self, slot: int, prompt: Sequence[int]) -> Sequence[Scores]:
        inner = self._choose_slot(slot, prompt)
        self._slots[slot] = inner
        self._texts[inner] = []  # nothing to reuse if the evaluation fails
        scores = self._target.prefill([(inner, prompt)])
        self._texts[inner] = list(prompt)
        return scores

    def known(self, prompt: Sequence[int]) -> int:
        """The number of prompt tokens that would be reused."""
        return max(self._reusable(prompt).values(), default=0)

    def _reusable(self, prompt: Sequence[int]) -> dict[int, int]:
        """For each of the target's slots, the number of prompt tokens that can be reused; the last token never is."""
        return {inner: common_prefix(text, prompt[:-1]) for inner, text in self._texts.items()}

    def _choose_slot(self, slot: int, prompt: Sequence[int]) -> int:
        """The inner target's slot for a prompt, filled with the longest reusable prefix."""
        lengths = self._reusable(prompt)
        source = max(lengths, key=lengths.__getitem__, default=0)
        self.reused[slot] = length = lengths.get(source, 0)
        if length and source in self._idle and 2 * length >= len(self._texts[source]):
            # At least half of that sequence is reused, so the prompt takes over its slot.
            self._idle.remove(source)
            inner = source
        else:
            inner = self._free.pop() if self._free else next(self._new)
        if length:
            try:
                self._target.reuse(inner, source, length)
            except BaseException:
                self._texts.pop(inner, None)
                self._target.release(inner)
                self._free.append(inner)
                raise
        return inner

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        self._trees = dict(trees)
        inner = [(self._slots[slot], tree) for slot, tree in trees]
        try:
            return self._target.forward(inner)
        except OutOfMemory as error:
            if not self._idle:
                raise
            clear_frames(error.__traceback__)
        self._keep_idle(0)
        return self._target.forward(inner)

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._target.commit([(self._slots[slot], path) for slot, path in paths])
        for slot, path in paths:
            tokens = self._trees[slot].tokens
            self._texts[self._slots[slot]] += [tokens[node] for node in path]

    def release(self, slot: int) -> None:
        """Keep the sequence for later prompts; drop the least recently used if too many are kept."""
        self.reused.pop(slot, None)
        if slot in self._slots:
            inner = self._slots.pop(slot)
            self._idle.insert(len(self._idle) if self._texts[inner] else 0, inner)
        self._keep_idle(self._kept)

    def capacity(self, tokens: int) -> int:
        return self._target.capacity(tokens)

    def keep(self, tokens: int) -> None:
        while self._idle and sum(self.capacity(len(self._texts[inner])) for inner in self._idle) > tokens:
            self._keep_idle(len(self._idle) - 1)

    def _keep_idle(self, most: int) -> None:
        """Drop finished sequences, the least recently used first, until at most ``most`` are kept."""
        while len(self._idle) > most:
            oldest = self._idle.pop(0)
            del self._texts[oldest]
            self._target.release(oldest)
            self._free.append(oldest)

    def depth_limit(self, slot: int) -> int:
        return self._target.depth_limit(self._slots[slot])

    def positions_left(self, slot: int) -> int:
        return self._target.positions_left(self._slots[slot])


def with_prefixes(target: Target, kept: int) -> Target:
    """The target with prefix caching; the target itself if its rows cannot be reused or ``kept`` is 0."""
    if kept < 0:
        raise SettingsError(f"prefix_cache must be 0 or more, got {kept}")
    return PrefixTarget(target, kept) if kept and target.keeps_prefixes else target

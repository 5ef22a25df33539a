"""Prefix caching: keys and values of finished texts are kept, and prompts that begin like one of them go on there.

Earlier turns of a conversation and system prompts are then not evaluated again. On the compiled CPU path a row has
the same bits wherever it is evaluated, and so has a text; elsewhere they are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from ..core import Scores, Target, TokenTree


@runtime_checkable
class ReusingTarget(Target, Protocol):
    """A target whose slots may begin with what others hold.

    Attributes:
        keeps_prefixes: whether that gives the rows that evaluating the whole prompt would give.
    """

    keeps_prefixes: bool

    def reuse(self, slot: int, source: int, length: int) -> None:
        """Begin a slot with the first ``length`` tokens of another, or cut it to them where it is the same one.

        The next ``prefill`` of the slot evaluates only what follows them.
        """
        ...


class PrefixTarget:
    """A target that keeps finished sequences, the least recently used out first. Fulfils ``lookahead.core.Target``.

    Args:
        target: evaluates; its ``keeps_prefixes`` must hold.
        kept: finished sequences at most.

    Attributes:
        reused: of each slot in use, how many tokens of its prompt were not evaluated again.
    """

    def __init__(self, target: ReusingTarget, kept: int) -> None:
        self.path, self.reason, self.vocabulary = target.path, target.reason, target.vocabulary
        self.reused: dict[int, int] = {}
        self._target, self._kept = target, kept
        self._slots: dict[int, int] = {}  # the caller's -> the target's
        self._texts: dict[int, list[int]] = {}  # the target's slot -> the tokens whose rows it holds
        self._idle: list[int] = []  # the target's slots of finished sequences, the oldest first
        self._free: list[int] = []
        self._new = count()
        self._trees: dict[int, TokenTree] = {}

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        """Each prompt from where an earlier text parts from it; those of the same call count as earlier."""
        scores: list[Scores] = []
        for slot, prompt in prompts:
            place = self._slots[slot] = self._place(slot, prompt)
            self._texts[place] = []  # nothing to go on from, should evaluation fail
            scores += self._target.prefill([(place, prompt)])
            self._texts[place] = list(prompt)
        return scores

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt would not be evaluated again."""
        return max((_common(text, prompt[:-1]) for text in self._texts.values()), default=0)

    def _place(self, slot: int, prompt: Sequence[int]) -> int:
        """The target's slot for a prompt, with what it needs not evaluate; at least the last token it must."""
        lengths = {place: _common(text, prompt[:-1]) for place, text in self._texts.items()}
        source = max(lengths, key=lengths.__getitem__, default=0)
        self.reused[slot] = length = lengths.get(source, 0)
        if length and source in self._idle and 2 * length >= len(self._texts[source]):
            self._idle.remove(source)  # it goes on with this prompt
            place = source
        else:
            place = self._free.pop() if self._free else next(self._new)
        if length:
            self._target.reuse(place, source, length)
        return place

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        self._trees = dict(trees)
        return self._target.forward([(self._slots[slot], tree) for slot, tree in trees])

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._target.commit([(self._slots[slot], path) for slot, path in paths])
        for slot, path in paths:
            tokens = self._trees[slot].tokens
            self._texts[self._slots[slot]] += [tokens[node] for node in path]

    def release(self, slot: int) -> None:
        """The sequence is kept for prompts to come; of too many the least recently used one goes."""
        self.reused.pop(slot, None)
        if slot in self._slots:
            place = self._slots.pop(slot)
            self._idle.insert(len(self._idle) if self._texts[place] else 0, place)
        while len(self._idle) > self._kept:
            oldest = self._idle.pop(0)
            del self._texts[oldest]
            self._target.release(oldest)
            self._free.append(oldest)

    def depth_limit(self, slot: int) -> int:
        return self._target.depth_limit(self._slots[slot])


def with_prefixes(target: Target, kept: int) -> Target:
    """The target with prefix caching; itself where its rows cannot be used again, or none are to be kept."""
    if kept and isinstance(target, ReusingTarget) and target.keeps_prefixes:
        return PrefixTarget(target, kept)
    return target


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class PrefixCache:
    """Lends one ``PrefixTarget`` to one caller at a time; whoever else comes gets a target of its own.

    Args:
        make_target: a fresh target.
        kept: finished sequences at most.
        state: what changes when the model does: what was kept then goes.
    """

    def __init__(self, make_target: Callable[[], Target], kept: int, state: Callable[[], Any]) -> None:
        self._make, self._kept, self._state = make_target, kept, state
        self._lock = Lock()
        self._target: Target | None = None
        self._of: Any = None

    @contextmanager
    def lend(self) -> Iterator[Target]:
        """A target; a plain one where this model's rows cannot be used again."""
        if not self._kept or not self._lock.acquire(blocking=False):
            yield self._make()
            return
        target, self._target = self._target, None  # which an interrupted step would leave in disorder
        orderly = False
        try:
            state = self._state()
            if target is None or state != self._of:
                target, self._of = with_prefixes(self._make(), self._kept), state
            yield target
            orderly = True
        except GeneratorExit:  # the caller stops between two steps
            orderly = True
            raise
        finally:
            if orderly and isinstance(target, PrefixTarget):
                self._target = target
            self._lock.release()

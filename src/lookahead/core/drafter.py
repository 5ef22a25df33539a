"""What proposes tokens. A new method is one new file with one subclass of ``Drafter``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from .target import Scores
from .tree import TokenTree

UNLIMITED_ROWS = 1 << 20


class Noise(Protocol):
    """The randomness of sampling, known ahead: a token is argmax(logits / temperature + noise(index))."""

    temperature: float

    def __call__(self, index: int) -> Any:
        """Gumbel noise (V,) of emitted token ``index``, 0 being the prefill's; a numpy array.

        A pure function of ``index``, to be asked for tokens of the last step and for later ones.
        """
        ...


class Drafter(ABC):
    """The state of one sequence: it is reset with a prompt, then drafts and observes in turn.

    ``draft`` has no effect that a second call would notice, except that limits may make it smaller for good:
    the loop calls it again with fewer rows when a step does not fit in memory.

    Attributes:
        batch: sequences in the coming pass; the loop sets it before ``draft``.
    """

    batch = 1

    @abstractmethod
    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        """Begin a sequence: the prompt, the token the prefill emitted, and the tokens that end a text."""

    @abstractmethod
    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        """The tree of the next step: no deeper than ``max_depth`` (>= 0), at most ``max_rows`` (>= 1) rows."""

    @abstractmethod
    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a step: the tree as drafted, its logits where rows need them, the path, the new tokens."""

    def use_noise(self, noise: Noise | None) -> None:  # noqa: B027
        """Called before ``reset``: how the sequence is sampled; None where it is greedy.

        A drafter may rank its candidates with it. The output does not depend on whether it does.
        """

    def overlap(self, tree: TokenTree) -> None:  # noqa: B027
        """Called between the launch of a step and the first read of its logits.

        On a device that runs by itself (CUDA) this time is free: the place for what does not depend on the
        step's result. ``observe`` follows for the same tree, unless the sequence ends with the step.
        """

    def stats(self) -> dict[str, float]:
        """Figures of this method's own, by name."""
        return {}

"""What proposes tokens. A new method is one new file with one subclass of ``Drafter``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .target import Scores
from .tree import TokenTree

UNLIMITED_ROWS = 1 << 20


class Drafter(ABC):
    """The state of one sequence: it is reset with a prompt, then drafts and observes in turn.

    ``draft`` has no effect that a second call would notice, except that limits may make it smaller for good:
    the loop calls it again with fewer rows when a step does not fit in memory.
    """

    @abstractmethod
    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        """Begin a sequence: the prompt, the token the prefill emitted, and the tokens that end a text."""

    @abstractmethod
    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        """The tree of the next step: no deeper than ``max_depth`` (>= 0), at most ``max_rows`` (>= 1) rows."""

    @abstractmethod
    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a step: the tree as drafted, the logits of its read rows, the path, the new tokens."""

    def stats(self) -> dict[str, float]:
        """Figures of this method's own, by name."""
        return {}

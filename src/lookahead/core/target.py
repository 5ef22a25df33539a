"""The interface of a target, the model being accelerated. ``lookahead.testing.FakeTarget`` is the smallest example.

The engine assigns each sequence a slot number. Per slot, a target keeps the keys and values of the committed tokens
and, between ``forward`` and ``commit``, the pending rows of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from .errors import NumericalError
from .tree import TokenTree

#: A target's guarantee: how a sequence decoded with drafts compares with plain decoding on the same target.
BIT_EQUAL = "bit-equal by construction"
CHECKED = "bit-equal, as checked at load"
#: Rounding depends on the number of rows in a step, so a near tie may be resolved differently.
UP_TO_ROUNDING = "equal up to rounding"
#: No limit of concurrent sequences, and of their tokens.
UNLIMITED_SEQUENCES = 1 << 20
UNLIMITED_TOKENS = 1 << 50
#: The largest numbers of rows and of sequences in a captured pass; both are padded to powers of two.
MOST_ROWS, MOST_SEQUENCES = 256, 64


class Scores(Protocol):
    """The target's logits at the rows of one tree that need logits."""

    def best(self, node: int) -> int:
        """The token with the largest logit under ``node``. Raises NumericalError on NaN."""
        ...

    def row(self, node: int) -> Any:
        """The logits under ``node``, shape (V,), in the target's own array type."""
        ...

    def top(self, nodes: Sequence[int], k: int) -> tuple[Any, Any]:
        """The best tokens of each given row and their log-odds relative to its best, for drafters that learn.

        Args:
            k: the number of tokens that are needed.

        Returns:
            (ids, log-odds), both n x m, best first, as numpy arrays or nested lists. m is at least min(k, V): a
            target that has found more tokens returns them too, because each conversion takes time. Log-odds are
            logit minus largest logit, so the first column is 0. If a logit of a row is NaN, all its log-odds are NaN
            and its token ids are undefined.
        """
        ...

    def hidden(self, node: int) -> Any:
        """The input of the output matrix at ``node``: the last layer's output after the final norm.

        Returns:
            (hidden,) float32, a numpy array. None if the tree did not request it (``TokenTree.needs_hidden``) or the
            target does not provide hidden states.
        """
        ...


def best_or_nan(scores: Scores, node: int) -> int:
    """The token with the largest logit under ``node``; -1 if a logit is NaN."""
    try:
        return scores.best(node)
    except NumericalError:
        return -1


class Target(Protocol):
    """The model being accelerated.

    Classes that inherit from it get the defaults below. A target that passes its trees to another one calls
    ``adopt_properties``.

    Attributes:
        path: how steps are evaluated, as in ``hf.paths``; "" for targets without a model.
        guarantee: how a sequence compares with plain decoding: one of the constants above, or "" if unknown.
        reason: why this path was chosen, in one line.
        vocabulary: V.
        captures: whether steps are padded to a few sizes, and the second step of each size is captured. Only later
            steps then show the time of that size, and every sequence costs as many rows as the largest tree.
        gives_hidden: whether ``Scores.hidden`` returns the hidden states that a tree requests.
        runs_compiled: whether passes run this library's own compiled code. Their rows cost about as much as in
            ``CostCurve.assumed``, and a light head is compiled as well.
        shares_module: whether passes run a torch module that other targets run too, so threads must take turns.
        keeps_prefixes: whether a slot can start with the keys and values of another one (``reuse``), and reused rows
            equal those of a prompt evaluated as a whole.
        max_sequences: largest number of slots in use at once; the engine admits no more sequences.
        reused: for each slot in use, the number of prompt tokens that were reused (``core.prefix_cache``).
    """

    path: str
    guarantee: str
    reason: str
    vocabulary: int
    captures: bool = False
    gives_hidden: bool = False
    runs_compiled: bool = False
    shares_module: bool = False
    keeps_prefixes: bool = False
    max_sequences: int = UNLIMITED_SEQUENCES
    reused: Mapping[int, int] = MappingProxyType({})

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        """Evaluate and commit whole prompts, each in its slot. Node 0 of the scores is the last token.

        Raises:
            OutOfMemory: the pass did not fit in memory.
        """
        ...

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        """One forward pass over a list of (slot, tree).

        Raises:
            OutOfMemory: the pass did not fit in memory. No state has changed, so a retry with fewer rows is safe.
        """
        ...

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the rows of each slot's path (root first) and drop the other pending rows."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...

    def depth_limit(self, slot: int) -> int:
        """The largest depth of a node in this slot's next tree; 0 allows the root alone.

        Limited by the model's last position, and by any length at which the model changes its rotary embedding.
        """
        ...

    def positions_left(self, slot: int) -> int:
        """The number of positions after a slot's committed tokens, minus one for the root of the next tree.

        This is the slot's ``depth_limit``, unless that has another limit.
        """
        return self.depth_limit(slot)

    def known(self, prompt: Sequence[int]) -> int:
        """The number of tokens of this prompt that would be reused."""
        return 0

    def capacity(self, tokens: int) -> int:
        """The number of tokens for which a slot with this many tokens has memory."""
        return tokens

    def keep(self, tokens: int) -> None:
        """Keep at most this many tokens of finished sequences (``core.prefix_cache``)."""
        return None

    def reuse(self, slot: int, source: int, length: int) -> None:
        """Start a slot with the first ``length`` tokens of another slot; truncate it if both are the same slot.

        The next ``prefill`` of the slot evaluates only the tokens that follow. Called only if ``keeps_prefixes``.
        """
        raise AssertionError("reuse needs a target that keeps prefixes")


def adopt_properties(target: Target, inner: Target) -> None:
    """Give a target the attributes of the target that evaluates its trees.

    ``keeps_prefixes`` is not among them, because the target itself must implement ``reuse``.
    """
    target.path = inner.path
    target.guarantee = inner.guarantee
    target.reason = inner.reason
    target.vocabulary = inner.vocabulary
    target.captures = inner.captures
    target.gives_hidden = inner.gives_hidden
    target.runs_compiled = inner.runs_compiled
    target.shares_module = inner.shares_module
    target.max_sequences = inner.max_sequences

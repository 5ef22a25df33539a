"""What runs on the loop's thread for one text alone: chooser and drafter. What they raise ends that text only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..core import UNLIMITED_ROWS, Choose, Drafter, LookaheadError, Scores, TokenTree

log = logging.getLogger("lookahead.server")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Entry:
    """Log-probability of one token, and the k best with theirs; under the target's own logits, before processors."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogProbs(Choose):
    """A chooser that writes down the log-probabilities of what it chose.

    Attributes:
        tokens: of the text. prompt: of the prompt's tokens but the first.
    """

    def __init__(self, inner: Choose, k: int) -> None:
        self._inner, self._k = inner, k
        self.tokens: list[Entry] = []
        self.prompt: list[Entry] = []

    def __call__(self, scores: Scores, node: int) -> int:
        token = self._inner(scores, node)
        self.tokens.append(self._entry(scores, node, token))
        return token

    def overlap(self, tree: TokenTree) -> None:
        self._inner.overlap(tree)

    def read_prompt(self, scores: Scores, node: int, token: int) -> None:
        """A token of the prompt; see ``core.Request``."""
        self.prompt.append(self._entry(scores, node, token))

    def _entry(self, scores: Scores, node: int, token: int) -> Entry:
        row = torch.log_softmax(scores.row(node).float(), dim=-1)
        values, ids = row.topk(self._k)
        return Entry(token, float(row[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def guarded(what: str, function: Callable[..., R]) -> Callable[..., R]:
    """``function``, where whatever goes wrong is an error of one text; the traceback goes to the log."""

    def call(*given: Any) -> R:
        try:
            return function(*given)
        except LookaheadError:
            raise
        except Exception as error:
            log.exception("%s failed; its request ends", what)
            raise LookaheadError(f"{what} failed: {type(error).__name__}") from error

    return call


class GuardedChoose(Choose):
    """A chooser behind ``guarded``."""

    def __init__(self, inner: Choose) -> None:
        self._choose = guarded("the choice of a token", inner.__call__)
        self.overlap = inner.overlap  # type: ignore[method-assign]

    def __call__(self, scores: Scores, node: int) -> int:
        return self._choose(scores, node)


class GuardedDrafter(Drafter):
    """A drafter behind ``guarded``, which may begin with more text than the prompt.

    Args:
        hint: what is likely to follow the prompt.
    """

    def __init__(self, inner: Drafter, hint: list[int]) -> None:
        self._inner, self._hint = inner, hint
        self._draft = guarded("drafting", inner.draft)
        self._observe = guarded("drafting", inner.observe)
        self.overlap, self.stats = inner.overlap, inner.stats  # type: ignore[method-assign]

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        # The hint stands behind the end of the prompt, so that its first tokens are found there too.
        read = [*prompt[-16:], *self._hint, *prompt] if self._hint else prompt
        guarded("drafting", self._inner.reset)(read, first, eos)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        return self._draft(max_depth, max_rows)

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._observe(tree, scores, path, tokens)

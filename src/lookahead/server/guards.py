"""What runs on the loop's thread for one text alone: chooser and drafter. What they raise ends that text only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..core import UNLIMITED_ROWS, Choose, Drafter, LookaheadError, Scores, TokenTree
from ..core.drafter import Noise

log = logging.getLogger("lookahead.server")


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


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Whatever goes wrong for one text ends that text; the traceback goes to the log."""
    try:
        yield
    except LookaheadError:
        raise
    except Exception as error:
        log.exception("%s failed; its request ends", what)
        raise LookaheadError(f"{what} failed: {type(error).__name__}") from error


class GuardedChoose(Choose):
    """A chooser behind ``guarded``."""

    def __init__(self, inner: Choose) -> None:
        self._inner = inner

    def __call__(self, scores: Scores, node: int) -> int:
        with guarded("the choice of a token"):
            return self._inner(scores, node)

    def overlap(self, tree: TokenTree) -> None:
        with guarded("the choice of a token"):
            self._inner.overlap(tree)


class GuardedDrafter(Drafter):
    """A drafter behind ``guarded``, which may begin with more text than the prompt.

    Args:
        hint: what is likely to follow the prompt.
    """

    def __init__(self, inner: Drafter, hint: list[int]) -> None:
        self._inner, self._hint = inner, hint

    def reset(self, prompt: Any, first: int, eos: frozenset[int]) -> None:
        prompt = list(prompt)
        if self._hint:  # behind the prompt's end, so that its first tokens are found there too
            prompt = [*prompt[-16:], *self._hint, *prompt]
        with guarded("drafting"):
            self._inner.reset(prompt, first, eos)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        with guarded("drafting"):
            return self._inner.draft(max_depth, max_rows)

    def observe(self, tree: TokenTree, scores: Scores, path: Any, tokens: Any) -> None:
        with guarded("drafting"):
            self._inner.observe(tree, scores, path, tokens)

    def use_noise(self, noise: Noise | None) -> None:
        self._inner.use_noise(noise)

    def overlap(self, tree: TokenTree) -> None:
        with guarded("drafting"):
            self._inner.overlap(tree)

    def stats(self) -> dict[str, float]:
        return self._inner.stats()

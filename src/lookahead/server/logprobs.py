"""Log-probabilities of chosen tokens, from the target's own logits, before temperature, penalties and grammars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core import Choose, Scores, TokenTree
from ..sampling.scores import host_row
from ..sampling.top import top_of_rows


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """The log-probability of one token, and the k most likely tokens with their own."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogProbs(Choose):
    """A chooser that records the log-probabilities of another chooser's tokens.

    Attributes:
        tokens: an entry for each token of the completion.
        prompt: an entry for each token of the prompt except the first.
    """

    def __init__(self, inner: Choose, k: int) -> None:
        self._inner = inner
        self._k = k
        self.tokens: list[TokenLogProb] = []
        self.prompt: list[TokenLogProb] = []

    def __call__(self, scores: Scores, node: int) -> int:
        token = self._inner(scores, node)
        self.tokens.append(self._of(scores, node, token))
        return token

    def overlap(self, tree: TokenTree) -> None:
        self._inner.overlap(tree)

    def read_prompt(self, scores: Scores, node: int, token: int) -> None:
        """Record a token of the prompt; see ``core.sequence.Request``."""
        self.prompt.append(self._of(scores, node, token))

    def _of(self, scores: Scores, node: int, token: int) -> TokenLogProb:
        row, peaks = host_row(scores, node)
        mass = np.log(np.exp(row - row.max()).sum(dtype=np.float64))
        top = list[tuple[int, float]]()
        if self._k:
            ids, odds = top_of_rows(row[None], min(self._k, len(row)), None if peaks is None else peaks[None])
            top = list(zip(ids[0].tolist(), (odds[0] - mass).tolist(), strict=True))
        return TokenLogProb(token, float(row[token] - row.max() - mass), top)

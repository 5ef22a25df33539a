"""A drafting method of one's own: propose that the text repeats its last tokens.

    python examples/own_drafter.py [MODEL]

A drafter only proposes. What it proposes wrongly costs rows, and never changes the text.
"""

import sys
from collections.abc import Sequence

import lookahead
from lookahead.core import Drafter, Scores, TokenTree
from lookahead.core.drafter import UNLIMITED_ROWS
from lookahead.drafters import METHODS


class RepeatDrafter(Drafter):
    """One candidate: the last ``length`` tokens once more."""

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self.text = [*prompt, first]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        tree = TokenTree(self.text[-1])
        tree.add_candidate(self.text[-self.length :][: min(max_depth, max_rows - 1)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self.text += tokens


METHODS["repeat"] = lambda config, vocabulary, pool: RepeatDrafter()

llm = lookahead.load(sys.argv[1] if len(sys.argv) > 1 else None)
prompt = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,"
ours = llm.generate(prompt, max_new_tokens=64, method="repeat")
plain = llm.generate(prompt, max_new_tokens=64, method="autoregressive")
print(f"{ours.stats.compression_ratio:.2f} tokens per forward pass · equal: {ours.tokens == plain.tokens}")

"""A custom drafter: propose that the text repeats its last tokens.

    python examples/own_drafter.py [MODEL]

A drafter only proposes tokens. A wrong proposal costs time and never changes the output.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import lookahead
from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree


@dataclass(frozen=True)
class Repeat(Drafter):
    """Proposes one candidate: the last ``length`` tokens again."""

    length: int = 12  # one repetition of the numbers below, in SmolLM2 tokens

    def start(self, sequence: Start) -> DraftState:
        return RepeatState(self.length, sequence.text)


class RepeatState(DraftState):
    """The text of one sequence."""

    def __init__(self, length: int, text: list[int]) -> None:
        self.length, self.text = length, text

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = TokenTree(self.text[-1])
        tree.add_candidate(self.text[-self.length :][: min(max_depth, max_rows - 1)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self.text += tokens


llm = lookahead.load(sys.argv[1] if len(sys.argv) > 1 else None)
prompt = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,"
ours = llm.generate(prompt, max_new_tokens=64, drafter=Repeat())
plain = llm.generate(prompt, max_new_tokens=64, drafter="plain")
print(f"{ours.stats.compression_ratio:.2f} tokens per forward pass · equal: {ours.tokens == plain.tokens}")

"""The fixed trial of the equivalence check: prompts, trees, the negative control, and how a target is led through.

Two prompts; for each two token trees with a commit between them; then two single rows. Before the first tree the
same rows are evaluated once with deliberate errors in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..core import Target, TokenTree
from .facts import PassFacts

#: Prompt lengths (slots 0 and 1) of one trial after the other.
LENGTHS = ((6, 4), (9, 5), (14, 3))
#: Sliding windows and chunks up to this size are outgrown by every trial's first prompt.
LONGEST_WINDOW = {"cpu": 128, "cuda": 8192}


def trial_tree(token: int, vocabulary: int) -> TokenTree:
    """Eight rows with branches at two depths, so that order in the cache and position differ.

    Rows: root 0, its chains 1-2-3 and 4-5, and 6-7 beside 2-3 under 1.
    """
    ids = [(token * (i + 3) + 11 * i + 5) % vocabulary for i in range(9)]
    return _tree(ids, vocabulary, [0, 1, 2, 0, 4, 1, 6])


def _tree(ids: Sequence[int], vocabulary: int, parents: Sequence[int]) -> TokenTree:
    tree = TokenTree(ids[0])
    for row, parent in enumerate(parents, 1):
        token = ids[row]
        while tree.child(parent, token) is not None:
            token = (token + 1) % vocabulary
        tree.add(token, parent, needs_logits=True)
    return tree


def _wrong_tree(tree: TokenTree, vocabulary: int) -> TokenTree:
    """Rows 5 and 7 hang on another parent of the same depth, row 3 is one position off."""
    wrong = _tree(tree.tokens, vocabulary, [0, 1, 2, 0, 1, 1, 2])
    wrong.tokens = list(tree.tokens)
    wrong.depths[3] += 1
    return wrong


#: Rows of ``_wrong_tree`` with a wrong ancestor and at a wrong position.
WRONG_ANCESTOR, WRONG_POSITION = (5, 7), (3,)
#: Rows that a trial accepts: they lie neither side by side nor in place.
PATH = (0, 1, 6, 7)


class Trial:
    """Prompts and trees for one comparison.

    Args:
        facts: of the model.
        number: which of the trials; they differ in tokens and prompt lengths.

    Attributes:
        name: what its right logits are remembered by.
        controls: rows of the wrong tree, by the error that they have.
        strict: largest relative distance in float32 and float64.
    """

    name = "trial"
    controls: tuple[tuple[int, ...], ...] = (WRONG_ANCESTOR, WRONG_POSITION)
    strict = 1e-3

    def __init__(self, facts: PassFacts, number: int, device: str) -> None:
        vocabulary = facts.vocabulary
        self.vocabulary = vocabulary
        generator = torch.Generator().manual_seed(number)
        first, second = LENGTHS[number]
        span = max(facts.kinds.sliding_window, facts.kinds.chunk)
        longest = min(LONGEST_WINDOW.get(device, 8192), facts.max_positions - 16, facts.rope_boundary - 16)
        if span <= longest:
            first = max(first, span + 2)
        low = min(3, vocabulary - 1)  # the first tokens of a vocabulary are often special
        self.prompts = [
            torch.randint(low, vocabulary, (n,), generator=generator).tolist() for n in (first, second)
        ]
        self.trees = [
            [trial_tree(13 + 4 * number + 2 * turn + b, vocabulary) for b in (0, 1)] for turn in (0, 1)
        ]
        self.singles = [(17 + number) % vocabulary, (29 + number) % vocabulary]

    def texts(self) -> list[list[int]]:
        """What each row of logits stands behind, in the order of ``run``."""
        texts = [list(prompt) for prompt in self.prompts]
        found = [list(text) for text in texts]
        for trees in self.trees:
            for b, tree in enumerate(trees):
                found += [texts[b] + tree.path_tokens(node) for node in range(len(tree))]
            texts = [text + [tree.tokens[n] for n in PATH] for text, tree in zip(texts, trees, strict=True)]
        return found + [texts[0] + self.singles[: i + 1] for i in range(len(self.singles))]

    def run(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """The path's logits: (rows, V) as in ``texts``, and (8, V) of the wrong tree in the first turn, slot 0.

        Both sequences share the first turn's pass; in the second turn each has its own.
        """
        prompts = list(enumerate(self.prompts))
        rows = [scores.row(0).float().cpu() for scores in target.prefill(prompts)]
        wrong = _forward(target, [(0, _wrong_tree(self.trees[0][0], self.vocabulary))])
        first, second = (list(enumerate(trees)) for trees in self.trees)
        rows += _forward(target, first)
        target.commit([(slot, PATH) for slot, _ in prompts])
        rows += [row for pair in second for row in _forward(target, [pair])]
        target.commit([(slot, PATH) for slot, _ in prompts])
        for token in self.singles:
            rows += _forward(target, [(0, TokenTree(token))])
            target.commit([(0, [0])])
        for slot, _ in prompts:
            target.release(slot)
        return torch.stack(rows), torch.stack(wrong)

    def causal(self, model: PreTrainedModel, halves: bool = False) -> torch.Tensor:
        """The same rows by the model's own passes: no cache, no mask, short texts padded behind their end.

        Args:
            halves: in two passes, of other widths and row counts than the one.
        """
        texts = [tuple(text) for text in self.texts()]
        longer = {text[:end] for text in texts for end in range(len(text))}
        leaves = sorted(set(texts) - longer, key=lambda leaf: (len(leaf), leaf))
        cuts = [leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]] if halves else [leaves]
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for some in cuts:
            width = max(map(len, some))
            ids = torch.tensor([leaf + leaf[-1:] * (width - len(leaf)) for leaf in some], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
            for text in texts:
                for leaf, row in zip(some, logits, strict=True):
                    if leaf[: len(text)] == text:
                        found[text] = row[len(text) - 1].float().cpu()
        return torch.stack([found[text] for text in texts])


def bit_equal_rows(target: Target) -> tuple[int, int]:
    """(rows of a tree whose logits equal those of one-row steps to the bit, rows), on a target with free slots."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        min(3, target.vocabulary - 1), target.vocabulary, (40,), generator=generator
    ).tolist()
    target.prefill([(0, prompt)])
    tree = (
        trial_tree(13, target.vocabulary) if target.depth_limit(0) >= 3 else TokenTree(13 % target.vocabulary)
    )
    rows, equal = _forward(target, [(0, tree)]), 0
    target.release(0)
    for node, row in enumerate(rows):
        target.prefill([(0, prompt)])
        for token in tree.path_tokens(node):
            (alone,) = _forward(target, [(0, TokenTree(token))])
            target.commit([(0, [0])])
        target.release(0)
        equal += torch.equal(row, alone)
    return equal, len(rows)


def _forward(target: Target, trees: list[tuple[int, TokenTree]]) -> list[torch.Tensor]:
    rows = []
    for scores, (_, tree) in zip(target.forward(trees), trees, strict=True):
        rows += [scores.row(node).float().cpu() for node in tree.needs_logits_nodes()]
    return rows

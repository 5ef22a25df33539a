"""Medusa-1 (Cai et al., 2024, arXiv 2401.10774): heads that predict the next tokens from the last hidden state.

Head k reads h, the hidden state from which the last token was chosen, and predicts the k-th token after it:

    logits_k = L_k (h + silu(W_k h + b_k))

L_k is initialized with the model's output matrix and trained too. Differences from the paper: the heads predict only
the ``SHORTLIST`` most frequent tokens, and the loss is the cross-entropy with the model's own probabilities.

The shape of the tree is fixed. A node is a rank in each head, such as (best of head 1, third of head 2), and the tree
consists of the nodes most often correct on held-out text, as in the paper's section 2.3.3.

    python -m benchmarks.drafters.medusa --text FOLDER --states FOLDER --out build/medusa.safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, silu

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree
from lookahead.learning.head_data import Positions
from lookahead.threads import one_thread

from . import places_in
from .training import half_precision, program

#: Number of heads.
HEADS = 3
#: Number of tokens that the heads can predict.
SHORTLIST = 8192
#: Number of best tokens of each head that the tree may contain.
RANKS = 10
#: Positions of a training step.
BATCH = 1024
#: Highest learning rate.
RATE = 1e-3
#: Weight of a head's loss relative to that of the head before it.
DECAY = 0.8


class Heads(nn.Module):
    """All heads as one module.

    Args:
        output: the model's output rows of the shortlist, (shortlist, hidden).
        count: number of heads.
    """

    def __init__(self, output: torch.Tensor, count: int) -> None:
        super().__init__()
        hidden = output.shape[1]
        self.weight = nn.Parameter(torch.zeros(count, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(count, hidden))
        self.output = nn.Parameter(output.expand(count, *output.shape).clone())

    def forward(self, states: torch.Tensor, head: int) -> torch.Tensor:
        """Logits (n, shortlist) of one head from hidden states (n, hidden)."""
        inner = states + silu(linear(states, self.weight[head], self.bias[head]))
        return linear(inner, self.output[head])


class Medusa:
    """Trained heads and their tree.

    Args:
        heads: the trained heads.
        shortlist: ids of the tokens that they can predict, (shortlist,).
        accuracy: how often each head's token of each rank is correct on held-out text, (heads, RANKS).
    """

    def __init__(self, heads: Heads, shortlist: Any, accuracy: Any) -> None:
        self.heads = heads.requires_grad_(False)
        self.shortlist = shortlist
        self.accuracy = accuracy

    @classmethod
    def load(cls, path: Path) -> Medusa:
        """Load a file written by ``save``."""
        with safe_open(path, "pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        heads = Heads(parts["output"][0].float(), len(parts["output"]))
        heads.load_state_dict({name: parts[name].float() for name in ("weight", "bias", "output")})
        return cls(heads, parts["shortlist"].numpy(), parts["accuracy"].numpy())

    def save(self, path: Path, about: dict[str, Any] | None = None) -> None:
        """Save the heads in bfloat16, with what is said about their training."""
        tensors = {name: value.detach().bfloat16() for name, value in self.heads.named_parameters()}
        tensors |= {name: torch.from_numpy(getattr(self, name)) for name in ("shortlist", "accuracy")}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, {"about": json.dumps(about or {})})

    def best(self, state: Any) -> Any:
        """The best tokens of each head for a hidden state, (heads, RANKS)."""
        row = torch.from_numpy(np.ascontiguousarray(state))[None]
        ranked = [self.heads(row, head).topk(RANKS, -1).indices[0] for head in range(len(self.accuracy))]
        return self.shortlist[torch.stack(ranked).numpy()]

    def tree(self, rows: int) -> list[tuple[int, ...]]:
        """The nodes below the root, each as its ranks in heads 1, 2, ...; parents come before their children.

        A node's value is the product of the accuracies along its path. The node of highest value is added first.
        """
        values: dict[tuple[int, ...], float] = {(): 1.0}
        nodes: list[tuple[int, ...]] = []
        edges: dict[tuple[int, ...], float] = {(rank,): self.accuracy[0][rank] for rank in range(RANKS)}
        while edges and len(nodes) < rows - 1:
            node = max(edges, key=edges.__getitem__)
            values[node] = edges.pop(node)
            nodes.append(node)
            if len(node) < len(self.accuracy):
                edges |= {
                    (*node, rank): values[node] * self.accuracy[len(node)][rank] for rank in range(RANKS)
                }
        return nodes


@dataclass(frozen=True)
class MedusaDrafter(Drafter):
    """Drafts a fixed tree of the heads' predictions.

    Attributes:
        rows: rows of a step, at least 2.
        medusa: the trained heads.
    """

    rows: int
    medusa: Medusa = field(compare=False, repr=False)

    name = "medusa"

    def start(self, sequence: Start) -> DraftState:
        return MedusaState(self, sequence.first)


class MedusaState(DraftState):
    """The last token and the hidden state from which it was chosen."""

    def __init__(self, drafter: MedusaDrafter, first: int) -> None:
        self._medusa = drafter.medusa
        self._last = first
        self._state: Any = None
        self._nodes = drafter.medusa.tree(drafter.rows)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        with one_thread:  # threads that keep polling would slow the next pass down
            return self._tree(max_depth, max_rows)

    def _tree(self, max_depth: int, max_rows: int) -> TokenTree:
        tree = TokenTree(self._last)
        tree.needs_hidden = True
        if self._state is not None:
            tokens = self._medusa.best(self._state)
            for ranks in self._nodes[: max_rows - 1]:
                if len(ranks) <= max_depth:
                    tree.add_candidate(tokens[depth][rank].item() for depth, rank in enumerate(ranks))
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
        self._state = scores.hidden(path[-1])


def train(positions: Positions, embed: Any, output: Any, epochs: float, heads: int = HEADS) -> Medusa:
    """Train heads on a model's own text.

    Args:
        positions: the text and its hidden states.
        embed: not used.
        output: (tokens) -> the model's output rows.
        epochs: number of passes over all positions.
        heads: number of heads.
    """
    # The heads, and the place of each token in the shortlist (-1: not in it).
    torch.manual_seed(0)
    shortlist = positions.frequent(SHORTLIST)
    network = Heads(torch.from_numpy(output(shortlist.tolist())), heads)
    place = places_in(shortlist, positions)

    # A batch consists of runs of 16 consecutive positions.
    starts = positions.runs(16, heads)
    each = BATCH // 16
    steps = math.ceil(epochs * len(starts) / each)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    random = np.random.default_rng(0)
    begin = monotonic()
    shown = 0.0
    for step in range(steps):
        at = (random.choice(starts, each, replace=False)[:, None] + np.arange(16)).ravel()
        states = torch.from_numpy(positions.read(at))
        total = torch.zeros(())
        with half_precision():
            for head in range(heads):
                places = place[positions.ids[at + head + 1]]
                weights = np.where(places >= 0, positions.probabilities[at + head + 1], 0).astype(np.float32)
                logits = network(states, head).float()
                # Cross-entropy with the model's probabilities; tokens outside the shortlist have weight 0.
                chosen = torch.from_numpy(np.maximum(places, 0))
                shares = torch.from_numpy(weights)
                loss = shares.sum(-1) * logits.logsumexp(-1) - (shares * logits.gather(-1, chosen)).sum(-1)
                total = total + DECAY**head * loss.mean()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        optimizer.step()
        schedule.step()
        if monotonic() - shown > 30:
            shown = monotonic()
            left = (steps - step - 1) * (shown - begin) / (step + 1)
            print(
                f"{step + 1} of {steps} steps, loss {float(total.detach()):.3f}, {left / 60:.1f} minutes left",
                flush=True,
            )

    # Count how often each rank of each head is correct on held-out text.
    medusa = Medusa(network, shortlist, np.zeros((heads, RANKS)))
    measured = positions.measured(heads)[:4000]
    for part in np.array_split(measured, 8):
        states = torch.from_numpy(positions.read(part))
        for head in range(heads):
            ranked = shortlist[network(states, head).topk(RANKS, -1).indices.numpy()]
            medusa.accuracy[head] += (ranked == positions.ids[part + head + 1][:, :1]).sum(0) / len(measured)
    return medusa


def main() -> None:
    medusa = program(__doc__, Path("build/medusa.safetensors"), train)
    print(f"accuracy by rank: {medusa.accuracy[:, :4].round(3).tolist()}")


if __name__ == "__main__":
    main()

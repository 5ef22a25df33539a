"""An EAGLE-style head (Li et al., 2024, arXiv 2401.15077): one decoder layer that predicts hidden states.

At each position, the layer reads the embedding of the position's token and the hidden state from which that token was
chosen. It attends to the earlier positions and predicts the next hidden state. The model's own output rows turn this
state into logits, and the state is the input of the next position:

    x_i = W [h_i; e(y_i)],    g_i = layer(x_1 ... x_i),    logits_i = output rows * g_i

Differences from EAGLE-1: the layer sees only the completion, because a prefill does not return the prompt's hidden
states; it predicts only the ``SHORTLIST`` most frequent tokens; and the loss is the cross-entropy with the model's
probabilities, on true states and on predicted ones. The shape of the tree is fixed (``static_tree.SHAPES``).

    python -m benchmarks.drafters.eagle --text FOLDER --states FOLDER --out build/eagle.safetensors
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
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree
from lookahead.learning.head_data import Positions
from lookahead.model import Model
from lookahead.threads import one_thread

from . import places_in
from .static_tree import SHAPES
from .training import half_precision, program

#: Size of an attention head.
HEAD_SIZE = 64
#: Inner size of the feed-forward part.
INNER = 1024
#: Number of tokens that the layer can predict.
SHORTLIST = 8192
#: Texts of a training step.
BATCH = 8
#: Positions of each text in a training step.
LENGTH = 128
#: Highest learning rate.
RATE = 2e-3


class Layer(nn.Module):
    """The decoder layer.

    Args:
        hidden: size of a hidden state, a multiple of ``HEAD_SIZE``.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = {"fuse": (hidden, 2 * hidden), "qkv": (3 * hidden, hidden), "merge": (hidden, hidden)}
        sizes |= {"gate": (INNER, hidden), "up": (INNER, hidden), "down": (hidden, INNER)}
        self.hidden = hidden
        self.weights = nn.ParameterDict()
        for name, (rows, columns) in sizes.items():
            small = 0.02 if name in ("merge", "down") else 1.0
            self.weights[name] = nn.Parameter(torch.randn(rows, columns) * small * columns**-0.5)
        self.norms = nn.Parameter(torch.ones(4, hidden))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, past: Any, mask: Any
    ) -> tuple[torch.Tensor, Any]:
        """(predicted states, keys and values of all rows including ``past``).

        Args:
            states, embedded: (B, n, hidden).
            positions: positions of the rows, (n,).
            past: keys and values of earlier rows, each (B, heads, m, ``HEAD_SIZE``), or None.
            mask: (n, m + n), true where a row attends to a column.
        """
        w = self.weights
        size = (self.hidden,)
        both = torch.cat([rms_norm(states, size, self.norms[0]), rms_norm(embedded, size, self.norms[1])], -1)
        x = states + linear(both, w["fuse"])
        heads = linear(rms_norm(x, size, self.norms[2]), w["qkv"]).unflatten(-1, (3, -1, HEAD_SIZE))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = (_rotated(part, positions) for part in (query, key))
        if past is not None:
            key = torch.cat([past[0], key], 2)
            value = torch.cat([past[1], value], 2)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + linear(seen.transpose(1, 2).flatten(2), w["merge"])
        z = rms_norm(x, size, self.norms[3])
        return x + linear(silu(linear(z, w["gate"])) * linear(z, w["up"]), w["down"]), (key, value)


def _rotated(part: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, heads, n, ``HEAD_SIZE``)."""
    half = HEAD_SIZE // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    a = part[..., :half]
    b = part[..., half:]
    rotated = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
    return rotated.to(part.dtype)


class Eagle:
    """A trained layer with the model's own embeddings and output rows.

    Args:
        layer: the trained layer.
        shortlist: ids of the tokens that it can predict, (shortlist,).
        embed, output: (tokens) -> the model's embeddings and output rows, fp32 (n, hidden).
    """

    def __init__(self, layer: Layer, shortlist: Any, embed: Any, output: Any) -> None:
        self.layer = layer.requires_grad_(False)
        self.shortlist = shortlist
        self._embed = embed
        self._output = torch.from_numpy(output(shortlist.tolist()))

    @classmethod
    def load(cls, path: Path, model: Model) -> Eagle:
        """Load a file written by ``save``."""
        with safe_open(path, "pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shortlist = parts.pop("shortlist").numpy()
        layer = Layer(parts["norms"].shape[1])
        layer.load_state_dict({name: part.float() for name, part in parts.items()})
        rows = model.head_parts()
        return cls(layer, shortlist, rows.embed, rows.output)

    def save(self, path: Path, about: dict[str, Any] | None = None) -> None:
        """Save the layer in bfloat16, with what is said about its training."""
        tensors = {name: value.detach().bfloat16() for name, value in self.layer.state_dict().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors["shortlist"] = torch.from_numpy(self.shortlist)
        save_file(tensors, path, {"about": json.dumps(about or {})})

    def embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embeddings of tokens, (1, n, hidden)."""
        return torch.from_numpy(self._embed(tokens))[None]

    def best(self, guessed: torch.Tensor, width: int) -> list[list[int]]:
        """The best tokens for each predicted state (n, hidden)."""
        places = linear(guessed, self._output).topk(width, -1).indices.numpy()
        tokens: list[list[int]] = self.shortlist[places].tolist()
        return tokens


@dataclass(frozen=True)
class EagleDrafter(Drafter):
    """Drafts a fixed tree of the layer's predictions.

    Attributes:
        rows: rows of a step, a key of ``SHAPES``.
        eagle: the trained layer.
    """

    rows: int
    eagle: Eagle = field(compare=False, repr=False)

    name = "eagle"

    def start(self, sequence: Start) -> DraftState:
        return EagleState(self.eagle, SHAPES[self.rows], sequence.first)


class EagleState(DraftState):
    """Keys and values of accepted positions, and the positions that the layer has not read yet."""

    def __init__(self, eagle: Eagle, widths: tuple[int, ...], first: int) -> None:
        self._eagle = eagle
        self._widths = widths
        self._last = first
        self._past: Any = None
        self._unread: list[tuple[int, Any]] = []  # tokens, and the states from which they were chosen

    def _read(self) -> torch.Tensor:
        """Read the accepted positions. Returns the state predicted at the last one, (1, hidden)."""
        begin = 0 if self._past is None else self._past[0].shape[2]
        count = len(self._unread)
        mask = torch.ones(count, begin + count, dtype=torch.bool).tril(begin)
        states = torch.from_numpy(np.stack([state for _, state in self._unread]))[None]
        embedded = self._eagle.embedded([token for token, _ in self._unread])
        positions = torch.arange(begin, begin + count)
        guessed, self._past = self._eagle.layer(states, embedded, positions, self._past, mask)
        self._unread = []
        return guessed[0, -1:]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        with one_thread:  # threads that keep polling would slow the next pass down
            return self._tree(max_depth, max_rows)

    def _tree(self, max_depth: int, max_rows: int) -> TokenTree:
        tree = TokenTree(self._last)
        tree.needs_hidden = True
        if not self._unread or not max_depth:
            return tree
        guessed = self._read()
        nodes = [0]
        past = self._past
        begin = past[0].shape[2]
        seen = torch.ones(1, begin, dtype=torch.bool)  # the columns that each node of this depth attends to
        for depth, width in enumerate(self._widths[:max_depth]):
            following = [
                (index, tree.add(token, node, needs_logits=True))
                for index, (node, best) in enumerate(
                    zip(nodes, self._eagle.best(guessed, width), strict=True)
                )
                for token in best
                if len(tree) < max_rows
            ]
            if depth + 1 == len(self._widths) or not following:
                break
            # Predict the states of the new nodes; each attends to its ancestors and itself.
            parents = [index for index, _ in following]
            nodes = [node for _, node in following]
            seen = torch.cat([seen[parents], torch.eye(len(nodes), dtype=torch.bool)], 1)
            embedded = self._eagle.embedded([tree.tokens[node] for node in nodes])
            positions = torch.full((len(nodes),), begin + depth)
            out, past = self._eagle.layer(guessed[parents][None], embedded, positions, past, seen)
            guessed = out[0]
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._unread += [(token, scores.hidden(node)) for node, token in zip(path, tokens, strict=False)]
        self._last = tokens[-1]


def train(positions: Positions, embed: Any, output: Any, epochs: float) -> Eagle:
    """Train a layer on a model's own text.

    Args:
        positions: the text and its hidden states.
        embed, output: (tokens) -> the model's embeddings and output rows.
        epochs: number of training steps, in passes over the texts. Texts are drawn at random, and a step reads
            ``LENGTH`` consecutive positions of each of its texts.
    """
    # The layer, and the place of each token in the shortlist (-1: not in it).
    torch.manual_seed(0)
    shortlist = positions.frequent(SHORTLIST)
    rows = torch.from_numpy(output(shortlist.tolist()))
    place = places_in(shortlist, positions)
    layer = Layer(rows.shape[1])

    # Train on pieces of equal length, which need no padding.
    bounds = positions.bounds[~positions.held_out]
    bounds = bounds[bounds[:, 1] - bounds[:, 0] > LENGTH]
    steps = math.ceil(epochs * len(bounds) / BATCH)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    random = np.random.default_rng(0)
    begin = monotonic()
    shown = 0.0
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for step in range(steps):
        # States, tokens and the model's probabilities of a batch.
        some = bounds[random.choice(len(bounds), BATCH, replace=False)]
        starts = [random.integers(first, last - LENGTH) for first, last in some]
        at = np.array(starts)[:, None] + np.arange(LENGTH)
        places = place[positions.ids[at + 1]]
        weights = torch.from_numpy(
            np.where(places >= 0, positions.probabilities[at + 1], 0).astype(np.float32)
        )
        states = torch.from_numpy(positions.read(at))
        embedded = torch.from_numpy(embed(positions.tokens[at].ravel().tolist())).view_as(states)
        with half_precision():
            guessed, _ = layer(states, embedded, torch.arange(LENGTH), None, mask)
            # Train on predicted states too, because the layer reads them below depth 1.
            further, _ = layer(
                guessed[:2, :-1].float(), embedded[:2, 1:], torch.arange(LENGTH - 1), None, mask[1:, 1:]
            )
            total = torch.zeros(())
            for guess, one, share, factor in (
                (guessed, places, weights, 1.0),
                (further, places[:2, 1:], weights[:2, 1:], 0.5),
            ):
                logits = linear(guess, rows).float() * layer.log_scale.exp()
                chosen = logits.gather(-1, torch.from_numpy(np.maximum(one, 0)))
                loss = share.sum(-1) * logits.logsumexp(-1) - (share * chosen).sum(-1)
                total = total + factor * loss.mean()

        # Update the weights, and report progress every 30 seconds.
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if monotonic() - shown > 30:
            shown = monotonic()
            left = (steps - step - 1) * (shown - begin) / (step + 1)
            print(
                f"{step + 1} of {steps} steps, loss {float(total.detach()):.3f}, {left / 60:.1f} minutes left",
                flush=True,
            )
    return Eagle(layer, shortlist, embed, output)


def main() -> None:
    program(__doc__, Path("build/eagle.safetensors"), train)


if __name__ == "__main__":
    main()

"""A light head (``drafters.adaptive.sources.head_file``) in torch, for training and for drafting on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from ..drafters.adaptive.sources.head_file import HeadWeights

EPSILON = 1e-6
#: Initial standard deviation of ``down``, so small that the untrained head predicts the hidden state itself.
FIRST_DEVIATION = 1e-3


class HeadNetwork(nn.Module):
    """The trained part: h' = h + down(silu(gate z) * up z), z = [norm(h); norm(e)].

    Its matrices are empty until ``reset_parameters`` or ``of`` fills them.

    Args:
        hidden, width: sizes of a hidden state and of the block.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Parameter(torch.empty(width, 2 * hidden))
        self.up = nn.Parameter(torch.empty(width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(hidden, width))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def reset_parameters(self) -> None:
        """Draw the matrices with which training begins, from torch's generator."""
        for weight in (self.gate, self.up):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.down, std=FIRST_DEVIATION)

    def forward(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The predicted hidden states (..., hidden) under the next tokens."""
        size = self.hidden_norm.shape
        h = rms_norm(states, size, self.hidden_norm, EPSILON)
        e = rms_norm(embedded, size, self.embedding_norm, EPSILON)
        z = torch.cat((h, e), -1)
        return states + linear(silu(linear(z, self.gate)) * linear(z, self.up), self.down)

    def arrays(self) -> dict[str, Any]:
        """The fields of ``HeadWeights`` that are trained."""
        arrays: dict[str, Any] = {
            name: value.detach().float().cpu().numpy() for name, value in self.named_parameters()
        }
        return arrays | {
            "scale": float(np.exp(arrays.pop("log_scale"))),
            "hidden": len(arrays["hidden_norm"]),
        }

    @classmethod
    def of(cls, weights: HeadWeights) -> HeadNetwork:
        """A network with these weights. It draws no random numbers, which would change sampled texts."""
        network = cls(weights.hidden, weights.width)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                value = np.log(weights.scale) if name == "log_scale" else getattr(weights, name)
                parameter.copy_(torch.as_tensor(value))
        return network


class TorchHead:
    """A light head on the device of its model; the reference of ``cpu.compiled_head.CompiledHead``.

    Args:
        weights: the head.
        output: the model's output rows of the shortlist, (S, hidden).
        embed: (tokens) -> their embeddings, (n, hidden), on the same device.
    """

    def __init__(
        self, weights: HeadWeights, output: torch.Tensor, embed: Callable[[Sequence[int]], torch.Tensor]
    ) -> None:
        self.hidden = weights.hidden
        self.levels = weights.levels
        self.shortlist = weights.shortlist
        self.counts = weights.counts
        self.cost = 0.0
        self._network = HeadNetwork.of(weights).to(output.device, output.dtype).requires_grad_(False)
        self._output = output
        self._scale = weights.scale
        self._embed = embed

    def guess(
        self, states: np.ndarray[Any, Any], tokens: Sequence[int], k: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """As ``CompiledHead.guess``."""
        with torch.no_grad():
            here = torch.from_numpy(np.ascontiguousarray(states)).to(self._output.device, self._output.dtype)
            guessed = self._network(here, self._embed(tokens))
            logits = linear(guessed, self._output).float() * self._scale
            values, places = logits.log_softmax(-1).topk(min(k, len(self.shortlist)), dim=-1)
            return guessed.float().cpu().numpy(), self.shortlist[places.cpu().numpy()], values.cpu().numpy()

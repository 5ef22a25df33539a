"""Rows of logits as tensors."""

import torch


def row_of(scores, node):
    """The logits (V,) under a node, whichever engine evaluated them."""
    return torch.as_tensor(scores.row(node))

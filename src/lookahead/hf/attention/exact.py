"""Attention whose sums depend only on absolute positions, so a row is bit-identical in a tree, in a batch or alone.

A row at position p sees keys at positions 0 .. p, in two parts of fixed shape with a boundary that depends only on p:

- keys before B(p) = max(0, p - ``DEPTH``), in pages of ``PAGE`` columns, read in place. Trees are at most ``DEPTH``
  deep, so all these keys are committed, and a key's column is its position;
- keys from B(p) on, at most ``WINDOW``, gathered in the order of the row's path: committed columns, then the row's
  ancestors from the root down, and the row itself.

Example: T = 600 tokens, a row at depth 2, so p = 602 and B(p) = 571. Its pages are columns 0 .. 255, 256 .. 511 and
512 .. 767 (of which it sees 512 .. 570), and its window is columns 571 .. 599, its two ancestors and itself: 32 keys.
In plain decoding the same row would gather the same 32 keys from columns 571 .. 602.

The running softmax (Milakov and Gimelshein, 2018) processes the window first and then the pages. A page in which a
row sees nothing does not change the row's bits. All other operations have fixed shapes and must treat their rows
alike; ``hf.exact_mode.depends_on_others`` checks this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Maximum depth of a tree.
DEPTH = 31
#: Maximum number of keys from B(p) to p.
WINDOW = DEPTH + 1
#: Columns evaluated at once; the capacity of a cache is a multiple of this.
PAGE = 256


def boundary(position: int) -> int:
    """B(p)."""
    return max(0, position - DEPTH)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    columns: torch.Tensor,
    pages: Sequence[tuple[int, int]],
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows of any sequences in one flat step; options as described in the package.

    Args:
        query: (1, H, R, D).
        key, value: the whole cache, (S, Hkv, C, D) and (S, Hkv, C, Dv).
        slots, positions: each row's slot and position, both (R,).
        counts: keys in each row's window, (R,).
        columns: columns of the keys in each row's window, (R, WINDOW); entries after the count are ignored.
        pages: (slot, number of pages) for every slot with rows whose B(p) is above 0.

    Returns:
        (1, H, R, Dv) in the query's dtype; sums are in float32 at least.
    """
    _, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    device = query.device
    q = query[0].to(wide).view(kv_heads, group, rows, size).permute(2, 0, 1, 3).contiguous()
    q *= scale if scale is not None else size**-0.5
    begin = (positions - DEPTH).clamp(min=0)
    per_row = slots[:, None, None]
    every_head = torch.arange(kv_heads, device=device)[None, :, None]

    def masked(scores: torch.Tensor, seen: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Scores (R, Hkv, G, n) of keys at positions (R, n), -inf where they are not seen."""
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            seen = seen & (positions[:, None] - at < window)
        return scores.masked_fill(~seen[:, None, None], float("-inf"))

    # The window of each row.
    place = torch.arange(WINDOW, device=device)
    gathered = key[per_row, every_head, columns[:, None]].to(wide)  # (R, Hkv, WINDOW, D)
    scores = masked(q @ gathered.transpose(2, 3), place < counts[:, None], begin[:, None] + place)
    best = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - best)
    total = weights.sum(-1, keepdim=True)
    acc = weights @ value[per_row, every_head, columns[:, None]].to(wide)

    # The pages before it. Grouped heads become rows of one head, so a page is read once.
    folded = q.transpose(0, 1).reshape(kv_heads, rows * group, size)
    for slot, number in pages:
        for page in range(number):
            part = slice(page * PAGE, (page + 1) * PAGE)
            at = torch.arange(part.start, part.stop, device=device)[None]
            seen = (at < begin[:, None]) & (slots == slot)[:, None]
            scores = folded @ key[slot, :, part].to(wide).transpose(1, 2)
            scores = masked(scores.view(kv_heads, rows, group, PAGE).transpose(0, 1), seen, at)
            new = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - new), torch.exp(best - new)
            flat = weights.transpose(0, 1).reshape(kv_heads, rows * group, PAGE)
            values = (flat @ value[slot, :, part].to(wide)).view(kv_heads, rows, group, -1).transpose(0, 1)
            # A row that sees no key of the page adds no value of it, even if another sequence's values are NaN.
            values = values.masked_fill(~seen.any(1)[:, None, None, None], -0.0)
            best, total, acc = new, total * shrink + weights.sum(-1, keepdim=True), acc * shrink + values
    if sinks is not None:
        sink = sinks.to(wide).view(1, kv_heads, group, 1)
        new = torch.maximum(best, sink)
        total, acc = total * torch.exp(best - new) + torch.exp(sink - new), acc * torch.exp(best - new)
    out = (acc / total).to(query.dtype)  # (R, Hkv, G, Dv)
    return out.permute(1, 2, 0, 3).reshape(1, heads, rows, -1)

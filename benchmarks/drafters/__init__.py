"""Trained and retrieval-based drafters in their smallest form, to compare with this library's own at equal rows.

They only propose. This library's decoding loop verifies, so the output equals plain decoding, as with any drafter.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def places_in(shortlist: Any, positions: Any) -> Any:
    """The index in a shortlist of each token of the text (``head_data.Positions``), by token; -1: not in it.

    A sampled token may have a larger id than all best tokens.
    """
    places = np.full(1 + max(int(positions.ids.max()), int(positions.tokens.max())), -1)
    places[shortlist] = np.arange(len(shortlist))
    return places

"""The check at load: does llama.cpp compute the same logits for the rows of a token tree as for a chain?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..core.errors import summary
from ..equivalence import (
    MAX_ROW_FACTOR,
    PROMPT_LENGTHS,
    TOLERANCE,
    Array,
    Equivalence,
    Reference,
    Trial,
    compare,
    distance,
    single_rows,
)
from ..model import NO_LIMIT
from .contexts import Contexts
from .library import Context, EngineFailed
from .target import LlamaCppTarget

#: The first prompt of every trial exceeds sliding windows up to this size.
LONGEST_WINDOW = 128


def check(contexts: Contexts) -> tuple[bool, str, Equivalence | None]:
    """Compare rows of token trees with llama.cpp's own causal passes.

    Returns:
        whether trees may be evaluated, the figures in one line, and the comparison.

    Raises:
        SettingsError, OutOfMemory: no context can be created.
    """
    weights = contexts.weights
    if not weights.trees:
        return False, "its recurrent state cannot be truncated", None
    window = (
        weights.window if weights.window <= min(LONGEST_WINDOW, (weights.positions or NO_LIMIT) - 16) else 0
    )
    # llama.cpp rejects rows at a wrong position.
    trials = (
        Trial(weights.vocabulary, number, window, positions=False) for number in range(len(PROMPT_LENGTHS))
    )
    try:
        found = compare(lambda: LlamaCppTarget(contexts), trials, partial(_reference, contexts))
    except EngineFailed as error:
        return False, f"it cannot evaluate a token tree ({summary(error)})", None
    return found.ok, found.reason, found


def _reference(contexts: Contexts, trial: Trial) -> Reference:
    """Causal passes over the same tokens. Their error is their distance from single-row steps over the longest
    sequence, and at least what float32 allows."""
    texts = trial.texts()
    rows = _causal_rows(contexts, texts)
    start = len(trial.prompts[0])
    text = texts[-1]
    single = single_rows(LlamaCppTarget(contexts), text[:start], text[start:])
    own = distance(single, rows[[texts.index(text[:end]) for end in range(start, len(text) + 1)]])
    return Reference(rows, np.full(len(rows), max(float(own.max()), TOLERANCE / MAX_ROW_FACTOR)))


def _causal_rows(contexts: Contexts, texts: Sequence[tuple[int, ...]]) -> Array:
    """The logits after each sequence, (sequences, V), from one pass in which every row belongs to a single
    sequence."""
    ends = set(texts)
    prefixes = {text[:end] for text in ends for end in range(len(text))}
    tokens = list[int]()
    positions = list[int]()
    sequences = list[list[int]]()
    wanted = list[bool]()
    read = dict[tuple[int, ...], int]()
    for sequence, whole in enumerate(sorted(ends - prefixes)):
        for end in range(1, len(whole) + 1):
            text = whole[:end]
            wanted.append(text in ends and text not in read)
            if wanted[-1]:
                read[text] = len(read)
            tokens.append(text[-1])
            positions.append(end - 1)
            sequences.append([sequence])
    lease = contexts.lease()
    if len(tokens) > lease.context.cells:
        lease.context.close()
        lease.context = Context(contexts.weights, len(tokens))
    try:
        rows = lease.context.decode(tokens, positions, sequences, wanted).copy()
    finally:
        lease.end()
    return rows[[read[text] for text in texts]]

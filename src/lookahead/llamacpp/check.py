"""The check at load: does llama.cpp compute the same logits for the rows of a token tree as for a chain?"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..core import TokenTree
from ..core.errors import summary
from ..hf.equivalence import (
    CONTROL_MARGIN,
    MAX_ROW_FACTOR,
    PROMPT_LENGTHS,
    WRONG_ANCESTOR,
    Trial,
    distance,
)
from ..hf.masks import LayerKinds
from ..limits import NO_LIMIT, Equivalence
from .contexts import Contexts
from .library import Context, EngineFailed
from .target import LlamaCppTarget


def check(contexts: Contexts) -> tuple[bool, str, Equivalence | None]:
    """Compare rows of token trees with llama.cpp's own causal passes.

    Returns:
        whether trees may be evaluated, the figures in one line, and the comparison.

    Raises:
        SettingsError, OutOfMemory: no context can be created.
    """
    if not contexts.weights.trees:
        return False, "its recurrent state cannot be truncated", None
    try:
        # More than one prompt, because for a single one the control's error may be small by chance.
        for number in range(len(PROMPT_LENGTHS)):
            comparison = compare(contexts, number)
            if comparison.ok:
                break
    except EngineFailed as error:
        return False, f"it cannot evaluate a token tree ({summary(error)})", None
    return comparison.ok, comparison.reason, comparison


class AncestorTrial(Trial):
    """A trial whose negative control has no wrong position, because llama.cpp rejects rows out of order."""

    controls = (WRONG_ANCESTOR,)

    def control_tree(self) -> TokenTree:
        tree = super().control_tree()
        tree.depths[3] -= 1
        return tree


def compare(contexts: Contexts, number: int = 0) -> Equivalence:
    """Compare a trial's trees with causal passes over the same tokens, and these passes with single-row steps.

    The second difference is llama.cpp's own rounding error; a tree's rows may differ by a multiple of it.
    """
    facts: Any = SimpleNamespace(
        vocabulary=contexts.weights.vocabulary,
        max_positions=contexts.weights.positions or NO_LIMIT,
        rope_boundary=NO_LIMIT,
        kinds=LayerKinds((), contexts.weights.window, 0),
    )
    # llama.cpp's own passes: causal rows, and single-row steps over the longest sequence.
    trial = AncestorTrial(facts, number, "cpu")
    texts = trial.texts()
    reference = _causal_rows(contexts, texts)
    longest = max(range(len(texts)), key=lambda row: len(texts[row]))
    rows = [row for row, text in enumerate(texts) if texts[longest][: len(text)] == text]
    single = _single_rows(contexts, texts[longest], [len(texts[row]) for row in rows])
    own = distance(single, reference[rows])
    noise = float(own.max())
    same = sum(torch.equal(a, b) for a, b in zip(single, reference[rows], strict=True))
    # The trees, and the negative control.
    limit = max(Trial.tolerance, MAX_ROW_FACTOR * noise)
    logits, control_logits = trial.run(LlamaCppTarget(contexts))
    difference = float(distance(logits, reference).max())
    control = trial.control_error(control_logits, reference, torch.ones(len(reference)))
    ok = difference <= limit and control >= CONTROL_MARGIN * difference
    reason = (
        f"difference {difference:.2g}, {limit:.2g} allowed; llama.cpp's own passes differ by {noise:.2g} from "
        f"single-row steps, {same} of {len(rows)} rows are bit-identical; a wrong ancestor shows as {control:.2g}"
    )
    return Equivalence(ok, difference, control, limit, noise, reason)


def _causal_rows(contexts: Contexts, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits after each sequence, (sequences, V), from one pass in which every row belongs to a single
    sequence."""
    ends = {tuple(text) for text in texts}
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
        rows = torch.from_numpy(lease.context.decode(tokens, positions, sequences, wanted).copy())
    finally:
        lease.end()
    return rows[[read[tuple(text)] for text in texts]]


def _single_rows(contexts: Contexts, text: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    target = LlamaCppTarget(contexts)
    prompt = text[: lengths[0]]
    rows = [target.prefill([(0, prompt)])[0].row(0)]
    for token in text[lengths[0] :]:
        rows.append(target.forward([(0, TokenTree(token))])[0].row(0))
        target.commit([(0, [0])])
    target.release(0)
    return torch.stack([rows[length - lengths[0]] for length in lengths])

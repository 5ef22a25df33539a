"""Token trees on llama.cpp, as one batch in which every leaf is a sequence.

In llama.cpp, each row has sequence ids. A row sees the cells that have its first id, up to its own position. So each
leaf of a tree gets an id, a row has the ids of all leaves below it, and the committed rows of a slot have the ids of
all its leaves. For the tree in ``core.loop`` (T = 5):

    row       token  position   ids
    (cells)   0..4      0..4    0 1 2      the committed tokens
     0        mat         5     0 1 2
     1        .           6     0 1
     2        and         6     2
     3        It          7     0
     4        The         7     1
     5        then        7     2

A slot keeps its ids from step to step. One of them, ``base``, has all committed tokens. The others had all of them
when they were last used, and get the missing tokens on their next use. Committing [0, 1, 3] makes id 0 the base, and
truncates id 1 to 7 tokens and id 2 to 6. No keys move, and a single-row step needs none of this.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ..core import OutOfMemory, SettingsError, Target, TokenTree
from ..core.target import UP_TO_ROUNDING
from ..model import NO_LIMIT
from ..sampling.scores import Logits, LogitsRows
from .contexts import Contexts
from .library import Context


@dataclass(slots=True)
class Slot:
    """The state of one sequence in llama.cpp.

    Attributes:
        base: the id that has all committed tokens.
        known: number of committed tokens by id.
        length: T.
        pending: the ids of each row of the last tree; None if it has been committed.
    """

    base: int
    known: dict[int, int]
    length: int = 0
    pending: list[list[int]] | None = None


class LlamaCppTarget(Target):
    """Any number of sequences on one llama.cpp context. Only one thread at a time may use it.

    Args:
        contexts: the contexts of the model loaded by llama.cpp.
        reason: why this path was chosen, in one line.
    """

    path = "llama.cpp"
    guarantee = UP_TO_ROUNDING

    def __init__(self, contexts: Contexts, reason: str = "") -> None:
        self.reason = reason
        self._weights = contexts.weights
        self.vocabulary = self._weights.vocabulary
        self._max_positions = self._weights.positions or NO_LIMIT
        self._lease = contexts.lease()
        # Not at exit, where finalizers run newest first, so a larger context would be freed before its lease ends.
        weakref.finalize(self, self._lease.end).atexit = False
        self.max_sequences = self._weights.sequences
        self._free = list(range(self.max_sequences))[::-1]
        self._slots: dict[int, Slot] = {}
        self._last: weakref.ref[Logits] | None = None

    @property
    def _context(self) -> Context:
        return self._lease.context

    def depth_limit(self, slot: int) -> int:
        """Positions left up to the model's last one; 0 if llama.cpp cannot truncate its memory."""
        return self.positions_left(slot) if self._weights.trees else 0

    def positions_left(self, slot: int) -> int:
        """Positions left up to the model's last one."""
        return max(0, self._max_positions - 1 - self._slots[slot].length)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[LogitsRows]:
        """Evaluate prompts sequentially; llama.cpp divides long ones into batches."""
        scores = []
        for slot, prompt in prompts:
            self.release(slot)
            self._make_room(len(prompt))
            base = self._take_ids(1, set())[0]
            held = self._slots[slot] = Slot(base, {base: 0})
            wanted = [False] * (len(prompt) - 1) + [True]
            try:
                logits = self._decode(prompt, range(len(prompt)), [[base]] * len(prompt), wanted)
            except Exception:
                self.release(slot)
                raise
            held.length = held.known[base] = len(prompt)
            scores.append(LogitsRows(logits, nodes=[0]))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[LogitsRows]:
        """Evaluate all trees in one batch, or in several if there are too many rows."""
        for slot, _ in trees:
            self._drop_pending(self._slots[slot])
        self._make_room(sum(len(tree) for _, tree in trees))
        if len(trees) == 1 and len(trees[0][1]) == 1:
            return [self._plain_step(self._slots[trees[0][0]], trees[0][1].tokens[0])]
        # Concatenate the rows of all trees. The rows of a tree are pending until a commit.
        tokens, positions = list[int](), list[int]()
        sequences = list[list[int]]()
        wanted = list[bool]()
        parts = []
        used = set[int]()
        start = 0
        for slot, tree in trees:
            held = self._slots[slot]
            ids = self._ids_of_rows(held, tree, used)
            nodes = tree.needs_logits_nodes()
            parts.append((start, nodes))
            start += len(nodes)
            sequences += ids
            tokens += tree.tokens
            positions += [held.length + depth for depth in tree.depths]
            wanted += tree.needs_logits
            held.pending = ids
        try:
            logits = self._decode(tokens, positions, sequences, wanted)
        except Exception:
            for slot, _ in trees:
                self._drop_pending(self._slots[slot])
            raise
        return [LogitsRows(logits, start, nodes) for start, nodes in parts]

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the rows of each slot's path. The ids of its last row keep the whole path, other ids the rows they
        share."""
        for slot, path in paths:
            held = self._slots[slot]
            assert held.pending is not None
            if len(held.pending) == 1:  # plain decoding needs nothing else
                held.length += 1
                held.known[held.base] = held.length
                held.pending = None
                continue
            self._keep(held, Counter(chain.from_iterable(held.pending[node] for node in path)))
            held.base = held.pending[path[-1]][0]
            held.length += len(path)
            held.pending = None

    def release(self, slot: int) -> None:
        """Forget a sequence and free its cells."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._context.empty(held.known)
            self._free += held.known

    def _decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> Logits:
        self._detach()
        return self._logits(self._context.decode(tokens, positions, sequences, wanted))

    def _plain_step(self, held: Slot, token: int) -> LogitsRows:
        """``forward`` of one row."""
        self._detach()
        held.pending = [[held.base]]
        try:
            rows = self._context.decode_one(token, held.length, held.base)
        except Exception:
            self._drop_pending(held)
            raise
        return LogitsRows(self._logits(rows), nodes=[0])

    def _detach(self) -> None:
        """Copy the logits of the last pass if they are still in use, because the next pass overwrites them."""
        last = self._last() if self._last is not None else None
        if last is not None:
            last.detach()

    def _logits(self, rows: np.ndarray[Any, np.dtype[np.float32]]) -> Logits:
        logits = Logits(rows)
        self._last = weakref.ref(logits)
        return logits

    def _ids_of_rows(self, held: Slot, tree: TokenTree, used: set[int]) -> list[list[int]]:
        """The ids of each row of a tree, which are those of all leaves below it. Adds them to ``used``, this pass's
        ids."""
        if len(tree) == 1:
            used.add(held.base)
            return [[held.base]]
        parents = tree.parents
        # One id per leaf: the base, the slot's other ids, then new ones.
        leaves = sorted(set(range(len(tree))).difference(parents))
        ids = [held.base]
        used.add(held.base)
        own = sorted(held.known.keys() - {held.base}, key=held.known.__getitem__, reverse=True)
        ids += own[: len(leaves) - 1]
        used.update(ids)
        for sequence in self._take_ids(len(leaves) - len(ids), used):
            held.known[sequence] = 0
            ids.append(sequence)
            used.add(sequence)
        for sequence in ids[1:]:
            self._complete(held, sequence)
        # A row gets the ids of all leaves below it.
        rows: list[list[int]] = [[] for _ in parents]
        for sequence, node in zip(ids, leaves, strict=True):
            while node >= 0:
                rows[node].append(sequence)
                node = parents[node]
        return rows

    def _complete(self, held: Slot, sequence: int) -> None:
        """Give an id the committed tokens of its slot that it lacks."""
        context = self._context
        known = held.known[sequence]
        if self._weights.window and context.first(sequence) != context.first(held.base):
            context.empty([sequence])  # one of the two has dropped tokens before its window
            known = 0
        if known < held.length:
            context.copy(held.base, sequence, known, held.length)
            held.known[sequence] = held.length

    def _take_ids(self, count: int, used: set[int]) -> list[int]:
        """Unused ids: free ones, then those that slots keep for wider trees.

        Raises:
            SettingsError: there are too few for a new slot.
            OutOfMemory: there are too few for a tree.
        """
        for held in self._slots.values() if count > len(self._free) else ():
            if held.pending is None:
                for sequence in held.known.keys() - used - {held.base}:
                    del held.known[sequence]
                    self._context.empty([sequence])
                    self._free.append(sequence)
        if count > len(self._free):
            most = self._weights.sequences
            if not used:
                raise SettingsError(
                    f"llama.cpp decodes at most {most} sequences of this model at once, and {most} are running; "
                    "wait until one has ended, or run fewer at once"
                )
            raise OutOfMemory(f"the trees of a step need more than the {most} sequences of llama.cpp")
        return [self._free.pop() for _ in range(count)]

    def _keep(self, held: Slot, shared: Mapping[int, int]) -> None:
        """Truncate each id of a slot's last tree to the committed tokens and its ``shared`` first rows."""
        assert held.pending is not None
        for sequence, rows in Counter(chain.from_iterable(held.pending)).items():
            kept = shared[sequence]
            if rows > kept:
                self._context.cut(sequence, held.length + kept)
            held.known[sequence] = held.length + kept

    def _drop_pending(self, held: Slot) -> None:
        """Drop the rows of a tree that was not committed."""
        if held.pending is not None:
            self._keep(held, Counter())
            held.pending = None

    def _make_room(self, rows: int) -> None:
        """Ensure room for this many rows beyond the committed ones, in a larger context if necessary."""
        filled = sum(held.length + len(held.pending or ()) for held in self._slots.values())
        old = self._context
        if filled + rows <= old.cells:
            return
        cells = old.cells
        while cells < filled + rows:
            cells *= 2
        new = Context(self._weights, cells)
        for held in self._slots.values():
            self._drop_pending(held)
            new.write(held.base, old.read(held.base))
            held.known = {held.base: held.length}
        self._detach()  # the last pass's logits are in the old context
        self._lease.context = new
        used = {held.base for held in self._slots.values()}
        self._free = [
            sequence for sequence in reversed(range(self._weights.sequences)) if sequence not in used
        ]
        old.close()

"""A light head that starts from nothing and learns, while it serves, from the rows of verification.

    python -m benchmarks.online_head OUT.json --model FILE.gguf --data FOLDER

A stream of requests (``corpus.requests``, none of which the corpus answers) is served greedily, eight at a time. Each
row of each step gives one example: the state and the token that lead to it, and the target's best tokens there. After
each group, the head learns from the new rows, once, in their order, and the drafter gets the new weights. At each of
``--points`` tokens, S is measured on held-out prompts, one at a time: MT-Bench's prose questions and MBPP's tasks.
Steps have a fixed number of rows, so S does not depend on the machine; times are of the processor. Every output is
compared with plain decoding; a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
import torch

import lookahead
from lookahead.bench.record import commit, describe_machine, machine
from lookahead.core import Scores, Start, TokenTree
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of
from lookahead.drafters.adaptive.draft_state import AdaptiveDraftState
from lookahead.drafters.adaptive.heads import make_head
from lookahead.learning import corpus
from lookahead.learning.train_head import Training
from lookahead.learning.train_settings import TrainSettings

from .corpus.measure import prompts
from .corpus.requests import asks

#: Of each row, one position is trained, once.
SETTINGS = TrainSettings(levels=1, run=1, deep=1.0, rate=1e-3, batch=128, width=512, shortlist=2048)
#: Requests that the corpus may answer; best tokens that are kept of a row; requests served at a time; their tokens.
ANSWERED, TOP, GROUP, LONGEST = 20_000, 8, 8, 128


class Rows:
    """Rows of verification, in the form of ``learning.head_data.Positions``.

    Each has two positions: one with the state and the token that lead to it, and one with the target's best tokens.
    """

    def __init__(self, size: int, hidden: int, shortlist: Any) -> None:
        self.states = np.zeros((size, hidden), np.float16)
        self.tokens = np.zeros(2 * size, np.int64)
        self.ids = np.zeros((2 * size, TOP), np.int64)
        self.probabilities = np.zeros((2 * size, TOP), np.float32)
        self.accepted = np.zeros(size, bool)
        self.shortlist = shortlist
        self.learned = self.count = 0

    def __len__(self) -> int:
        return self.count

    def add(self, state: Any, token: int, ids: Any, odds: Any, accepted: bool) -> None:
        row = self.count
        self.states[row], self.accepted[row], self.tokens[2 * row] = state, accepted, token
        self.ids[2 * row + 1] = ids[:TOP]
        shares = np.exp(odds[:TOP])
        self.probabilities[2 * row + 1] = shares / shares.sum()
        self.count += 1

    def read(self, at: Any) -> Any:
        return self.states[at >> 1].astype(np.float32)

    def frequent(self, count: int) -> Any:
        return self.shortlist

    def runs(self, length: int, after: int) -> Any:
        """The new rows, in their order; before there are any, enough for ``Training`` to begin."""
        return 2 * np.arange(self.learned, self.count) if self.count else np.zeros(SETTINGS.batch, np.int64)

    def measured(self, after: int) -> Any:
        """The new rows that were accepted."""
        new = self.runs(1, after)
        return new[self.accepted[new >> 1]] if self.count else new


class Online(Training):
    """A training that takes each row once."""

    def __init__(self, rows: Any, parts: Any) -> None:
        super().__init__(rows, parts.embed, parts.output, parts.vocabulary, SETTINGS, Path("unused"))
        self._embed = parts.embed
        self._dtype = torch.bfloat16
        self.rows = rows

    def _rate(self) -> float:
        return self.settings.rate * min(1.0, (self.step + 1) / 20)

    def _embedded(self, at: Any) -> torch.Tensor:
        tokens = self.rows.tokens[at]
        return torch.from_numpy(self._embed(tokens.reshape(-1).tolist())).reshape(*tokens.shape, -1)

    def report(self) -> Any:
        return self.counted

    def learn(self) -> None:
        """Count the guesses at the new rows, then learn from these rows."""
        self.counted = super().report()
        while self.rows.count - self.rows.learned >= SETTINGS.batch:
            self._gradients(self.rows.runs(1, 1)[: SETTINGS.batch])
            self._update()
            self.step += 1
            self.rows.learned += SETTINGS.batch


class Recording(AdaptiveDraftState):
    """Keeps the rows of each step."""

    rows: Rows
    state: Any = None

    def draft(self, *limits: Any, **named: Any) -> TokenTree:
        tree = super().draft(*limits, **named)
        tree.needs_hidden = True
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        super().observe(tree, scores, path, tokens)
        ids, odds = scores.top(range(len(tree)), TOP)
        for node, parent in enumerate(tree.parents):
            state = self.state if node == 0 else scores.hidden(parent)
            if state is not None:
                self.rows.add(state, tree.tokens[node], ids[node], odds[node], node in path)
        self.state = scores.hidden(path[-1])


@dataclass(frozen=True)
class Recorder(Adaptive):
    """``Adaptive``, which keeps the rows of its steps."""

    kept: Rows | None = None

    def start(self, sequence: Start) -> AdaptiveDraftState:
        state = Recording(self, self.state, sequence, self.for_model)
        assert self.kept is not None
        state.rows = self.kept
        return state


def timed(work: Any) -> tuple[Any, float]:
    """The result, and the seconds of the processor."""
    begin = process_time()
    return work(), process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--points", type=int, nargs="+", default=[5000, 10_000, 20_000, 30_000])
    given = parser.parse_args()

    # The model, the table that the library counts when it first sees a tokenizer, and an untrained head.
    torch.set_num_threads(1)
    llm = lookahead.load(given.model, threads=1)
    places = corpus.split(llm.tokenizer.backend_tokenizer, corpus.texts())
    folder = TemporaryDirectory()
    table = str(Path(folder.name) / "table.safetensors")
    corpus.save(places, Path(table), key_of(llm.model))
    tokens, counts = np.unique(places.ids, return_counts=True)
    shortlist = np.sort(tokens[np.argsort(-counts, kind="stable")[: SETTINGS.shortlist]]).astype(np.int32)
    target, parts = llm.target(), llm.model.head_parts()
    kept = Rows(given.rows * (given.points[-1] + 2 * GROUP * LONGEST), parts.hidden, shortlist)
    online = Online(kept, parts)

    # The held-out prompts.
    decode = partial(llm.generate, temperature=0.0, max_new_tokens=given.new_tokens)
    chats = {
        kind: [[{"role": "user", "content": text}] for text in prompts(kind, given.data, given.prompts)]
        for kind in ("prose", "code")
    }
    plain = {kind: [decode(chat, drafter=Plain()).tokens for chat in chats[kind]] for kind in chats}
    served = 0
    spent = dict.fromkeys(("serving", "learning", "building"), 0.0)
    lines = list[dict[str, Any]]()

    def measure(drafter: Adaptive, kind: str) -> None:
        results, seconds = timed(lambda: [decode(chat, drafter=drafter) for chat in chats[kind]])
        if [result.tokens for result in results] != plain[kind]:
            raise SystemExit(f"{kind}, {served} tokens seen: the output differs from plain decoding")
        steps = sum(result.stats.steps for result in results)
        new = sum(result.stats.new_tokens - 1 for result in results)
        calls = sum(result.stats.drafter.get("head_calls", 0) for result in results)
        line = {"kind": kind, "seen": served, "s": round(new / steps, 4), "new": new, "steps": steps}
        line |= {"calls": calls, "ms_per_step": round(1e3 * seconds / steps, 3)}
        each = {f"{name}_ms": round(1e3 * part / max(1, served), 3) for name, part in spent.items()}
        lines.append(line | each)
        print(json.dumps(lines[-1]), flush=True)

    # The stream: each group with the head so far, then its updates.
    drafter = Adaptive(rows=given.rows, table=table)
    stream = islice(asks("qwen"), ANSWERED, None)
    for point in [0, *given.points]:
        while served < point:
            group = [[{"role": "user", "content": ask.text}] for ask in islice(stream, GROUP)]
            recorder = Recorder(rows=given.rows, table=table, head=drafter.head, kept=kept)
            results, seconds = timed(partial(decode, group, drafter=recorder, max_new_tokens=LONGEST))
            spent["serving"] += seconds
            served += sum(len(result.tokens) for result in results)
            spent["learning"] += timed(online.learn)[1]
            head, seconds = timed(lambda: make_head(llm.model, target, online.weights()))
            spent["building"] += seconds
            llm.model.state.setdefault("heads", {})["online", target.path] = head
            drafter = replace(drafter, head="online")
            print(f"{served} tokens, {kept.count} rows, right: {online.counted.accuracy}", flush=True)
        for kind in chats:
            measure(drafter, kind)
    origin = {"model": Path(llm.name).name, "machine": describe_machine(machine()), "commit": commit()}
    given.out.write_text(json.dumps(origin | {"lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A small model that drafts for a larger one, asked only where the other sources are unsure.

    python -m benchmarks.small_drafter OUT.json --model FILE.gguf --small FILE.gguf --data FOLDER [--skip 8]

The models have one tokenizer. A tree has a fixed number of rows of the default sources. With ``--ask B:D``, if no
proposal for the next token has an estimated probability of B, the small model's greedy chain of D tokens takes the
place of the least likely rows. Each of its passes is one drafted token; the tokens since it was last asked are
rows of its next pass. Prompts are MT-Bench's prose questions and MBPP's tasks, from number ``--skip`` on, so that B
and D can be chosen on others. Every output is compared with plain decoding; a difference ends the run.

S does not depend on the machine. The speed over the same tree without the small model follows from S and the passes
asked per step, for a pass of ``--costs`` plain steps and a step of these rows of ``--step`` plain steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lookahead
from lookahead.bench.record import commit, describe_machine, machine
from lookahead.core import UNLIMITED_ROWS, Scores, Start, TokenTree
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.base_files import key_of
from lookahead.drafters.adaptive.draft_state import AdaptiveDraftState
from lookahead.learning import corpus

from .corpus.measure import prompts


class Small:
    """The small model, for one sequence at a time.

    Attributes:
        passes: its forward passes after prompts.
    """

    def __init__(self, llm: Any) -> None:
        self.target = llm.target()
        self.passes = self.known = 0

    def restart(self) -> None:
        if self.known:
            self.target.release(0)
        self.known = 0

    def chain(self, text: Sequence[int], length: int) -> list[int]:
        """The greedy tokens after a text, which continues the last one."""
        if not self.known:
            self.known = len(text) - 1
            self.target.prefill([(0, text[: self.known])])
        found = [self._last(text[self.known :])]
        self.target.commit([(0, range(len(text) - self.known))])
        self.known = len(text)
        while len(found) < length:
            found.append(self._last(found))
        return found

    def _last(self, tokens: Sequence[int]) -> int:
        tree = TokenTree(tokens[0])
        last = tree.add_candidate(tokens[1:])
        self.passes += 1
        (scores,) = self.target.forward([(0, tree)])
        best: int = scores.best(last)
        return best


class AskingState(AdaptiveDraftState):
    """Asks the small model where no proposal for the next token is likely."""

    drafter: Asking
    text: list[int]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = super().draft(max_depth, max_rows, batch)
        memory, small = self._memory, self.drafter.small
        depth = min(self.drafter.depth, max_depth, len(tree) - 1)
        if memory is None or small is None or depth < 1:
            return tree
        first = [p for p, parent in zip(self.estimates, tree.parents, strict=True) if parent == 0]
        if max(first) >= self.drafter.below:
            return tree
        chain = small.chain(self.text, depth)
        rows = len(tree)
        for kept in range(rows, 0, -1):
            mixed = TokenTree.of(tree.tokens[:kept], tree.parents[:kept])
            mixed.add_candidate(chain)
            if len(mixed) <= rows:
                break
        memory.cut(kept)
        memory.adopt(mixed)
        return mixed

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        super().observe(tree, scores, path, tokens)
        self.text.extend(tokens)


@dataclass(frozen=True)
class Asking(Adaptive):
    """``Adaptive`` with a small model."""

    small: Small | None = None
    below: float = 0.0
    depth: int = 1

    def start(self, sequence: Start) -> AdaptiveDraftState:
        state = AskingState(self, self.state, sequence, self.for_model)
        state.drafter, state.text = self, [*sequence.prompt, sequence.first]
        if self.small is not None:
            self.small.restart()
        return state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ask", nargs="+", default=["0.3:1", "1:3"])
    parser.add_argument("--costs", type=float, nargs="+", default=[0.4, 0.07])
    parser.add_argument("--step", type=float, default=1.02)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    llm, other = (lookahead.load(file, threads=given.threads) for file in (given.model, given.small))
    small = Small(other)
    folder = TemporaryDirectory()
    table = str(Path(folder.name) / "table.safetensors")
    corpus.save(corpus.split(llm.tokenizer.backend_tokenizer, corpus.texts()), Path(table), key_of(llm.model))
    common: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": given.new_tokens}
    lines = list[dict[str, Any]]()
    origin = {"model": Path(llm.name).name, "machine": describe_machine(machine()), "commit": commit()}
    for kind in ("prose", "code"):
        chosen = prompts(kind, given.data, given.skip + given.prompts)[given.skip :]
        chats = [[{"role": "user", "content": text}] for text in chosen]
        plain = [llm.generate(chat, drafter=Plain(), **common).tokens for chat in chats]
        base = 0.0
        for ask in ["0:0", *given.ask]:
            below, depth = ask.split(":")
            drafter = Asking(rows=given.rows, table=table, small=small, below=float(below), depth=int(depth))
            small.passes = 0
            results = [llm.generate(chat, drafter=drafter, **common) for chat in chats]
            if [result.tokens for result in results] != plain:
                raise SystemExit(f"{kind}, {ask}: the output differs from plain decoding")
            steps = sum(result.stats.steps for result in results)
            s = sum(result.stats.new_tokens - 1 for result in results) / steps
            base = base or s
            asked = small.passes / steps
            speeds = {
                f"at {cost:g}": round(s / base * given.step / (given.step + cost * asked), 3)
                for cost in given.costs
            }
            line = {"kind": kind, "ask": ask, "steps": steps, "s": round(s, 3), "asked": round(asked, 3)}
            lines.append(origin | line | speeds)
            print(json.dumps(line | speeds), flush=True)
            given.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()

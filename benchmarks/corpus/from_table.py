"""Write text from a base table: chains over its entries, a token drawn by probability after the last three.

    python -m benchmarks.corpus.from_table OUT.jsonl [--tokens 1500000] [--seed 0]

The sentences make no sense, but a table counted in them has the entries of the original in the units of any other
tokenizer. It takes seconds, and no model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import lookahead
from lookahead.drafters.adaptive.base_files import INCLUDED
from lookahead.drafters.adaptive.sources.base_table import (
    ABSENT,
    STEP,
    Trie,
    candidate,
    find_entry,
    open_table,
    token_of,
)
from lookahead.machine_code import entry, pack

#: Tokens of a chain.
LENGTH = 250


@entry
def _walk(
    trie: Trie,
    sums: Annotated[Any, "f8", 2],
    draws: Annotated[Any, "f8", 2],
    chains: Annotated[Any, "i8", 2],
) -> None:
    """Continue each chain from its first token.

    Args:
        sums: (nodes, width), cumulative probabilities of the entries.
        draws: (chains, LENGTH), in [0, 1).
        chains: (chains, LENGTH + 1), the tokens; -1 after a context without an entry.
    """
    for row in range(len(chains)):
        before = previous = -1
        last = chains[row, 0]
        for place in range(draws.shape[1]):
            node = find_entry(trie, before, previous, last)
            if node < 0:
                break
            index = 0
            while index < sums.shape[1] - 1 and sums[node, index] <= draws[row, place]:
                index += 1
            before, previous, last = previous, last, candidate(trie, node, index)
            chains[row, place + 1] = last


def chains_of(trie: Trie, count: int, seed: int) -> Any:
    """Chains of tokens whose first token is drawn by its count: (count, LENGTH + 1), with -1 for none."""
    random = np.random.default_rng(seed)
    first = int(trie.children[0])
    odds = trie.counts[:first] / trie.counts[:first].sum()
    weights = np.where(trie.logs == ABSENT, 0, np.exp(-trie.logs * STEP))
    sums = np.cumsum(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9), axis=1)
    chains = np.full((count, LENGTH + 1), -1)
    chains[:, 0] = [token_of(trie, node) for node in random.choice(first, count, p=odds)]
    _walk(pack(trie), sums, random.random((count, LENGTH)), chains)
    return chains


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tokenizer = lookahead.load().tokenizer
    special = list(tokenizer.all_special_ids)
    (file,) = INCLUDED.glob("*.safetensors")
    with given.out.open("w", encoding="utf-8") as out:
        written = 0
        chains = chains_of(open_table(file).trie, given.tokens // 100, given.seed)
        for number, chain in enumerate(chains):
            ends = np.flatnonzero((chain < 0) | np.isin(chain, special))
            tokens = chain[: ends[0]] if len(ends) else chain
            line = {"writer": "table", "number": number, "kind": "chain", "tokens": len(tokens)}
            out.write(json.dumps({**line, "answer": tokenizer.decode(tokens.tolist())}) + "\n")
            written += len(tokens)
            if written >= given.tokens:
                break
    print(f"{written} tokens")


if __name__ == "__main__":
    main()

"""Keep only the most frequent tokens of a light head's shortlist.

    python scripts/shorten_head.py HEAD TABLE COUNT OUTPUT

A token's frequency is its count in a base table that was learned from the same text. Counts of the table end at 255,
so COUNT must be large enough for every token with that count. The head need not be trained again, because its
probabilities are relative to the tokens that are left.
"""

import sys
from dataclasses import replace

import numpy as np

from lookahead.drafters.adaptive.sources.base_table import open_table
from lookahead.drafters.adaptive.sources.head_file import load_head


def main(head: str, table: str, count: str, output: str) -> None:
    weights = load_head(head)
    trie = open_table(table).trie
    nodes = trie.roots[weights.shortlist]
    counts = np.where(nodes < 0, 0, trie.counts[nodes].astype(int))
    kept = np.argsort(-counts, kind="stable")[: int(count)]
    if (counts == 255).sum() > len(kept):
        sys.exit(f"COUNT must be at least {(counts == 255).sum()}, got {count}")
    replace(weights, shortlist=np.sort(weights.shortlist[kept])).save(output)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A table of n-grams for any tokenizer, counted in text that another model wrote.

Models write alike: in another tokenizer's units, the default model's text drafts for other models about as well as
text of their own. The package contains its base table and the bytes of its tokens. Chains of tokens drawn from the
entries are text without meaning, but with the same n-grams as the original. Their text is split again by the
tokenizer of the model to be accelerated, and counted.

``drafters.adaptive.base_files`` runs ``main`` in another process when a tokenizer is first used.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core import SettingsError
from ..core.errors import first_line
from ..drafters.adaptive.base_files import INCLUDED, table_file
from ..drafters.adaptive.calibration import ORDERS, fits_of, new_buckets
from ..drafters.adaptive.sources.base_table import ABSENT, STEP, Trie, open_table, save_table
from .table import LEAST_COUNT, MOST_CONTEXTS, Array, Places, levels_of, trie_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The bytes of the tokens of the included table: a JSON list of strings in Latin-1, "" for tokens that end a text.
TOKENS = "tokens.json.xz"
#: Number of chains, and their largest length in tokens.
CHAINS, LENGTH = 10_000, 250
#: The number of trials that the fitted share of right proposals of each kind counts as.
TRIALS = 25.0
#: Number of texts that are tokenized together.
BATCH = 500


def _keys(trie: Trie, vocabulary: int) -> list[Array]:
    """The contexts of each level as numbers with their tokens as digits in base V, ascending."""
    tokens = trie.high.astype(np.int64) << 16 | trie.low
    children = trie.children.astype(np.int64)
    starts = [0, int(children[0]), int(children[children[0]]), len(tokens)]
    keys = [tokens[: starts[1]]]
    for level in range(1, ORDERS):
        parents = children[starts[level - 1] : starts[level] + 1]
        keys.append(
            np.repeat(keys[-1], np.diff(parents)) * vocabulary + tokens[starts[level] : starts[level + 1]]
        )
    return keys


def chains(trie: Trie, count: int = CHAINS, seed: int = 0) -> Array:
    """Chains of tokens, each drawn by probability from the entry of the longest context of those before it.

    Args:
        trie: the entries.
        count: number of chains.
        seed: of the draws. The first tokens are drawn by their counts.

    Returns:
        The tokens, (count, LENGTH); -1 after a context without an entry.
    """
    random = np.random.default_rng(seed)
    vocabulary = len(trie.roots)
    keys = _keys(trie, vocabulary)
    starts = np.cumsum([0, *map(len, keys)])
    candidates = trie.ids_high.astype(np.int64) << 16 | trie.ids_low
    weights = np.where(trie.logs == ABSENT, 0, np.exp(-trie.logs * STEP))
    sums = np.cumsum(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9), axis=1)

    out = np.full((count, LENGTH), -1)
    odds = trie.counts[: starts[1]] / trie.counts[: starts[1]].sum(dtype=np.int64)
    out[:, 0] = random.choice(keys[0], count, p=odds)
    for place in range(1, LENGTH):
        # The node of the longest context with an entry, for each chain.
        nodes = np.full(count, -1)
        digits = np.zeros(count, np.int64)
        complete = np.ones(count, bool)
        for level in range(min(ORDERS, place)):
            digits += out[:, place - 1 - level] * vocabulary**level
            complete &= out[:, place - 1 - level] >= 0
            at = np.minimum(np.searchsorted(keys[level], digits), len(keys[level]) - 1)
            found = complete & (keys[level][at] == digits) & (trie.counts[starts[level] + at] > 0)
            nodes = np.where(found, starts[level] + at, nodes)

        # Draw from its entry.
        index = (sums[nodes, :-1] <= random.random(count)[:, None]).sum(axis=1)
        out[:, place] = np.where(nodes >= 0, candidates[nodes, index], -1)
    return out


def texts(count: int = CHAINS) -> Iterator[str]:
    """The corpus: chains of the included table as text.

    Raises:
        SettingsError: a file of the package is missing or damaged.
    """
    (file,) = INCLUDED.glob("*.safetensors")
    try:
        strings = json.loads(lzma.decompress((INCLUDED / TOKENS).read_bytes()))
        tokens = [string.encode("latin-1") for string in strings]
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise SettingsError(
            f"{INCLUDED / TOKENS} is damaged ({first_line(error)}); install the package again"
        ) from None
    for chain in chains(open_table(file).trie, count).tolist():
        parts = []
        for token in chain:
            if token < 0 or not tokens[token]:
                break
            parts.append(tokens[token])
        yield b"".join(parts).decode(errors="ignore")


def split(tokenizer: Tokenizer, given: Iterable[str]) -> Places:
    """The positions of texts in a tokenizer's units."""
    waiting = iter(given)
    found = list[Array]()
    while batch := list(islice(waiting, BATCH)):
        made = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        found += [np.array(each.ids, np.int32) for each in made]
    return Places.of_corpus(found)


def counts_of_kinds() -> dict[str, tuple[Array, Array]]:
    """(hits, trials) of the buckets of a counted table, from the shares that ``scripts/fit_priors.py`` fitted."""
    found = {}
    for sampled, name in enumerate(("greedy", "sampled")):
        priors = new_buckets(fits_of(bool(sampled))["counted"])["prior"]
        found[name] = TRIALS * priors, np.full(len(priors), TRIALS)
    return found


def save(places: Places, file: Path, key: str, least: float = LEAST_COUNT, most: int = MOST_CONTEXTS) -> None:
    """Count positions, and save the table.

    Args:
        places: the positions of a corpus.
        file: the file of the table.
        key: the key of its tokenizer.
        least, most: see ``levels_of`` and ``trie_of``.

    Raises:
        SettingsError: there are no positions, or the file cannot be written.
    """
    if not len(places):
        raise SettingsError("a base table needs a tokenizer that splits text into tokens, but it finds none")
    vocabulary = int(max(places.contexts.max(), places.ids.max())) + 1
    trie = trie_of(levels_of([places], vocabulary, least=least), vocabulary, most)
    save_table(file, trie, counts_of_kinds(), vocabulary, key, 0)


def _is_usable(file: Path) -> bool:
    try:
        open_table(file)
    except SettingsError:
        return False
    return True


def main(key: str) -> None:
    """Build the table of the tokenizer on stdin (its JSON), unless another process does or has done so.

    An error is one line on stderr.
    """
    from filelock import FileLock, Timeout
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    file = table_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=0):
            if not _is_usable(file):
                save(split(Tokenizer.from_str(sys.stdin.read()), texts()), file, key)
    except Timeout:
        pass
    except (SettingsError, OSError, MemoryError) as error:
        print(f"lookahead: there is no base table for this tokenizer: {first_line(error)}", file=sys.stderr)

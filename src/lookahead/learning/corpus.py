"""A table of n-grams for any tokenizer, counted in text that other models wrote.

Models write alike: in another tokenizer's units, text of one model drafts for other models about as well as text of
their own. The package contains answers of two small chat models (``benchmarks/corpus``). They are split by the
tokenizer of the model to be accelerated, and counted.

``drafters.adaptive.base_files`` runs ``main`` in another process when a tokenizer is first used.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core import SettingsError
from ..core.errors import first_line
from ..drafters.adaptive.base_files import CORPUS, corpus_bytes, is_current, table_file
from ..drafters.adaptive.calibration import fits_of, new_buckets
from ..drafters.adaptive.sources.base_table import open_table, save_table
from .table import LEAST_COUNT, MOST_CONTEXTS, Array, Places, levels_of, trie_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The number of trials that the fitted share of right proposals of each kind counts as.
TRIALS = 25.0
#: Number of texts that are tokenized together.
BATCH = 500


def texts() -> list[str]:
    """The texts of the corpus.

    Raises:
        SettingsError: the file is missing or damaged.
    """
    try:
        return [json.loads(line)["answer"] for line in lzma.decompress(CORPUS.read_bytes()).splitlines()]
    except (OSError, lzma.LZMAError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(f"{CORPUS} is damaged ({first_line(error)}); install the package again") from None


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
    save_table(file, trie, counts_of_kinds(), vocabulary, key, 0, corpus_bytes())


def _is_ready(file: Path) -> bool:
    try:
        return is_current(open_table(file))
    except SettingsError:
        return False


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
            if not _is_ready(file):
                save(split(Tokenizer.from_str(sys.stdin.read()), texts()), file, key)
    except Timeout:
        pass
    except (SettingsError, OSError, MemoryError) as error:
        print(f"lookahead: there is no base table for this tokenizer: {first_line(error)}", file=sys.stderr)

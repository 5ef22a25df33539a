"""Counts remembered answers into the table of their tokenizer.

``drafters.adaptive.remembered`` runs ``main`` in another process.
"""

from __future__ import annotations

import sys

from filelock import Timeout

from ..core import SettingsError
from ..core.errors import first_line
from ..drafters.adaptive.base_files import read_table
from ..drafters.adaptive.remembered import Remembered, locked
from ..drafters.adaptive.sources.base_table import save_table
from .table import Places, joined, levels_in, levels_of, trie_of

#: How many occurrences in the corpus an occurrence in a remembered answer outweighs.
WEIGHT = 16.0


def build(remembered: Remembered) -> None:
    """Count the answers so far, and save the table; nothing happens before the tokenizer has a table of its own.

    Raises:
        SettingsError: the table cannot be saved.
        ValueError: the answers cannot be read.
    """
    table = read_table(remembered.key, 0)
    places = Places.of_corpus(list(remembered.texts()))
    if table is None or not len(places):
        return
    vocabulary = max(table.vocabulary, 1 + int(max(places.contexts.max(), places.ids.max())))
    known = levels_in(table.trie, vocabulary)
    own = levels_of([places], vocabulary, [WEIGHT], known=known)
    trie = trie_of(joined(known, own), vocabulary)
    save_table(remembered.file, trie, table.counts, vocabulary, table.tokenizer, table.learned)


def main(owner: str, key: str) -> None:
    """Build the table of an owner, after other processes that build one. An error is one line on stderr."""
    try:
        with locked(timeout=60):
            build(Remembered(owner, key))
    except Timeout:
        pass
    except (SettingsError, OSError, ValueError, MemoryError) as error:
        print(f"lookahead: answers cannot be remembered: {first_line(error)}", file=sys.stderr)

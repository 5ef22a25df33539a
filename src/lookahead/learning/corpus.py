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
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import numpy as np

from ..core import SettingsError
from ..core.errors import first_line
from ..drafters.adaptive.base_files import CORPUS, corpus_bytes, is_current, table_file
from ..drafters.adaptive.calibration import fits_of, new_buckets
from ..drafters.adaptive.sources.base_table import BaseTable, open_table, save_table
from .table import LEAST_COUNT, MOST_CONTEXTS, Array, Places, levels_of, trie_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The number of trials that the fitted share of right proposals of each kind counts as.
TRIALS = 25.0
#: Number of texts that are tokenized together.
BATCH = 500
#: Between pieces of text: before a single space within a line. All 17,075 texts of the corpus have the same tokens in
#: pieces with the tokenizers of SmolLM2, Qwen2.5 and Gemma 3; those that put a space before every text have others.
PIECES = re.compile(r"(?<=\S)(?= \S)")
#: Number of texts, roughly, that show whether a tokenizer is one of those.
SAMPLE = 100
#: Every so many-th text is counted first. In a fifth of the time, an eighth of the corpus gives two thirds of what
#: the whole adds to S (0.19 of 0.29 in four rows, on the prose of a model of 1.5B).
FIRST = 8


def texts() -> list[str]:
    """The texts of the corpus.

    Raises:
        SettingsError: the file is missing or damaged.
    """
    try:
        return [json.loads(line)["answer"] for line in lzma.decompress(CORPUS.read_bytes()).splitlines()]
    except (OSError, lzma.LZMAError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(f"{CORPUS} is damaged ({first_line(error)}); install the package again") from None


def tokenized(tokenizer: Tokenizer, given: Sequence[str]) -> list[Array]:
    r"""The token ids of texts.

    Most pieces of text occur often, so it is faster to tokenize each different piece once:

        Counts of words.\n\nCounts of texts     "Counts", " of", " words.\n\nCounts", " texts"

    If a sample shows that this tokenizer would give other ids, whole texts are tokenized.
    """
    sample = given[:: max(1, len(given) // SAMPLE)]
    if all(map(np.array_equal, _from_pieces(tokenizer, sample), _whole(tokenizer, sample))):
        return _from_pieces(tokenizer, given)
    return _whole(tokenizer, given)


def _whole(tokenizer: Tokenizer, given: Iterable[str]) -> list[Array]:
    waiting = iter(given)
    found = list[Array]()
    while batch := list(islice(waiting, BATCH)):
        made = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        found += [np.array(each.ids, np.int32) for each in made]
    return found


def _from_pieces(tokenizer: Tokenizer, given: Sequence[str]) -> list[Array]:
    places = dict[str, int]()
    parts = [
        np.array([places.setdefault(piece, len(places)) for piece in PIECES.split(text)]) for text in given
    ]
    ids = _whole(tokenizer, places)
    lengths = np.array([len(each) for each in ids], np.int64)
    starts = np.cumsum(lengths) - lengths
    every = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    found = list[Array]()
    for part in parts:
        ends = np.cumsum(lengths[part])
        shifts = starts[part] - ends + lengths[part]
        found.append(every[np.repeat(shifts, lengths[part]) + np.arange(ends[-1])])
    return found


def split(tokenizer: Tokenizer, given: Sequence[str]) -> Places:
    """The positions of texts in a tokenizer's units."""
    return Places.of_corpus(tokenized(tokenizer, given))


def counts_of_kinds() -> dict[str, tuple[Array, Array]]:
    """(hits, trials) of the buckets of a counted table, from the shares that ``scripts/fit_priors.py`` fitted."""
    found = {}
    for sampled, name in enumerate(("greedy", "sampled")):
        priors = new_buckets(fits_of(bool(sampled))["counted"])["prior"]
        found[name] = TRIALS * priors, np.full(len(priors), TRIALS)
    return found


def save(
    places: Places,
    file: Path,
    key: str,
    least: float = LEAST_COUNT,
    most: int = MOST_CONTEXTS,
    whole: bool = True,
) -> None:
    """Count positions, and save the table.

    Args:
        places: the positions of a corpus.
        file: the file of the table.
        key: the key of its tokenizer.
        least, most: see ``levels_of`` and ``trie_of``.
        whole: whether these are all positions of the corpus. The table of a part serves until another replaces it.

    Raises:
        SettingsError: there are no positions, or the file cannot be written.
    """
    if not len(places):
        raise SettingsError("a base table needs a tokenizer that splits text into tokens, but it finds none")
    vocabulary = int(max(places.contexts.max(), places.ids.max())) + 1
    trie = trie_of(levels_of([places], vocabulary, least=least), vocabulary, most)
    save_table(file, trie, counts_of_kinds(), vocabulary, key, 0, corpus_bytes() if whole else 0)


def _is_there(file: Path, rule: Callable[[BaseTable], bool] = lambda table: True) -> bool:
    """Whether a usable table that meets a rule is in this file."""
    try:
        return rule(open_table(file))
    except SettingsError:
        return False


def release_stderr() -> None:
    """Close stderr once the parent process has ended, which a program that reads its output otherwise waits for."""
    parent = os.getppid()  # 1 if it has ended already, or is the first process of a container
    while parent != 1 and os.getppid() == parent:
        sleep(0.1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main(key: str) -> None:
    """Build the table of the tokenizer on stdin (its JSON), unless another process does or has done so.

    A table of a part of the corpus comes first. An error is one line on stderr.
    """
    from filelock import FileLock, Timeout
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=release_stderr, daemon=True).start()
    file = table_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock"), timeout=0):
            if not _is_there(file, is_current):
                tokenizer = Tokenizer.from_str(sys.stdin.read())
                given = texts()
                first = tokenized(tokenizer, given[::FIRST])
                if not _is_there(file):
                    save(Places.of_corpus(first), file, key, whole=False)
                del given[::FIRST]
                whole = Places.of_corpus(first + tokenized(tokenizer, given))
                if not _is_there(file, is_current):  # ``lookahead learn`` may have saved its table
                    save(whole, file, key)
    except Timeout:
        pass
    except (SettingsError, OSError, MemoryError) as error:
        print(f"lookahead: there is no base table for this tokenizer: {first_line(error)}", file=sys.stderr)

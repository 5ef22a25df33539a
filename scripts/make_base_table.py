"""Make the base table included in this package, src/lookahead/drafters/adaptive/tables/*.safetensors.

    python scripts/make_base_table.py --text DIR [--tokens 1000000] [--contexts 180000]
    python scripts/make_base_table.py --add-corpus [--contexts 310000]

The default model generates TOKENS tokens into DIR, from the openings in ``lookahead.learning.openings``, continuing
after existing text. The number of a completion is its seed, so an uninterrupted run is reproducible. The second
command counts the package's corpus into the table that is there. The table keeps about CONTEXTS contexts, so that it
adds less than 4 MB to the wheel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lookahead
from lookahead.drafters.adaptive.base_files import INCLUDED, key_of
from lookahead.drafters.adaptive.sources.base_table import open_table, save_table
from lookahead.learning import corpus
from lookahead.learning.self_text import Writer
from lookahead.learning.table import LEAST_COUNT, build, joined, levels_in, levels_of, trie_of
from lookahead.learning.text_parts import Folder

#: How many occurrences in the model's own text an occurrence in the corpus counts as.
CORPUS = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--add-corpus", action="store_true")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--contexts", type=int)
    options = parser.parse_args()
    if (options.text is None) != options.add_corpus:
        parser.error("either --text or --add-corpus must be given")
    llm = lookahead.load()
    key = key_of(llm.model)
    file = INCLUDED / f"{key}.safetensors"
    if options.add_corpus:
        table = open_table(file)
        places = corpus.split(llm.tokenizer.backend_tokenizer, corpus.texts())
        known = levels_in(table.trie, table.vocabulary)
        both = levels_of([places], table.vocabulary, [CORPUS], CORPUS * LEAST_COUNT, known)
        trie = trie_of(joined(known, both), table.vocabulary, options.contexts or 310_000)
        save_table(file, trie, table.counts, table.vocabulary, key, table.learned)
        return
    folder = Folder(options.text)
    missing = options.tokens - folder.tokens
    if missing > 0:
        Writer(llm, folder).write(
            lambda tokens, seconds: tokens >= missing,
            lambda tokens, seconds: print(f"{tokens} of {missing} tokens", end="\r", flush=True),
        )
    trie, counts, learned = build(folder.read(), llm.vocabulary, options.contexts or 180_000)
    save_table(file, trie, counts, llm.vocabulary, key, learned)
    table = open_table(file)
    contexts = " + ".join(map(str, table.contexts))
    print(f"{file}: {file.stat().st_size} bytes, {contexts} contexts, from {learned} tokens")


if __name__ == "__main__":
    main()

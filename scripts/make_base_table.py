"""Make the base table included in this package, src/lookahead/drafters/adaptive/tables/*.safetensors.

    python scripts/make_base_table.py --text DIR [--tokens 1000000] [--contexts 180000]

The default model generates TOKENS tokens into DIR, from the openings in ``lookahead.learning.openings``, continuing
after existing text. The number of a completion is its seed, so an uninterrupted run is reproducible. The table keeps
about CONTEXTS contexts, so that it adds less than 4 MB to the wheel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lookahead
from lookahead.drafters.adaptive.base_files import INCLUDED, key_of
from lookahead.drafters.adaptive.sources.base_table import open_table, save_table
from lookahead.learning.self_text import Writer
from lookahead.learning.table import build
from lookahead.learning.text_parts import Folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--contexts", type=int, default=180_000)
    options = parser.parse_args()
    llm = lookahead.load()
    folder = Folder(options.text)
    missing = options.tokens - folder.tokens
    if missing > 0:
        Writer(llm, folder).write(
            lambda tokens, seconds: tokens >= missing,
            lambda tokens, seconds: print(f"{tokens} of {missing} tokens", end="\r", flush=True),
        )
    trie, counts, learned = build(folder.read(), llm.vocabulary, options.contexts)
    key = key_of(llm.model)
    file = INCLUDED / f"{key}.safetensors"
    save_table(file, trie, counts, llm.vocabulary, key, learned)
    table = open_table(file)
    contexts = " + ".join(map(str, table.contexts))
    print(f"{file}: {file.stat().st_size} bytes, {contexts} contexts, from {learned} tokens")


if __name__ == "__main__":
    main()

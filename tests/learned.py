"""Light heads and base tables without training, and a limit that fills the disk while they are made."""

import resource
import signal
from contextlib import contextmanager

import numpy as np

from lookahead.drafters import Adaptive
from lookahead.drafters.adaptive.sources import base_table
from lookahead.drafters.adaptive.sources.head_file import HeadWeights
from lookahead.drafters.adaptive.sources.light_head import GREEDY_GUESSES, SAMPLED_GUESSES
from lookahead.learning.table import build
from lookahead.learning.text_parts import ANSWER, Text


def random_head(vocabulary, hidden=64, width=96, shortlist=None, random=None):
    """A head with random weights. By its counts, three in ten of its guesses are right, so they become rows."""
    draw = random if random is not None else np.random.default_rng(0)

    def numbers(*shape):
        return 0.1 * draw.standard_normal(shape).astype(np.float32)

    return HeadWeights(
        vocabulary,
        hidden,
        np.arange(3, vocabulary, 2, dtype=np.int32) if shortlist is None else shortlist,
        hidden_norm=1 + numbers(hidden),
        embedding_norm=1 + numbers(hidden),
        gate=numbers(width, 2 * hidden),
        up=numbers(width, 2 * hidden),
        down=numbers(hidden, width),
        scale=0.7,
        levels=2,
        counts={
            name: (np.full((2, kinds), 3.0, np.float32), np.full((2, kinds), 10.0, np.float32))
            for name, kinds in (("greedy", GREEDY_GUESSES), ("sampled", SAMPLED_GUESSES))
        },
        about={"tokens": 5},
        bits=8,
    )


def with_free_head(file, monkeypatch, vocabulary, hidden=64, **settings):
    """An adaptive drafter with a random head that costs nothing: a tiny model takes less time than any head.

    Args:
        file: where to write the head.
        vocabulary, hidden: sizes of the model.
        settings: of the drafter.
    """
    monkeypatch.setattr(HeadWeights, "parameter_count", 0)
    random_head(vocabulary, hidden).save(file)
    return Adaptive(head=str(file), **settings)


def save_table(file, vocabulary, sequences):
    """Write the base table of a model whose own text is these token sequences, and that was rarely in doubt."""
    texts = []
    for number, sequence in enumerate(sequences):
        tokens = list(sequence[1:])
        ids = np.array([[token, (token + 1) % vocabulary] for token in tokens], np.int32)
        logarithms = np.log(np.full((len(tokens), 2), [0.9, 0.1])).astype(np.float16)
        texts.append(Text(number, ANSWER, 0.0, list(sequence[:1]), tokens, ids, logarithms))
    trie, counts, tokens = build(texts, vocabulary)
    file.parent.mkdir(parents=True, exist_ok=True)
    base_table.save_table(file, trie, counts, vocabulary, "", tokens)


@contextmanager
def small_disk(size):
    """In this block, files cannot grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

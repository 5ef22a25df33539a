"""The n-gram pool (paper, section 3.1): n-grams indexed by their first token.

A key has at most ``guess_set_size`` continuations; the least recently added one is evicted first. The number of keys
may be limited to ``max_keys``; the oldest key is evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ..core.errors import SettingsError


def ngrams_of(tokens: Sequence[int], ngram_size: int, start: int = 0) -> Iterator[Sequence[int]]:
    """Every n-gram of ``tokens`` that begins at ``start`` or later."""
    for i in range(max(0, start), len(tokens) - ngram_size + 1):
        yield tokens[i : i + ngram_size]


class NGramPool:
    """N-grams indexed by their first token, the key.

    Args:
        guess_set_size: G, continuations kept per key (and candidates offered); 0 keeps none.
        max_keys: largest number of keys; None for no limit.

    Attributes:
        hits, misses: calls to ``get`` that did and did not return continuations.

    Raises:
        SettingsError: a value out of range.
    """

    def __init__(self, guess_set_size: int, max_keys: int | None = None) -> None:
        if guess_set_size < 0:
            raise SettingsError(f"guess_set_size must be at least 0, got {guess_set_size}")
        if max_keys is not None and max_keys < 1:
            raise SettingsError(f"max_pool_keys must be at least 1 or None, got {max_keys}")
        self.guess_set_size = guess_set_size
        self.max_keys = max_keys
        self.hits = 0
        self.misses = 0
        # A dict keeps insertion order, so the first entry of a bucket is the least recently added one.
        self._buckets: dict[int, dict[tuple[int, ...], None]] = {}

    def __repr__(self) -> str:
        return f"NGramPool(guess_set_size={self.guess_set_size}, keys={len(self)})"

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        """Keep ``continuation`` (N-1 tokens) as the most recent one of ``key``."""
        if not continuation or not self.guess_set_size:
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            if self.max_keys is not None and len(self._buckets) >= self.max_keys:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[key] = {}
        elif continuation in bucket:
            del bucket[continuation]
        elif len(bucket) >= self.guess_set_size:
            del bucket[next(iter(bucket))]
        bucket[continuation] = None

    def add_text(self, tokens: Sequence[int], ngram_size: int, start: int = 0) -> None:
        """Add every n-gram of ``tokens`` that begins at ``start`` or later."""
        for key, *continuation in ngrams_of(tokens, ngram_size, start):
            self.add(key, tuple(continuation))

    def get(self, key: int) -> list[tuple[int, ...]]:
        """The continuations of ``key``, most recently added first."""
        bucket = self._buckets.get(key)
        if bucket is None:
            self.misses += 1
            return []
        self.hits += 1
        return list(reversed(bucket))

    def stats(self) -> dict[str, float]:
        """Sizes, fan-out (continuations per key), hits and misses."""
        fan_out = [len(bucket) for bucket in self._buckets.values()]
        return {
            "keys": len(fan_out),
            "continuations": sum(fan_out),
            "mean_fan_out": sum(fan_out) / len(fan_out) if fan_out else 0.0,
            "median_fan_out": float(median(fan_out)) if fan_out else 0.0,
            "largest_fan_out": max(fan_out, default=0),
            "hits": self.hits,
            "misses": self.misses,
        }

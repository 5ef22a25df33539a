"""Cost of a commit at short and long context: it must not grow, because only accepted rows move.

    python benchmarks/commit_cost.py

Storage has the shape of a 24-layer model with 8 KV heads of size 64 (fp32). Beside our commit stands the
obvious way, which copies the whole cache, as the authors' code does.
"""

from __future__ import annotations

import platform
import statistics
from time import perf_counter

import torch

from lookahead.targets.cache import TreeCache

LAYERS, HEADS, SIZE, ROWS = 24, 8, 64, 120
PATH = [0, 61, 62, 63]


def microseconds(action: object, repeats: int = 60) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        action()  # type: ignore[operator]
        times.append(perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {machine}")
    print(f"{LAYERS} layers, {HEADS} KV heads of {SIZE}, fp32; {ROWS} pending rows, {len(PATH)} accepted")
    print(f"{'context':>8} {'our commit':>12} {'in place':>12} {'whole copy':>14}   (microseconds, median)")
    for context in (256, 8192):
        cache = TreeCache([(HEADS, SIZE, SIZE)] * LAYERS, torch.float32, torch.device("cpu"), context + ROWS)
        cache.place([0], [context], ROWS)
        keep = torch.tensor([*range(context), *(context + row for row in PATH)])
        (storage,) = cache._storage.values()
        moved = microseconds(lambda cache=cache, at=context: cache.move(0, at, PATH))
        still = microseconds(lambda cache=cache, at=context: cache.move(0, at, [0, 1, 2, 3]))
        whole = microseconds(lambda storage=storage, keep=keep: storage[:, 0].index_select(2, keep), 10)
        print(f"{context:>8} {moved:>12.1f} {still:>12.1f} {whole:>14.1f}")


if __name__ == "__main__":
    main()

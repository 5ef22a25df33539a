"""The bound on the memory of keys and values, in tokens."""

from __future__ import annotations

import re
from pathlib import Path

from ..core import SettingsError
from ..core.target import UNLIMITED_TOKENS
from ..model import Model
from .settings import bytes_of

#: The share of the free memory that keys and values may take.
SHARE = 0.5
#: Where Linux says how much memory is available, and the limit and use of a container (cgroup v2).
AVAILABLE = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def most_tokens(model: Model, given: str | None) -> int:
    """The largest number of tokens whose keys and values fit in memory.

    Args:
        model: the model, loaded.
        given: the size that --kv-memory gives; None for a share of what is free.

    Raises:
        SettingsError: a size is given, but the model does not tell the size of a token.
    """
    if given is not None and not model.token_bytes:
        raise SettingsError(
            f"--kv-memory needs a model whose keys and values have a known size, got {model.description}; leave it "
            "out, and limit --max-concurrent and --max-model-len"
        )
    size = bytes_of(given) if given is not None else int(SHARE * _free(model))
    return size // model.token_bytes if size and model.token_bytes else UNLIMITED_TOKENS


def _free(model: Model) -> int:
    """Free bytes of the memory where the keys and values of a model are; 0 if unknown."""
    if free := model.device_memory():
        return free
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", AVAILABLE.read_text(), re.M)
        free = 1024 * int(found[1]) if found else 0
    except OSError:
        return 0
    try:
        limit, used = ((CONTAINER / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, max(1, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return free

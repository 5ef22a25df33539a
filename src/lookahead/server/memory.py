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


def most_tokens(model: Model, given: str | None, least: int = 1) -> int:
    """The largest number of tokens whose keys and values fit in memory.

    Args:
        model: the model, loaded.
        given: the size that --kv-memory gives; None for a share of what is free.
        least: the tokens that must fit.

    Raises:
        SettingsError: fewer fit, or a size is given, but the model has no keys and values.
    """
    token = model.token_bytes
    if given is not None and not token:
        raise SettingsError(
            f"--kv-memory needs a model with keys and values, got {model.description}; leave it out, and limit "
            "--max-concurrent"
        )
    size = bytes_of(given) if given is not None else int(SHARE * _free(model))
    most = size // token if size and token else UNLIMITED_TOKENS
    if most < least:
        raise SettingsError(
            f"--kv-memory must have room for a sequence, but only {most} tokens of {token} bytes fit; give more, or "
            "a smaller --max-model-len"
        )
    return most


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

"""What a model directory must hold, checked before anything heavy is read.

Weights are read from safetensors only: other formats can run code while they are read.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..core import SettingsError


def check_directory(path: Path) -> None:
    """Say what a model directory lacks before anything heavy is read.

    Raises:
        SettingsError: no or broken config.json, no weights in safetensors, missing shards, corrupt files.
    """
    config = path / "config.json"
    if not config.is_file():
        raise SettingsError(
            f"a model directory must hold config.json and *.safetensors; {path} has no config.json"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"config.json must be JSON; {config} is not ({error})") from None
    found = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        found = _shards(index)
    if not found:
        others = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in path.glob(pattern)
        )
        raise SettingsError(
            f"a model directory must hold its weights as *.safetensors; {path} has "
            + (f"{', '.join(others)}; convert them to safetensors" if others else "no weights")
        )
    for shard in found:
        check_safetensors(shard)


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{index} must be an index of safetensors shards and is not ({error!r})"
        ) from None
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise SettingsError(
            f"every shard named in {index.name} must be there; {index.parent} lacks {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + "; copy or download the model again"
        )
    return [index.parent / name for name in sorted(names)]


def check_safetensors(path: Path) -> None:
    """Raises SettingsError where the file's header and size do not agree."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise SettingsError(
            f"weights must be whole safetensors files; {path} ({path.stat().st_size} bytes) cannot be read "
            f"({error}); copy or download it again"
        ) from None

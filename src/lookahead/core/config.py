"""Settings of lookahead decoding: frozen, validated, and known by the names of other implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .errors import SettingsError

#: Names used by the authors' code and by TensorRT-LLM, and the short letters of the paper.
ALIASES = {
    "WINDOW_SIZE": "window_size",
    "LEVEL": "ngram_size",
    "GUESS_SET_SIZE": "guess_set_size",
    "POOL_FROM_PROMPT": "pool_from_prompt",
    "max_window_size": "window_size",
    "max_ngram_size": "ngram_size",
    "max_verification_set_size": "guess_set_size",
    "W": "window_size",
    "N": "ngram_size",
    "G": "guess_set_size",
}
LARGEST = 512


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """(W, N, G) and what else shapes lookahead decoding (paper, section 3).

    Attributes:
        window_size: W, columns of the window, 1 to 512.
        ngram_size: N, tokens of an n-gram, 2 to 512; 1 only in (1, 1, 0), which means off.
        guess_set_size: G, candidates verified per step, 0 to 512.
        pool_from_prompt: fill the pool from the prompt ("prompt as reference", Table 3).
        pool_from_output: fill the pool from the text as it is generated.
        max_pool_keys: cap on the pool's keys; None for no cap.
        seed: of the window's own generator. It shapes the draft, never the output.
    """

    window_size: int = 15
    ngram_size: int = 5
    guess_set_size: int = 15
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    max_pool_keys: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("window_size", 1), ("ngram_size", 2), ("guess_set_size", 0), ("seed", None)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingsError(f"{name} must be a whole number, got {value!r}")
            if low is not None and not low <= value <= LARGEST and self.triple != (1, 1, 0):
                raise SettingsError(
                    f"{name} must be between {low} and {LARGEST}, got {value}; "
                    "to switch lookahead off use (1, 1, 0)"
                )
        for name in ("pool_from_prompt", "pool_from_output"):
            value = getattr(self, name)
            if value not in (0, 1):  # the authors' code writes POOL_FROM_PROMPT=1
                raise SettingsError(f"{name} must be true or false, got {value!r}")
            object.__setattr__(self, name, bool(value))
        keys = self.max_pool_keys
        if keys is not None and (not isinstance(keys, int) or keys < 1):
            raise SettingsError(f"max_pool_keys must be at least 1 or None, got {keys!r}")

    @property
    def triple(self) -> tuple[int, int, int]:
        """(W, N, G)."""
        return self.window_size, self.ngram_size, self.guess_set_size

    @property
    def off(self) -> bool:
        """Whether this is (1, 1, 0): plain autoregressive decoding."""
        return self.ngram_size == 1

    @property
    def max_rows(self) -> int:
        """Rows of the largest step: the root, the window and G candidates of N-1 tokens.

        With k levels the window has k (W + N - 1 - k) rows, root included; a narrow one peaks in its warm-up.
        """
        w, n, g = self.triple
        return max((k * (w + n - 1 - k) for k in range(1, n)), default=1) + g * (n - 1)

    def as_dict(self) -> dict[str, Any]:
        """Every setting by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, value: Any = None, **overrides: Any) -> LookaheadConfig:
        """Make settings from whatever a caller has.

        Args:
            value: None, a config, a triple (W, N, G), the text "W,N,G", a preset's name, or a mapping
                with our names or those of the authors' code or TensorRT-LLM.
            **overrides: single settings, by any of these names; None leaves a setting as it is.

        Raises:
            SettingsError: an unknown name, or a value out of range.
        """
        if value is None:
            base = cls()
        elif isinstance(value, cls):
            base = value
        elif isinstance(value, str):
            base = PRESETS[value] if value in PRESETS else cls._parse(value)
        elif isinstance(value, Mapping):
            base = cls(**_resolve(value))
        elif isinstance(value, (tuple, list)) and len(value) == 3:
            base = cls(*value)
        else:
            raise SettingsError(
                "settings must be a LookaheadConfig, a triple (W, N, G), a text 'W,N,G', "
                f"a preset ({', '.join(PRESETS)}) or a mapping, got {value!r}"
            )
        given = {key: item for key, item in overrides.items() if item is not None}
        return replace(base, **_resolve(given)) if given else base

    @classmethod
    def _parse(cls, text: str) -> LookaheadConfig:
        try:
            w, n, g = map(int, text.split(","))
        except ValueError:
            raise SettingsError(
                f"settings must be 'W,N,G' (three whole numbers, as in 15,5,15) or a preset "
                f"({', '.join(PRESETS)}), got {text!r}"
            ) from None
        return cls(w, n, g)

    @classmethod
    def for_device(cls, device: str) -> LookaheadConfig:
        """What to use where nothing is asked for: the paper's triple on an accelerator, few rows on a CPU.

        A row is almost free where reading the weights dominates a step; on a CPU it soon is not
        (docs/settings.md). ``device`` is a torch device type.
        """
        return PRESETS["cpu"] if device == "cpu" else cls()


def _resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(LookaheadConfig)}
    resolved: dict[str, Any] = {}
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name not in known:
            raise SettingsError(f"unknown setting {key!r}; known are {', '.join(sorted(known))}")
        if name in resolved and resolved[name] != value:
            raise SettingsError(f"{name} is given twice with different values")
        resolved[name] = value
    return resolved


OFF = LookaheadConfig(1, 1, 0)

#: The paper's (W, N, G) by model size (section 5), few rows for a CPU, and plain decoding.
PRESETS: dict[str, LookaheadConfig] = {
    "7b": LookaheadConfig(15, 5, 15),
    "13b": LookaheadConfig(10, 5, 10),
    "34b": LookaheadConfig(7, 5, 7),
    "cpu": LookaheadConfig(2, 3, 3),
    "off": OFF,
}

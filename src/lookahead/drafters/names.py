"""Turns texts, triples and mappings into drafters, for command lines, servers, generation configs and Python.

    adaptive    jacobi    prompt-lookup    plain (off)       a method with its default settings
    15,5,15    7b    code                                    lookahead decoding by (W, N, G) or by a preset
    lookahead:7,5,7:pool_from_prompt=false                   a method, (W, N, G), single settings
    {"method": "lookahead", "window_size": 7}                a mapping, with our names or those of other libraries

Other packages add drafters by an entry point in the group ``lookahead.drafters``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from ..core import Drafter, SettingsError
from .adaptive.drafter import Adaptive
from .checks import setting_names
from .jacobi import Jacobi
from .lookahead import PRESETS, TRIPLE, Lookahead
from .plain import Plain
from .pool import NGramPool
from .prompt_lookup import PromptLookup

#: The methods of this package by name, in the order in which they are tried for a mapping without a method.
METHODS: Mapping[str, type[Drafter]] = MappingProxyType(
    {kind.name: kind for kind in (Lookahead, Adaptive, Jacobi, PromptLookup, Plain)}
)
OTHER_NAMES = {"off": "plain", "autoregressive": "plain", "prompt_lookup": "prompt-lookup"}
#: The group of entry points by which other packages add a Drafter: a class or an object.
GROUP = "lookahead.drafters"

#: Names of settings in the authors' code, in TensorRT-LLM and in transformers, and the paper's letters.
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
    "prompt_lookup_num_tokens": "max_drafted",
    "max_matching_ngram_size": "max_ngram",
}
#: Settings of the authors' code that are not settings of a drafter here, and what to do instead.
REFUSED = {
    "DIST_WORKERS": "start the processes with torchrun and load with parallel='lookahead'",
    "USE_FLASH": "choose the attention with load(attention=...)",
    "DEBUG": "ask for statistics instead",
}


def as_drafter(value: Any) -> Drafter:
    """The drafter that a value describes.

    Args:
        value: a ``Drafter``; a text such as "adaptive", "code", "15,5,15" or "lookahead:7,5,7:seed=1"; a triple
            (W, N, G); or a mapping of settings with an optional "method" (or "drafter"), which is such a text.
            (1, 1, 0) means ``Plain()``. A mapping without a method selects the first of lookahead, adaptive, jacobi
            and prompt-lookup that has all of its settings.

    Raises:
        SettingsError: an unknown name, a setting that the drafter does not have, or a value out of range.
    """
    if isinstance(value, Drafter):
        return value
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, Sequence) and len(value) == 3:
        return _with_settings(Lookahead, dict(zip(TRIPLE, value, strict=True)))
    raise SettingsError(
        "drafter must be a Drafter such as lookahead.Adaptive(), a text such as 'adaptive', 'code' or '15,5,15', "
        f"a triple (W, N, G) or a mapping of settings, got {value!r:.80}"
    )


def known_names() -> list[str]:
    """Names of methods and presets, including those of other packages."""
    return [*METHODS, "off", *PRESETS, *(point.name for point in entry_points(group=GROUP))]


def _from_text(text: str) -> Drafter:
    head, *parts = text.strip().split(":")
    base = _named(head)
    settings: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals and not _is_triple(part):
            raise SettingsError(
                "a setting must be NAME=VALUE, or W,N,G (three whole numbers, as in 15,5,15), "
                f"got {part!r} in {text!r}"
            )
        new = {key: _value(value)} if equals else _triple(part)
        if new.keys() & settings.keys() or (not equals and _is_triple(head)):
            raise SettingsError(f"a setting is given twice in {text!r}; give each once")
        settings |= new
    return _with_settings(base, settings)


def _named(name: str) -> Drafter:
    """A method with its defaults, or a preset, by name; or W,N,G."""
    if _is_triple(name):
        return _with_settings(Lookahead, _triple(name))
    if name in PRESETS:
        return PRESETS[name]
    own = OTHER_NAMES.get(name, name)
    if own in METHODS:
        return METHODS[own]()
    for point in entry_points(group=GROUP, name=name):
        loaded = point.load()
        drafter = loaded() if isinstance(loaded, type) else loaded
        if not isinstance(drafter, Drafter):
            raise SettingsError(
                f"entry point {name!r} of {GROUP} must be a Drafter, got {type(drafter).__name__}"
            )
        return drafter
    raise SettingsError(
        f"drafter must be one of {', '.join(known_names())}, or W,N,G as in 15,5,15, got {name!r:.80}"
    )


def _is_triple(text: str) -> bool:
    return re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*){2}", text) is not None


def _triple(text: str) -> dict[str, int]:
    return dict(zip(TRIPLE, map(int, text.split(",")), strict=True))


def _value(text: str) -> Any:
    """A setting's value: a number, true, false or none, or names separated by +; ``suffix+`` is also a list."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _from_mapping(given: Mapping[str, Any]) -> Drafter:
    settings = dict(given)
    names = [settings.pop(key) for key in ("drafter", "method", "preset", "lookahead") if key in settings]
    named = [name for name in names if name is not None]
    if len(named) == 2 and named[0] == "lookahead":  # a method beside its triple or preset
        del named[0]
    if len(named) > 1:
        raise SettingsError(f"only one drafter may be given, got {' and '.join(map(repr, named))}")
    if named:
        return _with_settings(as_drafter(named[0]), settings)

    def fit(kind: type[Drafter]) -> tuple[bool, int]:
        names, known = {_own_name(kind, key) for key in settings}, set(setting_names(kind))
        return names <= known, len(names & known)

    # The first method that has all settings; else the method that has the most, and the error names the others.
    return _with_settings(max(METHODS.values(), key=fit), settings)


def _own_name(kind: type[Drafter], name: str) -> str:
    own = ALIASES.get(name, name)
    return "block_size" if kind is Jacobi and own == "window_size" else own


def _with_settings(base: Drafter | type[Drafter], settings: Mapping[str, Any]) -> Drafter:
    """A drafter with some settings changed, given by any of their names."""
    kind = base if isinstance(base, type) else type(base)
    known = setting_names(kind)
    resolved: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "ALWAYS_FWD_ONE" and value in (0, 1):
            if not value:
                raise SettingsError(
                    "ALWAYS_FWD_ONE must be 1: the window moves by one column per step here, as in the authors' "
                    "default; leave it out"
                )
            continue
        name = _own_name(kind, key)
        if key in REFUSED:
            raise SettingsError(f"{key} is not a setting of a drafter; {REFUSED[key]}")
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SettingsError(f"{kind.name} has no setting {key!r:.80}; {has}")
        if name in resolved and resolved[name] != value:
            raise SettingsError(f"{name} is given twice with different values")
        if name == "sources" and isinstance(value, str):
            value = tuple(filter(None, re.split(r"[+,]", value)))
        resolved[name] = value
    if kind is Lookahead and [resolved.get(name) for name in TRIPLE] == [1, 1, 0]:
        return Plain()
    drafter = base() if isinstance(base, type) else base
    return replace(drafter, **resolved) if resolved else drafter  # type: ignore[type-var]


def with_old_keywords(
    drafter: Any = None,
    *,
    method: str | None = None,
    config: Any = None,
    pool: Any = None,
    sizes: Mapping[str, Any] | None = None,
    default: Drafter | None = None,
    few_rows: bool = False,
) -> Drafter | None:
    """The drafter of a call that may still use the keywords of version 0.1.

    Args:
        drafter: the new keyword; what ``as_drafter`` takes, or None.
        method, config, pool: the old keywords: a method's name, its settings, and its pool or state.
        sizes: single settings that were keywords.
        default: the drafter of calls that name none.
        few_rows: whether lookahead decoding without a (W, N, G) uses the preset "cpu".

    Returns:
        None if nothing was given.

    Raises:
        SettingsError: new and old keywords together, or what ``as_drafter`` raises.
    """
    old = {"method": method, "config": config, "pool": pool, **(sizes or {})}
    given = [name for name, value in old.items() if value is not None]
    if not given:
        return None if drafter is None else as_drafter(drafter)
    if drafter is not None:
        raise SettingsError(
            f"drafter and {given[0]} cannot be given together; use drafter alone, which contains all settings"
        )
    result = _from_old(
        method, config, pool, {k: v for k, v in (sizes or {}).items() if v is not None}, default, few_rows
    )
    warnings.warn(
        f"{', '.join(f'{name}=' for name in given)} will be removed in version 0.3; use drafter={result!r}",
        DeprecationWarning,
        stacklevel=4,
    )
    return result


def _from_old(
    method: str | None, config: Any, pool: Any, sizes: dict[str, Any], default: Drafter | None, few_rows: bool
) -> Drafter:
    base: Drafter
    if method is None and config is None and not sizes:
        kind: type[Lookahead] | type[Adaptive] = Lookahead if isinstance(pool, NGramPool) else Adaptive
        given = (default, getattr(pool, "settings", None))
        base = next((each for each in given if isinstance(each, kind)), kind())
    elif config is None:
        base = as_drafter(method) if method is not None else as_drafter(sizes)
        if method is not None:
            if default is not None and type(default) is type(base):
                base = default
            elif method == "lookahead" and few_rows:
                base = PRESETS["cpu"]
            base = _with_settings(base, sizes)
    elif isinstance(config, Mapping):
        base = as_drafter(({"method": method} if method is not None else {}) | dict(config) | sizes)
    else:
        base = _with_settings(as_drafter(config), sizes)
        if method == "jacobi" and isinstance(base, Lookahead):
            base = Jacobi(base.window_size, seed=base.seed)
        elif method is not None and not isinstance(base, Plain) and base.name != as_drafter(method).name:
            raise SettingsError(
                f"{method} takes no settings of {base.name}, got {base}; leave one of them out"
            )
    if isinstance(pool, NGramPool) and isinstance(base, Lookahead):
        return replace(base, pool=pool)
    if pool is not None and isinstance(base, Adaptive):
        return replace(base, state=pool)
    if pool is not None:
        raise SettingsError(
            f"pool must be an NGramPool for lookahead or an AdaptiveState for adaptive, got "
            f"{type(pool).__name__} for {base.name}"
        )
    return base

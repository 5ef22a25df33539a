"""Makes drafters from strings and mappings, for command lines, servers, generation configs and Python.

    adaptive    jacobi    prompt-lookup    plain (off)       a method with its default settings
    15,5,15    7b    code                                    lookahead decoding by (W, N, G) or by a preset
    lookahead:7,5,7:pool_from_prompt=false                   a method, (W, N, G), individual settings
    {"drafter": "code", "window_size": 7}                    a mapping, with our names or those of other libraries

Other packages add drafters through entry points in the group ``lookahead.drafters``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from ..core import Drafter, SettingsError
from ..core.errors import nearest
from .adaptive.drafter import Adaptive
from .checks import setting_names
from .jacobi import Jacobi
from .lookahead import PRESETS, TRIPLE, Lookahead
from .plain import Plain
from .prompt_lookup import PromptLookup

#: The methods of this package by name.
METHODS: Mapping[str, type[Drafter]] = MappingProxyType(
    {kind.name: kind for kind in (Lookahead, Adaptive, Jacobi, PromptLookup, Plain)}
)
OTHER_NAMES = {"off": "plain", "autoregressive": "plain", "prompt_lookup": "prompt-lookup"}
#: The group of entry points through which other packages add a Drafter, as a class or an object.
GROUP = "lookahead.drafters"

#: Our setting names, and their names in the authors' code, TensorRT-LLM, transformers, other software and the paper.
NAMES_ELSEWHERE = {
    "window_size": ("WINDOW_SIZE", "max_window_size", "lookahead_window", "W"),
    "ngram_size": ("LEVEL", "max_ngram_size", "n_gram_size", "N"),
    "guess_set_size": ("GUESS_SET_SIZE", "max_verification_set_size", "max_candidates", "G"),
    "pool_from_prompt": ("POOL_FROM_PROMPT",),
    "max_drafted": ("prompt_lookup_num_tokens",),
    "max_ngram": ("max_matching_ngram_size",),
}
OWN_NAMES = {other: own for own, others in NAMES_ELSEWHERE.items() for other in others}
#: A whole number that may be a setting. int() raises an error for more than 4,300 digits.
WHOLE = r"-?\d{1,18}"
#: Settings of the authors' code that are not drafter settings here, and the alternatives.
REFUSED = {
    "DIST_WORKERS": "start the processes with torchrun and load with parallel='lookahead'",
    "USE_FLASH": "choose the attention with load(attention=...)",
    "DEBUG": "ask for statistics instead",
}


def as_drafter(value: Any) -> Drafter:
    """The drafter that a value describes.

    Args:
        value: a ``Drafter``; a string such as "adaptive", "code", "15,5,15" or "lookahead:7,5,7:seed=1"; or a mapping
            of settings whose "drafter" is such a string. A mapping without "drafter" configures ``Lookahead`` if that
            has all of the settings, and ``Adaptive`` otherwise. "1,1,0" means ``Plain()``, and None ``Adaptive()``.

    Raises:
        SettingsError: an unknown name, a setting that the drafter does not have, or a value out of range.
    """
    if value is None:
        return Adaptive()
    if isinstance(value, Drafter):
        return value
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    raise SettingsError(
        "drafter must be a Drafter such as lookahead.Adaptive(), a string such as 'adaptive', 'code' or '15,5,15', "
        f"or a mapping of settings, got {value!r:.80}"
    )


def known_names() -> list[str]:
    """The names of methods and presets, including those of other packages."""
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
                f"got {part!r:.80} in {text!r:.80}"
            )
        new = {key: _value(value)} if equals else _triple(part)
        if new.keys() & settings.keys() or (not equals and _is_triple(head)):
            raise SettingsError(f"a setting is given twice in {text!r}; give each setting once")
        settings |= new
    return _with_settings(base, settings)


def _named(name: str) -> Drafter:
    """The drafter for the name of a method or a preset, or for W,N,G."""
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
    return re.fullmatch(rf"\s*{WHOLE}\s*(,\s*{WHOLE}\s*){{2}}", text) is not None


def _triple(text: str) -> dict[str, int]:
    return dict(zip(TRIPLE, map(int, text.split(",")), strict=True))


def _value(text: str) -> Any:
    """A setting's value: a number, true, false, none, or text."""
    if re.fullmatch(WHOLE, text):
        return int(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _from_mapping(given: Mapping[str, Any]) -> Drafter:
    settings = dict(given)
    named = settings.pop("drafter", None)
    if named is not None:
        return _with_settings(as_drafter(named), settings)
    own = {_own_name(Lookahead, key) for key in settings} - {"ALWAYS_FWD_ONE", *REFUSED}
    of_lookahead = own and own <= set(setting_names(Lookahead))
    return _with_settings(Lookahead if of_lookahead else Adaptive, settings)


def _own_name(kind: type[Drafter], name: str) -> str:
    own = OWN_NAMES.get(name, name)
    return "block_size" if kind is Jacobi and own == "window_size" else own


def _with_settings(base: Drafter | type[Drafter], settings: Mapping[str, Any]) -> Drafter:
    """A drafter with some settings changed; a setting may have any of its names."""
    kind = base if isinstance(base, type) else type(base)
    known = setting_names(kind)
    resolved: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "ALWAYS_FWD_ONE" and value in (0, 1):
            if not value:
                raise SettingsError(
                    "ALWAYS_FWD_ONE must be 1, because the window always moves by one column per step, as in the "
                    "authors' default; leave it out"
                )
            continue
        name = _own_name(kind, key)
        if key in REFUSED:
            raise SettingsError(f"{key} is not a drafter setting; {REFUSED[key]}")
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SettingsError(f"{kind.name} has no setting {key!r:.80}{nearest(key, known)}; {has}")
        if name in resolved:
            raise SettingsError(f"{name} is given twice; give each setting once")
        if name == "sources" and isinstance(value, str):
            value = tuple(filter(None, re.split(r"[+,]", value)))
        resolved[name] = value
    if kind is Lookahead and resolved == dict(zip(TRIPLE, (1, 1, 0), strict=True)):
        return Plain()
    drafter = base() if isinstance(base, type) else base
    return replace(drafter, **resolved) if resolved else drafter  # type: ignore[type-var]

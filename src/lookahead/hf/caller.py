"""``CustomGenerate``: a function for ``custom_generate`` that also receives what transformers drops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from ..core import SettingsError

P = ParamSpec("P")
R = TypeVar("R")


#: The keyword with which a ``CustomGenerate`` receives the streamer, the assistant model and ``synced_gpus``.
DROPPED = "dropped_by_transformers"


class CustomGenerate(Generic[P, R]):
    """A function for ``custom_generate`` that also receives the arguments that transformers drops (``_give_back``).

    Args:
        function: has a parameter ``tokenizer``; its last parameter takes other keywords, and ``DROPPED``.

    Raises:
        SettingsError: called by something other than ``model.generate``.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("generation_config") is None:  # transformers always passes one
            raise SettingsError(
                "lookahead.generate must be called by transformers, got a direct call; call "
                "model.generate(**inputs, custom_generate=lookahead.generate), or "
                "lookahead.load(path).generate(prompt)"
            )
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        _give_back()
        own = inspect.signature(self._function)
        *named, rest = own.parameters.values()
        dropped = inspect.Parameter(DROPPED, inspect.Parameter.KEYWORD_ONLY)
        return own.replace(parameters=[*named, dropped, rest])


def _give_back() -> None:
    """Put the tokenizer and ``DROPPED`` of the running ``model.generate`` back into its keywords.

    transformers drops them for a callable ``custom_generate`` (since
    https://github.com/huggingface/transformers/pull/40586) in a method that reads the signature just before. Without
    the streamer its reader would wait forever, without the tokenizer stop strings would not work, and without
    ``synced_gpus`` (set under FSDP and ZeRO-3) processes would wait for each other. In a version without that method,
    transformers behaves as usual.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back
    local = frame.f_locals if frame is not None else {}
    taken, keywords = local.get("generation_mode_kwargs", {}), local.get("kwargs", {})
    if "tokenizer" in taken:
        keywords["tokenizer"] = taken["tokenizer"]
    keywords[DROPPED] = {name: taken.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}

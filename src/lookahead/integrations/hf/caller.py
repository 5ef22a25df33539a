"""Arguments of ``model.generate`` that transformers does not pass on: streamer, assistant_model, tokenizer.

They are read from the frames of the running call. In a version of transformers without these frames, they are
missing, and transformers behaves as usual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from transformers import GenerationMixin

from ...core import SettingsError

P = ParamSpec("P")
R = TypeVar("R")


def caller_arguments() -> dict[str, Any]:
    """``streamer`` and ``assistant_model`` of the running ``model.generate``; {} if none is running.

    If a streamer were ignored silently, its reader would wait forever.
    """
    frame = _frame_of("generate")
    if frame is None:
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}


class CustomGenerate(Generic[P, R]):
    """A function for ``custom_generate`` that may have a parameter ``tokenizer``, which ``stop_strings`` need.

    ``model.generate`` removes ``tokenizer`` from its keywords, then reads the signature of the function to select its
    keywords, and then makes the stopping criteria, for which the tokenizer is now missing. So the tokenizer is put
    back when the signature is read.

    Args:
        function: its last parameter takes other keywords.
        others: names of keywords that ``function`` is to receive instead of transformers' error about them.

    Raises:
        SettingsError: called by something other than ``model.generate``.
    """

    def __init__(self, function: Callable[P, R], others: Iterable[str] = ()) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._others = tuple(others)

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
        frame = _frame_of("_extract_generation_mode_kwargs")
        if frame is not None:
            taken, keywords = (frame.f_locals.get(name) for name in ("generation_mode_kwargs", "kwargs"))
            if isinstance(taken, dict) and isinstance(keywords, dict) and "tokenizer" in taken:
                keywords["tokenizer"] = taken["tokenizer"]
        own = inspect.signature(self._function)
        *named, rest = own.parameters.values()
        others = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self._others]
        return own.replace(parameters=[*named, *others, rest])


def _frame_of(method: str) -> FrameType | None:
    """The innermost running frame of a method of ``GenerationMixin``."""
    function = getattr(GenerationMixin, method, None)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame

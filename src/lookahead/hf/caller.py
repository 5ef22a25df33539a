"""``CustomGenerate``: a function for ``custom_generate`` that also receives what transformers drops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Generic, ParamSpec, TypeVar

from transformers import GenerationMixin

from ..core import SettingsError

P = ParamSpec("P")
R = TypeVar("R")


#: The keyword with which a ``CustomGenerate`` receives the streamer, the assistant model and ``synced_gpus``.
DROPPED = "dropped_by_transformers"


class CustomGenerate(Generic[P, R]):
    """A function for ``custom_generate`` that also receives the arguments that transformers drops (``_give_back``).

    Args:
        function: has a parameter ``tokenizer``; its last parameter takes other keywords, and ``DROPPED``.
        others: names of keywords that ``function`` receives instead of transformers raising an error.

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
        _give_back()
        own = inspect.signature(self._function)
        *named, rest = own.parameters.values()
        others = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (DROPPED, *self._others)
        ]
        return own.replace(parameters=[*named, *others, rest])


def _give_back() -> None:
    """Put the tokenizer and ``DROPPED`` of the running ``model.generate`` back into its keywords.

    Without the streamer, its reader would wait forever; without the tokenizer, stop strings would not work; an
    assistant model would be ignored silently; and without ``synced_gpus``, which transformers sets itself under FSDP
    and ZeRO-3, processes that emit different numbers of tokens would wait for each other forever. transformers has no
    interface for them: its method ``_extract_generation_mode_kwargs`` collects them, then replaces what it collected
    with the keywords in the signature of a callable ``custom_generate`` (since
    https://github.com/huggingface/transformers/pull/40586). The method reads the signature just before, so this
    function is called then and writes to the method's own dictionary of keywords. In a version without that method,
    transformers behaves as usual.
    """
    method = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    code = getattr(method, "__code__", None)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return
    taken, keywords = (frame.f_locals.get(name) for name in ("generation_mode_kwargs", "kwargs"))
    if isinstance(taken, dict) and isinstance(keywords, dict):
        if "tokenizer" in taken:
            keywords["tokenizer"] = taken["tokenizer"]
        keywords[DROPPED] = {name: taken.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}

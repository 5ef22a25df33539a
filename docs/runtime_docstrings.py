"""For mkdocstrings: the docstrings that the library writes options into when it is imported, as they are then."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from griffe import Extension


class RuntimeDocstrings(Extension):
    """Replaces the docstring of every function that has ``{options}`` in it."""

    def on_function_instance(self, *, func: Any, **kwargs: Any) -> None:
        if func.docstring is None or "{options}" not in func.docstring.value:
            return
        found: Any = import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            found = getattr(found, name)
        func.docstring.value = inspect.getdoc(found) or ""

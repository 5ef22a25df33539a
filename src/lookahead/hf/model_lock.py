"""Turns of threads that run the same torch module.

Passes of the transformers paths change the module's attention, hooks and, in the check of a 16-bit model, its weights
for their duration. A second thread must wait until they are restored.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, RLock
from typing import Any

from ..core import Target
from ..model import OwnModel

_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_adding = Lock()


def turn(model: Any, target: Target | None = None) -> AbstractContextManager[Any]:
    """A context in which this thread may run a model: threads take turns unless their passes share nothing.

    Args:
        model: the model.
        target: the target that evaluates the passes; None for checks and new targets.
    """
    if isinstance(model, OwnModel) or (target is not None and not target.shares_module):
        return nullcontext()
    with _adding:
        lock: AbstractContextManager[Any] = _locks.setdefault(model, RLock())
    return lock

"""Small torch work between steps runs on one thread.

A parallel region of torch's OpenMP threads would first have to wait for a core that the threads of a compiled step
(``targets.lean.native``) hold on to for the next step, or leave its own threads spinning when that begins: on two
cores either costs several steps. Between steps there are rows of one vocabulary, which one thread does as quickly.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

_lock = threading.Lock()
_inside = 0
_before = 1


class OneThread:
    """A context in which torch's operations on the CPU run on the calling thread; may be nested and shared."""

    def __enter__(self) -> None:
        global _inside, _before
        with _lock:
            if not _inside:
                _before = torch.get_num_threads()
                if _before > 1:
                    torch.set_num_threads(1)
            _inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _inside
        with _lock:
            _inside -= 1
            if not _inside and _before > 1:
                torch.set_num_threads(_before)


one_thread = OneThread()

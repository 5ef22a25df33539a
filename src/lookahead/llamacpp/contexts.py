"""The contexts of a model loaded by llama.cpp. Each target leases one and returns it at its end."""

from __future__ import annotations

from .library import Context, Weights

#: Number of idle contexts kept for later targets.
KEPT = 2


class Lease:
    """A context lent to one target. The target may replace it with a larger one, and returns it at its end."""

    def __init__(self, idle: list[Context], context: Context) -> None:
        self._idle = idle
        self.context = context

    def end(self) -> None:
        """Return the context."""
        if len(self._idle) < KEPT:
            self.context.clear()
            self._idle.append(self.context)
        else:
            self.context.close()


class Contexts:
    """Lends contexts on one loaded model.

    Args:
        weights: the loaded model.
        cells: capacity of a new context, in tokens.
    """

    def __init__(self, weights: Weights, cells: int) -> None:
        self.weights = weights
        self._cells = cells
        self._idle: list[Context] = []

    def lease(self) -> Lease:
        """Lend a context without rows: an idle one, or a new one."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = Context(self.weights, self._cells)
        return Lease(self._idle, context)

"""The lean path as compiled code: one call for each thread and step, where numba is there."""

from .machine import TILES
from .model import NativeModel

__all__ = ["TILES", "NativeModel"]

"""The lean path as compiled code: one call for each thread and step, where numba is there."""

from .model import NativeModel

__all__ = ["NativeModel"]

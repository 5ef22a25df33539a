"""The lean path as compiled code: one call for each thread and step, where numba is there.

machine      what the processor offers
intrinsics   words of LLVM that numba lacks
packing      weights in the order in which products read them
products     rows times weights; finish: what is done with a block of sums
attention    a row over its prefix and its ancestors
stages       embedding, norms, rotation, cache writes, best tokens
jobs         all of it as one pass; control, team: how threads meet, wait and sleep
model        a model's weights and its passes; cache, scores: what goes in and comes out
"""

from .machine import TILES
from .model import NativeModel

__all__ = ["TILES", "NativeModel"]

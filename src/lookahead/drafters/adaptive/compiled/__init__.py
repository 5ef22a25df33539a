"""The compiled twin of the adaptive drafter: numba code. Only ``arrays`` and ``compiled_grower`` import it.

What the docstrings of ``grow``, ``observe``, ``suffix``, ``logits`` and ``calibration`` say of an algorithm holds
here too; both twins compute the same numbers in the same order, with the same constants. Arrays are handed over as
addresses in headers of int64, so that a call costs little; ``arrays`` and ``compiled_grower`` own the memory.
"""

"""Passing many arrays to compiled code: ``machine_code.pack``."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest

from lookahead.machine_code import entry, pack


class Inner(NamedTuple):
    numbers: Annotated[Any, "f4", 2, "strided"]
    factor: int


class Outer(NamedTuple):
    sums: Annotated[Any, "f8", 1]
    inner: Inner
    two: tuple[Inner, Inner]


@entry
def scaled_sums(outer: Outer) -> int:
    for part in (outer.inner, outer.two[0], outer.two[1]):
        for row in range(part.numbers.shape[0]):
            for column in range(part.numbers.shape[1]):
                outer.sums[row] += part.factor * part.numbers[row, column]
    return len(outer.sums)


def test_a_packed_tuple_has_the_same_shapes_strides_and_memory_in_compiled_code():
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    parts = [Inner(wide[:, ::2], 1), Inner(wide[:, 1::2], 10), Inner(wide[1:, :2], 100)]
    outer = Outer(np.zeros(4), parts[0], (parts[1], parts[2]))
    assert scaled_sums(pack(outer)) == 4
    expected = np.zeros(4)
    for part in parts:
        expected[: len(part.numbers)] += part.factor * part.numbers.sum(1)
    assert outer.sums.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "sums",
    [np.zeros(4, np.float32), np.zeros((2, 2)), np.zeros(8)[::2]],
    ids=["another type", "two dimensions", "gaps"],
)
def test_an_array_of_another_kind_is_refused(sums):
    inner = Inner(np.zeros((1, 1), np.float32), 1)
    with pytest.raises(TypeError, match="an array must be float64 of 1 dimensions without gaps"):
        pack(Outer(sums, inner, (inner, inner)))

"""Vector operations of the kernels: compiled operations and whole kernels match their numpy versions."""

import numpy as np
import pytest
from numba import njit

from lookahead.builder import register
from lookahead.cpu.kernels.operations import call
from lookahead.cpu.kernels.packed_gemm import plain_kernel, quantize, quantized_kernel
from lookahead.cpu.kernels.processor import FUSED
from lookahead.cpu.kernels.vectors import (
    absolute,
    any_of,
    bits_of,
    broadcast_float,
    broadcast_word,
    dot_u8_i8,
    floats,
    floor,
    from_bits,
    is_nan,
    largest,
    load_bf16,
    load_bytes,
    load_floats,
    load_fp16,
    load_signed_bytes,
    load_totals,
    load_words,
    multiply_add,
    rounded,
    select,
    store,
    store_bytes,
    store_upper_halves,
    sum_of,
    to_floats,
    to_words,
    whole,
    words,
)
from lookahead.cpu.packed import RECORD, TENSOR_TYPES, TYPE_INDEX, kernel_address
from test_packed import NAMES, file_bytes, panels_of, rows_of

GENERATOR = np.random.default_rng(3)
register()


def memory_of(values):
    """An unaligned copy, which vectors must accept."""
    memory = np.zeros(values.nbytes + 4, np.uint8)[4:]
    memory[:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return memory


#: Memory that the operations read: three vectors each of floats, words, bytes, fp16, and floats with NaN.
FLOATS = memory_of((GENERATOR.standard_normal((3, 16)) * 100).astype(np.float32))
WORDS = memory_of(GENERATOR.integers(-(2**31), 2**31, (3, 16)).astype(np.int32))
SMALL_WORDS = memory_of(GENERATOR.integers(-20, 20, (3, 64)).astype(np.int8))
HALVES = memory_of(GENERATOR.standard_normal((3, 32)).astype(np.float16))
WITH_NAN = memory_of(np.array([np.nan, 1, -2, np.inf] * 12, np.float32))


# Each takes (out, a, b, c): addresses of a result and three vectors.
def loads_floats(out, a, b, c):
    store(out, load_floats(a))


def loads_bf16_and_fp16(out, a, b, c):
    store(out, load_bf16(a))
    store(out + 64, load_fp16(a))


def loads_bytes(out, a, b, c):
    store(out, load_bytes(a))
    store(out + 64, load_signed_bytes(a))


def broadcasts(out, a, b, c):
    store(out, broadcast_float(a + 4))
    store(out + 64, broadcast_word(b + 8))
    store(out + 128, floats(0.5))
    store(out + 192, words(-7))


def computes(out, a, b, c):
    x, y = load_floats(a), load_floats(b)
    store(out, x + y)
    store(out + 64, x - 2.5)
    store(out + 128, 3 * y)
    store(out + 192, x / y)
    store(out + 256, -absolute(x))


def rounds(out, a, b, c):
    x = load_floats(a)
    store(out, floor(x))
    store(out + 64, rounded(x))
    store(out + 128, to_words(rounded(x)))
    store(out + 192, to_floats(bits_of(x)))
    store(out + 256, from_bits(bits_of(x) & -65536))


def shifts_and_masks(out, a, b, c):
    x, y = load_words(a), load_words(b)
    store(out, x >> 4 & 0x0F0F0F0F)
    store(out + 64, x << 3 | y)
    store(out + 128, x + y)
    store_bytes(out + 192, x)
    store_upper_halves(out + 224, x)


def selects(out, a, b, c):
    x, y = load_floats(a), load_floats(b)
    store(out, select(x > y, x, y))
    store(out + 64, select(x < 0, bits_of(x), words(1)))
    store(out + 128, select(is_nan(x) | (y > 1), floats(9), x))
    if any_of(is_nan(x)):
        store(out + 192, floats(1))


def reduces(out, a, b, c):
    x, y = load_floats(a), load_words(b)
    store(out, floats(largest(x)))
    store(out + 64, words(sum_of(y)))


def multiplies_bytes(out, a, b, c):
    total = dot_u8_i8(load_totals(c), load_words(a) & 0x0F0F0F0F, load_words(b))
    store(out, whole(dot_u8_i8(total, load_words(b) & 0x03030303, load_words(a))))


def multiplies_and_adds(out, a, b, c):
    store(out, multiply_add(load_floats(a), load_floats(b), load_floats(c)))


def both_ways(function, memory):
    """The 512 bytes that a function writes, uncompiled and compiled."""
    a, results = memory.ctypes.data, []
    for run in (function, njit(function)):
        out = np.zeros(512, np.uint8)
        run(out.ctypes.data, a, a + 64, a + 128)
        results.append(out)
    assert results[0].any()
    return results


@pytest.mark.parametrize(
    ("function", "memory"),
    [
        (loads_floats, FLOATS),
        (loads_floats, WITH_NAN),
        (loads_bf16_and_fp16, HALVES),
        (loads_bytes, WORDS),
        (broadcasts, FLOATS),
        (computes, FLOATS),
        (rounds, FLOATS),
        (shifts_and_masks, WORDS),
        (selects, FLOATS),
        (selects, WITH_NAN),
        (reduces, FLOATS),
        (multiplies_bytes, SMALL_WORDS),
    ],
)
def test_compiled_operations_do_what_their_bodies_say(function, memory):
    np.testing.assert_array_equal(*both_ways(function, memory))


def test_a_sum_of_products_is_rounded_as_the_processor_does():
    uncompiled, compiled = (result[:64].view(np.float32) for result in both_ways(multiplies_and_adds, FLOATS))
    np.testing.assert_allclose(compiled, uncompiled, rtol=1e-5)


@njit
def call_compiled(address, panel, rows, stride, blocks, count, out):
    call(address, panel, rows, stride, blocks, count, out)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_gives_the_same_bits_where_python_runs_it(name):
    tensor_type, inner, count = TENSOR_TYPES[TYPE_INDEX[name]], 256, 3
    table, panels = panels_of(name, file_bytes(name, 16, inner), inner)
    rows, _ = rows_of(np.random.default_rng(2).standard_normal((count, inner)).astype(np.float32))
    arguments = int(table[0, 0]), rows.ctypes.data, rows.shape[1], inner // 32, count
    kernel = (plain_kernel if tensor_type.bits > 8 else quantized_kernel)(tensor_type)
    sums = np.zeros((2, count, 32), np.float32)
    kernel(*arguments, sums[0].ctypes.data)
    call_compiled(kernel_address(tensor_type), *arguments, sums[1].ctypes.data)
    assert sums.any(), panels.shape
    if FUSED:
        np.testing.assert_array_equal(*sums)
    else:
        np.testing.assert_allclose(*sums, rtol=1e-5)


@pytest.mark.parametrize("value", [1.0, 0.0, np.nan])
def test_rows_are_quantized_in_the_same_way_where_python_does_it(value):
    x = np.random.default_rng(4).standard_normal((1, 64)).astype(np.float32) * np.float32(value)
    compiled, _ = rows_of(x)
    uncompiled = compiled.copy()
    uncompiled[:, 256:] = 0
    with np.errstate(invalid="ignore"):  # rows that contain NaN
        quantize(uncompiled.ctypes.data, 2, 0, 2)
    blocks = np.concatenate([compiled, uncompiled])[:, 256:].reshape(2, 2, RECORD)
    np.testing.assert_array_equal(blocks[0], blocks[1])

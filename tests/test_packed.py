"""Packed weights: every block type decodes as in the gguf package, a product equals that of the decoded
weights and quantized rows, and a row is bit-identical alone and among 64 rows."""

import os

import gguf
import numpy as np
import pytest
from numba import njit

from lookahead.builder import register
from lookahead.cpu import packed
from lookahead.cpu.formats import ROW_BLOCK
from lookahead.cpu.kernels.operations import call
from lookahead.cpu.kernels.packed_gemm import microkernel, quantize
from lookahead.cpu.packed import (
    PANEL,
    RECORD,
    TENSOR_TYPES,
    TYPE_INDEX,
    decoder_address,
    kernel_address,
    pack_panels,
)

#: 40 outputs: the last panel of the second group is empty, the one before it half full.
INNER, OUTPUTS = 512, 40
#: All types, or those that test_cpu_widths.py names.
NAMES = os.environ.get("TENSOR_TYPES", " ".join(tensor_type.name for tensor_type in TENSOR_TYPES)).split()
QUANTIZED = [name for name in NAMES if TENSOR_TYPES[TYPE_INDEX[name]].bits <= 8]


register()


@njit
def decode(address, panel, lane, inner, out):
    call(address, panel, lane, inner, out)


@njit
def product(panels, groups, rows, stride, blocks, count, out):
    for group in range(groups):
        for r in range(0, count, ROW_BLOCK):
            block, sums = min(ROW_BLOCK, count - r), out + 128 * (group * count + r)
            microkernel(panels + 32 * group, rows + r * stride, stride, blocks, block, sums)


@njit
def quantize_rows(rows, stride, blocks, count):
    for row in range(count):
        quantize(rows + row * stride, blocks, 0, blocks)


def file_bytes(name, outputs, inner, seed=0):
    """Blocks of one type as stored in a file, (outputs, bytes)."""
    generator = np.random.default_rng(seed)
    tensor_type, number = TENSOR_TYPES[TYPE_INDEX[name]], gguf.GGMLQuantizationType[name]
    values = generator.standard_normal((outputs, inner)).astype(np.float32) / 20
    try:
        return gguf.quantize(values, number).view(np.uint8).reshape(outputs, -1)
    except NotImplementedError:
        # The package only decodes these. Any bytes form a block if its factors are sane.
        raw = generator.integers(0, 256, (outputs * inner // 256, tensor_type.file_bytes), dtype=np.uint8)
        factors = generator.uniform(0.5, 1.5, (len(raw), 2)).astype(np.float16) / np.float16(1000)
        if name == "Q6_K":
            raw[:, 208:] = factors[:, :1].view(np.uint8)
        else:
            raw[:, :4] = factors.view(np.uint8)
        return raw.reshape(outputs, -1)


def decoded(name, raw):
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(len(raw), -1)


def aligned(size):
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def panels_of(name, raw, inner):
    """(table, memory) of a linear layer with these outputs, in whole groups."""
    order = np.full(-(-len(raw) // packed.GROUP) * packed.GROUP, -1)
    order[: len(raw)] = np.arange(len(raw))
    size = TENSOR_TYPES[TYPE_INDEX[name]].panel_bytes(inner)
    memory = aligned(len(order) // PANEL * size).reshape(-1, size)
    pack_panels(TENSOR_TYPES[TYPE_INDEX[name]], raw, order.reshape(-1, PANEL), inner, memory)
    table = np.stack(
        [memory.ctypes.data + size * np.arange(len(memory)), np.full(len(memory), TYPE_INDEX[name])], -1
    )
    return np.ascontiguousarray(table), memory


def rows_of(x):
    """Rows followed by their quantized blocks, and the values those decode to."""
    count, inner = x.shape
    stride = 4 * inner + inner // packed.BLOCK * RECORD
    memory = aligned(count * stride).reshape(count, stride)
    memory[:, : 4 * inner] = x.view(np.uint8)
    quantize_rows(memory.ctypes.data, stride, inner // packed.BLOCK, count)
    records = memory[:, 4 * inner :].reshape(count, -1, RECORD)
    scales = np.ascontiguousarray(records[..., 32:36]).view(np.float32)
    with np.errstate(invalid="ignore"):  # rows with NaN or infinity
        return memory, (records[..., :32].view(np.int8) * scales).reshape(count, inner)


def times(table, memory, count, inner):
    groups = len(table) // 2
    table = table.copy()
    table[:, 1] = [kernel_address(TENSOR_TYPES[place]) for place in table[:, 1]]
    out = np.full((groups, count, packed.GROUP), np.nan, np.float32)
    blocks = inner // packed.BLOCK
    product(table.ctypes.data, groups, memory.ctypes.data, memory.shape[1], blocks, count, out.ctypes.data)
    return out.transpose(1, 0, 2).reshape(count, -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_panel_decodes_to_what_gguf_decodes(name):
    raw = file_bytes(name, OUTPUTS, INNER)
    table, memory = panels_of(name, raw, INNER)
    got = np.zeros((OUTPUTS, INNER), np.float32)
    address = decoder_address(TENSOR_TYPES[TYPE_INDEX[name]])
    for output in range(OUTPUTS):
        panel = int(table[output // PANEL, 0])
        decode(address, panel, output % PANEL, INNER, got[output].ctypes.data)
    np.testing.assert_array_equal(got, decoded(name, raw))
    assert memory.nbytes < 1.04 * raw.nbytes * (64 / OUTPUTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_that_of_decoded_weights_and_quantized_rows(name):
    raw = file_bytes(name, OUTPUTS, INNER)
    table, _memory = panels_of(name, raw, INNER)
    x = np.random.default_rng(1).standard_normal((9, INNER)).astype(np.float32)
    rows, quantized = rows_of(x)
    exact = TENSOR_TYPES[TYPE_INDEX[name]].bits > 8
    wanted = (x if exact else quantized).astype(np.float64) @ decoded(name, raw).T.astype(np.float64)
    got = times(table, rows, len(x), INNER)
    # 512 products and 16 blocks in fp32: 1e-6 of the largest sum; quantizing the rows: 1,000 times as much.
    limit = 2e-6 * np.abs(wanted).max()
    assert np.abs(got[:, :OUTPUTS] - wanted).max() < limit
    assert (got[:, OUTPUTS:] == 0).all()
    if not exact:
        assert np.abs(wanted - x.astype(np.float64) @ decoded(name, raw).T).max() > 100 * limit


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_company(name):
    table, _memory = panels_of(name, file_bytes(name, OUTPUTS, INNER), INNER)
    x = np.random.default_rng(2).standard_normal((64, INNER)).astype(np.float32)
    alone = [times(table, rows_of(x[i : i + 1])[0], 1, INNER)[0] for i in range(64)]
    for count in (1, 2, 3, 7, 8, 16, 31, 32, 33, 64):
        np.testing.assert_array_equal(times(table, rows_of(x[:count])[0], count, INNER), alone[:count])


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_largest_integer_sums_do_not_overflow(name):
    """All quant bytes are 255, and rows have the largest value of either sign."""
    table, memory = panels_of(name, file_bytes(name, PANEL, INNER), INNER)
    tensor_type = TENSOR_TYPES[TYPE_INDEX[name]]
    first = int(table[0, 0]) - memory.ctypes.data
    memory.reshape(-1)[first : first + INNER // packed.BLOCK * tensor_type.quant_bytes] = 255
    weights = np.zeros((PANEL, INNER), np.float32)
    for output in range(PANEL):
        decode(decoder_address(tensor_type), int(table[0, 0]), output, INNER, weights[output].ctypes.data)
    rows, quantized = rows_of(np.stack([np.ones(INNER, np.float32), np.full(INNER, -1, np.float32)]))
    wanted = quantized.astype(np.float64) @ weights.T.astype(np.float64)
    sizes = np.abs(quantized).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    assert (np.abs(times(table, rows, 2, INNER)[:, :PANEL] - wanted) <= 2e-6 * sizes).all()


def test_kinds_may_be_mixed_in_a_group():
    tables = [panels_of(name, file_bytes(name, 16, INNER), INNER) for name in ("Q4_K", "Q6_K")]
    mixed = np.stack([tables[0][0][0], tables[1][0][0]])
    rows, quantized = rows_of(np.random.default_rng(3).standard_normal((5, INNER)).astype(np.float32))
    weights = np.concatenate([decoded(name, file_bytes(name, 16, INNER)) for name in ("Q4_K", "Q6_K")])
    wanted = quantized.astype(np.float64) @ weights.T
    assert np.abs(times(mixed, rows, 5, INNER) - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, -5.0])
def test_rows_of_any_size_are_quantized(value):
    x = np.zeros((1, 64), np.float32)
    x[0, 3], x[0, 40] = value, -value / 3
    _, quantized = rows_of(x)
    np.testing.assert_allclose(quantized, x, atol=abs(value) / 254)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_shows_in_the_product(value):
    """NaN must reach the logits, where decoding rejects it, and must not be rounded to a number."""
    table, _memory = panels_of("Q4_1", file_bytes("Q4_1", OUTPUTS, INNER), INNER)
    x = np.ones((2, INNER), np.float32)
    x[1, 7] = value
    with np.errstate(invalid="ignore"):  # rows_of multiplies the infinite scale by 0
        rows, _ = rows_of(x)
    got = times(table, rows, 2, INNER)
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1, :OUTPUTS]).any()

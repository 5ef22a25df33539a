"""The kernels of packed weights for ARM, run by qemu, have the bits of those for this processor (with AVX2)."""

import ctypes
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lookahead import machine_code, processor
from lookahead.cpu.packed import TENSOR_TYPES
from test_packed import file_bytes, rows_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("qemu-aarch64") and find_spec("ziglang")), reason="needs qemu-user and Zig's wheel"
    ),
    pytest.mark.skipif(processor.level().width != 8, reason="sums are fused multiply-adds of 8 numbers"),
]
INNER, OUTPUTS, ROWS = 768, 37, 13

EMIT = """
import sys
from pathlib import Path
from lookahead import builder, processor
builder.use(next(each for each in processor.LEVELS if each.name == "arm64"), "linux")
for name, entry in builder.all_entries().items():
    if name.startswith(("pack_", "gemm_", "decode_")) and name != "decode_outputs":
        code = builder.target_machine().emit_object(builder.module_of(entry))
        Path(sys.argv[1], f"{name}.o").write_bytes(code)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm64")
    subprocess.run([sys.executable, "-c", EMIT, str(folder)], check=True)
    zig, driver = [sys.executable, "-m", "ziglang"], folder / "driver.o"
    options = ["-target", "aarch64-linux-none", "-O1", "-ffreestanding", "-fno-stack-protector"]
    options += ["-fno-sanitize=all", "-nostdlib", "-c", str(Path(__file__).with_name("arm64.c"))]
    subprocess.run([*zig, "cc", *options, "-o", str(driver)], check=True)
    linked = folder / "program"
    subprocess.run([*zig, "ld.lld", "-static", *map(str, folder.glob("*.o")), "-o", str(linked)], check=True)
    return linked


def both(program, name, number, relative, arguments, *arrays):
    """The memory after a kernel of this processor and after that of ARM. Arrays are arguments by their index."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // 64) * 64 + 4096  # kernels prefetch past the end
    memory = np.zeros(size, np.uint8)
    for place, array in zip(places, arrays, strict=True):
        memory[place : place + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    for index, which in relative.items():
        arguments.insert(index, places[which])
    mask = sum(1 << index for index in relative)
    head = np.array([number, mask, size, *arguments, *[0] * (7 - len(arguments))], np.int64)
    command = ["qemu-aarch64", "-cpu", "max", str(program)]
    done = subprocess.run(command, input=head.tobytes() + memory.tobytes(), capture_output=True, check=True)

    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))
    here = memory.ctypes.data
    prototype(machine_code.address(name))(
        *(value + (here if index in relative else 0) for index, value in enumerate(arguments))
    )
    last = places[-1]
    found = [each[last : last + arrays[-1].nbytes] for each in (memory, np.frombuffer(done.stdout, np.uint8))]
    assert found[0].any()
    return found


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=lambda tensor_type: tensor_type.name)
def test_packing_decoding_and_multiplying_have_the_same_bits(program, tensor_type):
    first = 3 * TENSOR_TYPES.index(tensor_type)
    raw = file_bytes(tensor_type.name, OUTPUTS, INNER)
    order = np.r_[np.arange(OUTPUTS), np.full(11, -1)].astype(np.int64)
    panels = np.zeros((3, tensor_type.panel_bytes(INNER)), np.uint8)
    arguments = [raw.strides[0], 3, INNER, panels.strides[0]]
    ours, theirs = both(
        program, f"pack_{tensor_type.name}", first, {0: 0, 2: 1, 5: 2}, arguments, raw, order, panels
    )
    assert (ours == theirs).all()
    panels = ours.reshape(panels.shape)

    out = np.zeros(INNER, np.float32)
    ours, theirs = both(
        program, f"decode_{tensor_type.name}", first + 1, {0: 0, 3: 1}, [5, INNER], panels[0], out
    )
    assert (ours == theirs).all()

    rows, _ = rows_of(np.random.default_rng(first).standard_normal((ROWS, INNER)).astype(np.float32))
    sums = np.zeros((ROWS, 32), np.float32)
    arguments = [rows.strides[0], INNER // 32, ROWS]
    ours, theirs = both(
        program, f"gemm_{tensor_type.name}", first + 2, {0: 0, 1: 1, 5: 2}, arguments, panels[2], rows, sums
    )
    assert (ours == theirs).all()

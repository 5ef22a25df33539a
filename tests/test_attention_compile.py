"""The kernels compile to machine code for real GPUs; Triton needs a GPU only to run it.

The interpreter accepts more than the compiler does. Run as a script, this file compiles all cases with the
Triton on the path; each version of torch pins a different one. The tests run it in a separate process because
kernels made for the interpreter cannot be compiled.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from lookahead.hf import attention

ROOT = Path(__file__).parents[1]
#: What the metadata of torch's CUDA wheels on PyPI requires, copied because that of the CPU wheels does not have it.
#: pip install --dry-run --no-deps --report - --platform manylinux_2_28_x86_64 --only-binary :all: --target X torch
TORCH, TRITON = "2.13.0", "3.7.1"

#: Shared memory per program in KB, by compute capability: Turing, A100, RTX 30, RTX 40, H100, B200, RTX 50.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
#: (dtype, head size, window and soft-capping, compute capability, rows per tile)
CASES = [
    ("fp16", 128, False, 75, 480),
    ("bf16", 80, True, 80, 480),
    ("bf16", 256, False, 90, 480),
    ("bf16", 128, False, 120, 16),
]
OTHERS = [
    ("fp16", 64, True, 75, 480),
    ("fp16", 256, False, 75, 480),
    ("fp32", 128, False, 75, 16),
    ("bf16", 128, False, 80, 480),
    ("fp32", 64, False, 80, 16),
    *(
        ("bf16", size, extras, capability, 480)
        for capability in (86, 89, 90, 100, 120)
        for size, extras in ((128, False), (256, True))
    ),
]
POINTERS = {"lengths": "*i32", "words": "*i32", "depths": "*i32", "partial": "*fp32", "totals": "*fp32"}
POINTERS |= dict.fromkeys(("positions", "counts", "columns"), "*i64")


def compiled(kernel, constants, capability, dtype, **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # ``slots`` are int32 for trees; exact mode has one per row, in int64 like its other numbers.
    typed = POINTERS | {"slots": "*i64" if "positions" in kernel.arg_names else "*i32"}
    typed |= dict.fromkeys(("query", "key", "value", "out", "sinks"), f"*{dtype}")
    typed |= {"scale": "fp32", "softcap": "fp32"} | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: typed.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_case(dtype, size, extras, capability, members):
    from lookahead.hf.attention import exact, exact_triton
    from lookahead.hf.attention import triton as module

    item, small = {"fp32": 4}.get(dtype, 2), capability < 80
    block = module.blocks(members, size, size, item, small)
    options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
    padded, precision = module._dots(size), "ieee" if item == 4 else "tf32"
    constants = {"D": size, "DV": size, "BLOCK_D": padded, "BLOCK_DV": padded, **block}
    constants |= {"WINDOW": extras, "SOFTCAP": extras, "PRECISION": precision, "UPCAST": False}
    parts = compiled(module._parts, constants, capability, dtype, **options)
    constants = {"DV": size, "BLOCK_DV": padded, "BLOCK_P": module.MERGED, "SINKS": extras}
    merge = compiled(module._merge, constants, capability, dtype)
    block = module.blocks(4, size, size, item, small)
    options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "D": size,
        "DV": size,
        "BLOCK_D": padded,
        "BLOCK_DV": padded,
        **block,
        "DEEPEST": exact.DEPTH,
    }
    constants |= {
        "WINDOW": extras,
        "SOFTCAP": extras,
        "SINKS": extras,
        "PRECISION": precision,
        "UPCAST": False,
    }
    rows = compiled(exact_triton._rows, constants, capability, dtype, **options)
    assert parts.asm["cubin"]
    assert merge.asm["cubin"]
    assert rows.asm["cubin"]
    if capability == 90 and members > 64:
        assert "wgmma" in parts.asm["ptx"]  # this GPU's matrix unit, not the previous generation's
    if capability == 100 and members > 64:
        assert "tcgen05" in parts.asm["ptx"]
    used = max(parts.metadata.shared, rows.metadata.shared)
    print(
        f"sm{capability} {dtype} {size} {members} rows: {used / 1024:.0f} of {SHARED[capability]} KB",
        flush=True,
    )
    assert used <= SHARED[capability] * 1024


@pytest.mark.skipif(not attention.has_triton(), reason="triton is not installed")
def test_the_kernels_compile_with_triton(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # forces compilation, or nothing would be tested
    run = subprocess.run(
        [sys.executable, __file__, "--few"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == len(CASES)


def test_the_page_names_the_triton_that_torch_requires():
    """The tests run with this torch; with a CUDA wheel, its own metadata is read."""
    assert f"torch=={TORCH}" in (ROOT / "constraints.txt").read_text().splitlines()
    found = re.findall(r"\btriton==([\d.]+); platform_system == .Linux.", "\n".join(requires("torch") or ()))
    assert set(found) <= {TRITON}
    page = " ".join((ROOT / "docs" / "attention.md").read_text().split())
    assert f"with triton {TRITON}, which torch {TORCH.removesuffix('.0')} requires" in page


if __name__ == "__main__":
    for case in CASES if "--few" in sys.argv else CASES + OTHERS:
        compile_case(*case)

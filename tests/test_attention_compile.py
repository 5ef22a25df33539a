"""The kernel compiled to machine code for real cards; triton needs no GPU for that, only to run it.

The interpreter takes more than the compiler does. Run as a script this compiles; the tests start it in a
process of its own, because kernels made for the interpreter cannot be compiled.
"""

import os
import subprocess
import sys

import pytest

from lookahead import attention

#: dtype, head size, window and soft-capping, compute capability, shared memory of a program on such a card
CASES = {
    "bf16-128-sm90": ("bf16", 128, False, 90, 227),
    "bf16-80-window-softcap-sm80": ("bf16", 80, True, 80, 163),
    "bf16-256-sm90": ("bf16", 256, False, 90, 227),
}
POINTERS = {"lengths": "*i32", "words": "*i32", "depths": "*i32", "partial": "*fp32", "totals": "*fp32"}
POINTERS |= dict.fromkeys(("slots", "positions", "counts", "columns"), "*i64")


def compiled(kernel, constants, capability, dtype, **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    typed = POINTERS | dict.fromkeys(("query", "key", "value", "out", "sinks"), f"*{dtype}")
    typed |= {"scale": "fp32", "softcap": "fp32"} | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: typed.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(case):
    from lookahead.attention import exact, exact_triton
    from lookahead.attention import triton as module

    dtype, size, extras, capability, shared = CASES[case]
    block = module.blocks(4 * 120, size, size, 2)
    options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
    padded = module._dots(size)
    constants = {"D": size, "DV": size, "BLOCK_D": padded, "BLOCK_DV": padded, **block}
    constants |= {"WINDOW": extras, "SOFTCAP": extras, "PRECISION": "tf32", "UPCAST": False}
    parts = compiled(module._parts, constants, capability, dtype, **options)
    constants = {"DV": size, "BLOCK_DV": padded, "BLOCK_P": 64, "SINKS": extras}
    merge = compiled(module._merge, constants, capability, dtype)
    block = module.blocks(4, size, size, 2)
    options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "D": size,
        "DV": size,
        "BLOCK_D": padded,
        "BLOCK_DV": padded,
        **block,
        "DEEPEST": exact.DEPTH,
    }
    constants |= {"WINDOW": extras, "SOFTCAP": extras, "SINKS": extras, "PRECISION": "tf32", "UPCAST": False}
    rows = compiled(exact_triton._rows, constants, capability, dtype, **options)
    assert parts.asm["cubin"]
    assert merge.asm["cubin"]
    assert rows.asm["cubin"]
    if capability >= 90:
        assert "wgmma" in parts.asm["ptx"]  # the matrix unit of such a card, not that of the one before
    print(f"{case}: {parts.metadata.shared} and {rows.metadata.shared} bytes of shared memory")
    assert max(parts.metadata.shared, rows.metadata.shared) <= shared * 1024


@pytest.mark.skipif(not attention.has_triton(), reason="triton is not installed")
def test_the_kernels_compile_with_triton(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compiled each time, or nothing would be tested
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == len(CASES)


if __name__ == "__main__":
    for case in CASES:
        main(case)

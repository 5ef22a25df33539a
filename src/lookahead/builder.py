"""Compiles entries with numba: into a shared library when the library is installed, or in this process.

    python -m lookahead.builder FOLDER [LEVEL ...]      build libraries; without a level, the one of this processor

No other module uses numba's compiler. A process compiles for one level (``processor.target``), set before the
sources of the kernels are imported. Numba infers types and emits LLVM's code of each function without optimizing it;
the code of an entry, with that of all functions that it calls, is optimized once, for the level. Machine code refers
to nothing but a few functions of the C library.

Of numba's internals this uses:

- ``CPUCodeLibrary``, the code of one function: numba would optimize a function alone and again in each caller
- ``CompilerBase`` and ``DefaultPassBuilder``, to give a function that library; ``_FunctionCompiler``, to compile an
  entry without wrappers, and the calling convention, to call it
- the option ``_nrt``; ``AttributeTemplate``, for the type of packed fields
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import config
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.registry import cpu_target
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_jitable, register_model
from numba.np.arrayobj import populate_array

from . import processor
from .machine_code import (
    PACKAGE,
    SOURCES_SYMBOL,
    UNCOMPILED,
    Array,
    Entry,
    Fields,
    digest_of,
    entries,
    is_current,
    marked,
    path_of,
    with_mathematics,
    words_of,
)
from .processor import LEVELS, Level

#: Division as in numpy. No compiled function creates an array, so none needs numba's reference counting, which would
#: take ten times as long as the work on one node of a tree.
_OPTIONS = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
I64, F64 = ir.IntType(64), ir.DoubleType()


def use(level: Level, system: str = sys.platform) -> None:
    """Compile for this level and system from now on. No source of a kernel may have been imported."""
    processor.compile_for(level, system)
    if level.architecture == processor.architecture():
        config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.features  # for what tests compile


use(processor.target())


def all_entries() -> dict[str, Entry]:
    """All entries of the library, by name; those that take longest to compile come first."""
    from .drafters.adaptive import learn, tree_growth  # noqa: F401, I001
    from .cpu.kernels import forward_pass, head, move, packed_gemm, panels  # noqa: F401
    from .gguf import strings  # noqa: F401
    from .sampling import draws, top  # noqa: F401

    return entries


class _Code(CPUCodeLibrary):  # type: ignore[misc]  # numba has no types
    """The code of one function and of those that it calls, not optimized."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: no machine code here refers to the environment."""


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, which puts the code into a ``_Code``."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _Code(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


class _EntryCompiler(_FunctionCompiler):  # type: ignore[misc]
    """Compiles a function without a wrapper for calls from Python."""

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags


def register() -> None:
    """Let numba know the functions that have been marked since the last call."""
    while marked:
        function, options = marked.pop(0)
        register_jitable(**_OPTIONS, **options, pipeline_class=_Compiler)(function)


# The types of arguments.


class _Words(types.Type):  # type: ignore[misc]
    """The type of packed fields in compiled code; its value is the address of the words."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(f"{fields.record.__module__}.{fields.record.__qualname__}")
        self.fields = fields.fields


@register_model(_Words)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, value_type: Any) -> None:
        super().__init__(manager, value_type, I64.as_pointer())


@infer_getattr
class _WordsTyping(AttributeTemplate):  # type: ignore[misc]
    key = _Words

    def generic_resolve(self, words: Any, name: str) -> Any:
        return _type_of(words.fields[name][0]) if name in words.fields else None


@cache
def _type_of(value_type: Any) -> Any:
    """Numba's type of a value."""
    if isinstance(value_type, Fields):
        return _Words(value_type)
    if isinstance(value_type, tuple):
        return types.Tuple([_type_of(each) for each in value_type])
    if isinstance(value_type, Array):
        return types.Array(
            numba.from_dtype(value_type.dtype), value_type.dimensions, "A" if value_type.strided else "C"
        )
    return types.float64 if value_type is float else types.int64


@lower_getattr_generic(_Words)  # type: ignore[untyped-decorator]
def _emit_field(context: Any, builder: Any, words: Any, address: Any, name: str) -> Any:
    value_type, before = words.fields[name]
    return _emit_read(context, builder, value_type, builder.gep(address, [ir.Constant(I64, before)]))


def _emit_read(context: Any, builder: Any, value_type: Any, address: Any) -> Any:
    """Emit the instructions that load a value from its words."""
    numbers = count()

    def word() -> Any:
        loaded = builder.load(builder.gep(address, [ir.Constant(I64, next(numbers))]))
        # No compiled code writes the words, so LLVM may reuse one load for all uses of the value.
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(value_type, Fields):
        return address
    if isinstance(value_type, tuple):
        parts = []
        for each in value_type:
            parts.append(_emit_read(context, builder, each, address))
            address = builder.gep(address, [ir.Constant(I64, words_of(each))])
        return context.make_tuple(builder, _type_of(value_type), parts)
    return _emit_array(context, builder, value_type, word) if isinstance(value_type, Array) else word()


def _emit_array(context: Any, builder: Any, value_type: Array, word: Any) -> Any:
    """An array from its words, which ``word`` returns one after the other."""
    array = context.make_array(_type_of(value_type))(context, builder)
    data = builder.inttoptr(word(), array.data.type)
    shape = [word() for _ in range(value_type.dimensions)]
    strides = [word() for _ in range(value_type.dimensions)]
    size = ir.Constant(I64, value_type.dtype.itemsize)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


# Compiling an entry.


@global_compiler_lock  # type: ignore[untyped-decorator]
def module_of(entry: Entry) -> Any:
    """LLVM's module of an entry and of all functions that it calls, optimized for ``processor.target``."""
    register()
    *value_types, result = entry.value_types
    arguments = tuple(map(_type_of, value_types))
    compiler = _EntryCompiler(entry.function, cpu_target, _OPTIONS, {}, pipeline_class=_Compiler)
    compiled = compiler.compile(arguments, types.int64 if result is int else types.none)
    module = compiled.library._get_module_for_linking().clone()
    machine = target_machine()
    module.link_in(llvm.parse_assembly(_interface(entry, compiled)))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    _optimize(module, machine)
    return module


def _interface(entry: Entry, compiled: Any) -> str:
    """LLVM's code of the function with an entry's name and C interface, which calls the compiled one."""
    context, description = cpu_target.target_context, compiled.fndesc
    module = context.create_module(entry.name)
    *value_types, result = entry.value_types
    words: list[Any] = []
    for value_type in value_types:
        words += (
            [F64]
            if value_type is float
            else [I64] * (words_of(value_type) if isinstance(value_type, Array) else 1)
        )
    function = ir.Function(module, ir.FunctionType(I64, words), entry.name)
    builder = ir.IRBuilder(function.append_basic_block())
    given = iter(function.args)
    values = []
    for value_type in value_types:
        if isinstance(value_type, Array):
            values.append(_emit_array(context, builder, value_type, lambda: next(given)))
        elif isinstance(value_type, Fields):
            values.append(builder.inttoptr(next(given), I64.as_pointer()))
        else:
            values.append(next(given))
    prototype = context.call_conv.get_function_type(description.restype, description.argtypes)
    native = ir.Function(module, prototype, description.llvm_func_name)
    # Its status is 0: nothing here raises an error.
    _, found = context.call_conv.call_function(
        builder, native, description.restype, description.argtypes, values
    )
    builder.ret(found if result is int else ir.Constant(I64, 0))
    return str(module)


def _optimize(module: Any, machine: Any) -> None:
    """Optimize a module like numba: once cheaply, which prepares loops for the vectorizer, then fully."""
    for speed in (0, 3):
        options = llvm.create_pipeline_tuning_options(speed_level=speed)
        options.loop_vectorization = speed == 3
        options.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, options)
        manager = passes.getModulePassManager()
        if speed == 0:
            manager.add_loop_rotate_pass()
            manager.add_instruction_combine_pass()
            manager.add_jump_threading_pass()
        manager.run(module, passes)


#: What LLVM calls the systems that libraries are built for.
TRIPLES = {"linux": "{}-unknown-linux-gnu", "darwin": "{}-apple-macosx11.0.0", "win32": "{}-pc-windows-gnu"}


def target_machine(**options: Any) -> Any:
    """LLVM's code generator for ``processor.target``."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    level = processor.target()
    triple = llvm.get_process_triple()
    if level in LEVELS:
        name = {"arm64": "aarch64"}.get(level.architecture, level.architecture)
        triple = TRIPLES[processor.target_system()].format(name)
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=level.cpu,
        features=",".join(filter(None, (level.features, level.optional))),
        opt=3,
        reloc="pic",
        **options,
    )


# In this process.


#: One engine for each entry, because LLVM's loses track of constants when it gets more code.
_engines: list[Any] = []


def address(name: str) -> int:
    """The address of an entry, compiled in this process. The code is kept until the process ends."""
    with_mathematics()
    entry = entries.get(name) or all_entries()[name]
    machine = target_machine(codemodel="jitdefault", jit=True)
    _engines.append(llvm.create_mcjit_compiler(module_of(entry), machine))
    _engines[-1].finalize_object()
    found: int = _engines[-1].get_function_address(name)
    return found


# Into a library.

#: Largest number of processes; half of the time is that of the largest entries.
MOST_WORKERS = 4


def build(folder: Path) -> Path:
    """Compile all entries for ``processor.target``, and link them into a library in ``folder``. Returns its path."""
    target = processor.target(), processor.target_system()
    machine = target_machine()
    whole = llvm.parse_assembly(_sources())
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, target) as pool:
        for code in pool.map(_bitcode_of, all_entries()):
            whole.link_in(llvm.parse_bitcode(code))
    # Entries and sources are visible; everything else is not.
    for each in (*whole.functions, *whole.global_variables):
        if not each.is_declaration and each.name not in entries and each.name != SOURCES_SYMBOL:
            each.linkage = "internal"
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, *target)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        emitted, library = Path(place) / "code.o", Path(place) / "library"
        emitted.write_bytes(machine.emit_object(whole))
        _link(emitted, library)
        os.replace(library, path)
    return path


def _begin(level: Level, system: str) -> None:
    """Prepare a process to compile entries."""
    gc.disable()  # it would take a tenth of the time
    use(level, system)


def _bitcode_of(name: str) -> bytes:
    code: bytes = module_of(all_entries()[name]).as_bitcode()
    return code


def _sources() -> str:
    """LLVM's code of a constant: a digest of the sources, and their names."""
    all_entries()
    core = f"{__package__}.core"
    names = [
        str(Path(module.__file__).relative_to(PACKAGE))
        for name, module in sorted(sys.modules.items())
        if name.startswith(f"{__package__}.") and not name.startswith(core) and module.__file__
    ]
    text = bytearray("\n".join((digest_of(names), *names)).encode() + b"\0")
    module = ir.Module()
    constant = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(text)), SOURCES_SYMBOL)
    constant.initializer = ir.Constant(constant.value_type, text)
    constant.global_constant = True
    return str(module)


def _link(code: Path, library: Path) -> None:
    """Link with Zig, which a wheel brings, or with the system's C compiler."""
    system = processor.target_system()
    zig = [sys.executable, "-m", "ziglang"]
    if find_spec("ziglang") is None and shutil.which("cc") and system == sys.platform:
        command = ["cc"]
    elif system == "linux":
        command = [*zig, "ld.lld"]  # LLVM's linker; what else ``zig cc`` links takes half a minute to compile
    else:
        name = {"arm64": "aarch64"}.get(processor.target().architecture, processor.target().architecture)
        command = [*zig, "cc", "-target", f"{name}-{'macos.11.0' if system == 'darwin' else 'windows-gnu'}"]
        if system == "darwin":  # without it, the name is the path of this build
            command.append(f"-Wl,-install_name,{path_of(Path(), processor.target(), system)}")
    if command[0] != "cc" and find_spec("ziglang") is None:
        raise RuntimeError("linking needs Zig or a C compiler; pip install ziglang")
    subprocess.run([*command, "-shared", str(code), "-o", str(library)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lookahead.builder", description="Build the kernels.")
    parser.add_argument("folder", type=Path)
    names = [level.name for level in LEVELS]
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"any of {', '.join(names)}")
    parser.add_argument("--system", choices=TRIPLES, default=sys.platform, help="the system to build for")
    given = parser.parse_intermixed_args()
    wanted = given.levels or [processor.level().name]
    chosen = [level for level in LEVELS if level.name in wanted]
    if UNCOMPILED or len(chosen) < len(set(wanted)):
        parser.error(f"levels must be any of {', '.join(names)}, and NUMBA_DISABLE_JIT unset")
    if len(chosen) == 1:
        path = path_of(given.folder, chosen[0], given.system)
        if given.system == sys.platform and processor.fits(chosen[0]) and is_current(path):
            return
        use(chosen[0], given.system)
        build(given.folder)
        return
    for level in chosen:  # a process compiles for one level
        options = ["--system", given.system, level.name]
        program = (
            f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); from lookahead.builder import main"
        )
        subprocess.run([sys.executable, "-c", f"{program}; main()", str(given.folder), *options], check=True)


if __name__ == "__main__":
    from lookahead.builder import main as in_the_module

    in_the_module()

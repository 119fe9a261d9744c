"""Triton's private interfaces, all of them, in one place: run a kernel on the CPU, count its traffic, compile it.

`triton.jit` decides when a kernel is defined whether it will be interpreted (TRITON_INTERPRET=1). A course needs both
at once: run a kernel here without a GPU and, in the next cell, read what the compiler makes of it. `jit` below decides
at launch, by where the tensors are. Tested on each supported Triton version. Lesson 04 shows what it hides.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from minillm.errors import MinillmError

_ONE_AT_A_TIME = threading.RLock()  # the interpreter keeps its state in module globals
OPTIONS = {"enable_fp_fusion": True}  # a * b + c in one rounding; said, since the default changes after Triton 3.9


class Kernel(JITFunction):
    """A Triton function that is interpreted when its tensors are on the CPU, and compiled when they are on a GPU."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            places = (a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            place = next((p for p in places if p.type != "cpu"), None)
            if place is None:
                return interpret(self, grid, *args, **kwargs)
            elsewhere = place.type == "cuda" and place.index != torch.cuda.current_device()
            with torch.cuda.device(place) if elsewhere else contextlib.nullcontext():  # Triton takes the current one
                return self.run(*args, grid=grid, warmup=False, **(OPTIONS | kwargs))

        return launch


def jit(fn: Callable[..., Any]) -> Kernel:
    """`triton.jit`, except that `kernel[grid](...)` also runs on CPU tensors, in Triton's interpreter.

    fp16, fp32 and integers only: the interpreter computes wrongly in bf16, without an error (seen on 3.6 to 3.9), so
    CPU tensors of that dtype are refused.
    """
    return Kernel(fn)


def interpret(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Run a `jit` or `triton.jit` kernel in the interpreter, program by program. Helpers it calls may be either."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            raise MinillmError(
                "bf16 tensors on the CPU: Triton's interpreter computes wrongly in bf16; use float16 or float32"
            )
    fn = _python(kernel)
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        for around in _around_launches:
            stack.enter_context(around(fn, args, kwargs))
        stack.enter_context(_calls_are_interpreted())
        stack.enter_context(np.errstate(all="ignore"))  # a GPU computes inf and NaN without a word
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # so does its maximum of nothing but NaN
        _interpreted(fn).run(*args, grid=grid, warmup=False, **kwargs)


def _python(kernel: Any) -> Callable[..., Any]:
    fn = getattr(kernel, "fn", kernel)
    if not inspect.isfunction(fn):
        raise MinillmError(f"expected a kernel made with @jit, got {kernel!r:.80}")
    return fn


@functools.cache
def _interpreted(fn: Callable[..., Any]) -> Any:
    return interpreter.InterpretedFunction(fn)


@contextlib.contextmanager
def _calls_are_interpreted() -> Iterator[None]:
    """Let a kernel under interpretation call jitted functions: its own helpers, and `tl.sum`, `tl.cdiv` and the like.

    The interpreter swaps out `triton.language` while a kernel runs. For a nested call it would swap again and not
    swap back, and nothing would compile in this process any more; so everything is swapped here, once, and restored.
    """
    original = JITFunction.__call__
    scope = interpreter._patch_lang(_sees_the_whole_language)
    JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self.fn).rewrite()(*args, **kwargs)
    try:
        yield
    finally:
        JITFunction.__call__ = original
        scope.restore()


tl, core = triton.language, triton.language.core


def _sees_the_whole_language() -> None:
    """The interpreter swaps the modules that it finds in a function's globals: here both."""


def _mend_scalar_index() -> None:
    """Triton 3.6 turns a scalar into an index with int(array of one element), which numpy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def _mend_fp8() -> None:
    """The interpreter rounds to fp8 e4m3 wrongly: 31.75 becomes 16, since a carry out of the mantissa is lost, and
    values below 2^-6 are cut off. torch rounds to the nearest, as GPUs do; reading fp8 is right (seen on 3.6 to 3.9).
    """
    original = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != core.float8e4nv or source not in (core.float16, core.float32):
            return original(values, source, target, rounding)
        return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted


def _mend_scalar_masks() -> None:
    """A comparison of scalars spread over a tile (`mask & (slot >= 0)`) becomes whole numbers, which Triton 3.9's
    interpreter refuses as a mask: "mask has unsupported dtype". It is a mask, so it stays one.
    """
    builder = interpreter.InterpreterBuilder
    original = builder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        tile = original(self, shape, value)
        return interpreter.TensorHandle(tile.data.astype(bool), core.int1) if value.data.dtype == bool else tile

    builder.create_splat = create_splat


_mend_fp8()
_mend_scalar_masks()
if tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7):
    _mend_scalar_index()


# Counting ---------------------------------------------------------------------------------------------


_around_launches: list[Callable[..., Any]] = []


@contextlib.contextmanager
def watch_launches(around: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Enter `around(python function, args, kwargs)`, a context manager, around each interpreted launch."""
    with _ONE_AT_A_TIME:
        _around_launches.append(around)
        try:
            yield
        finally:
            _around_launches.remove(around)


def program() -> tuple[int, ...]:
    """The ids, along three axes, of the program that the interpreter is running. For watchers."""
    return tuple(int(i) for i in interpreter.interpreter_builder.grid_idx)


@contextlib.contextmanager
def watch_memory(loaded: Callable[[Any, Any, Any], None], stored: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call `loaded(addresses, mask, itemsize)` and `stored(...)` before each load and store of interpreted kernels.

    addresses and mask are numpy arrays of one shape: byte addresses (uint64) and which of them are touched. An atomic
    is a load and a store. What raises keeps the access from happening.
    """
    builder = interpreter.InterpreterBuilder
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    load, store, rmw, cas = (getattr(builder, name) for name in names)

    def bytes_of(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        loaded(ptrs.data, mask.data, bytes_of(ptrs))
        return load(self, ptrs, mask, *rest, **named)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        stored(ptrs.data, mask.data, bytes_of(ptrs))
        return store(self, ptrs, value, mask, *rest, **named)

    def watched_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for seen in (loaded, stored):
            seen(ptr.data, mask.data, bytes_of(ptr))
        return rmw(self, op, ptr, value, mask, *rest)

    def watched_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        for seen in (loaded, stored):
            seen(ptr.data, np.ones_like(ptr.data, dtype=bool), bytes_of(ptr))
        return cas(self, ptr, *rest)

    with _ONE_AT_A_TIME:
        for name, watched in zip(names, (watched_load, watched_store, watched_rmw, watched_cas)):
            setattr(builder, name, watched)
        try:
            yield
        finally:
            for name, original in zip(names, (load, store, rmw, cas)):
                setattr(builder, name, original)


# Ahead-of-time compilation -----------------------------------------------------------------------------

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    *,
    aligned: bool = True,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """Compile for a GPU that need not be there. Returns Triton's CompiledKernel; `.asm` holds every stage.

    signature  type of each argument that is not a constant: "*fp16", "i32", "fp32" ...
    constants  value of each `tl.constexpr` argument
    aligned    promise that pointers, and integers named as strides or sizes, are divisible by 16, as launches on
               ordinary tensors do. Without that promise the compiler cannot pipeline loads.
    """
    if isinstance(triton.language.sum, interpreter.InterpretedFunction):
        raise MinillmError("TRITON_INTERPRET is set, so Triton cannot compile in this process; unset it")
    if target not in TARGETS:
        raise MinillmError(f"target {target!r} is not known; use one of {', '.join(TARGETS)}")
    fn = _python(kernel)
    names = list(inspect.signature(fn).parameters)
    if missing := [n for n in names if n not in signature and n not in constants]:
        raise MinillmError(f"{fn.__name__}: no type and no value for {', '.join(missing)}")
    types = {n: "constexpr" if n in constants else signature[n] for n in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if aligned and n in signature and (types[n].startswith("*") or types[n] in ("i32", "i64"))
    }
    source = ASTSource(
        kernel if isinstance(kernel, JITFunction) else JITFunction(fn), types, constexprs=dict(constants), attrs=attrs
    )
    options = OPTIONS | {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


# What was compiled --------------------------------------------------------------------------------------


def source_key(kernel: Any) -> str:
    """Changes when the kernel's source changes, or that of a function it calls."""
    return str((kernel if isinstance(kernel, JITFunction) else JITFunction(_python(kernel))).cache_key)


def nvidia_tool(name: str) -> Callable[..., str] | None:
    """`cuobjdump` or `nvdisasm` as Triton carries them: a function (binary, *options) -> text; None where missing."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not os.access(path, os.X_OK):
        return None

    def run(binary: bytes, *options: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            done = subprocess.run([str(path), *options, file.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MinillmError(f"{name} cannot read what Triton compiled: {done.stderr.strip()[:200]}")
        return done.stdout

    return run


@contextlib.contextmanager
def compilations_in(folder: Path) -> Iterator[None]:
    """Let Triton keep what it compiles in this folder meanwhile, not among what launches compiled."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield

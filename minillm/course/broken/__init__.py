"""Kernels that are wrong on purpose. Tests prove that each one is noticed; lessons 04 to 08 show how it looks.

A `KernelMutant` is an edit of one kernel's source: the smallest slip of that kind. `broken(name)` mounts it, so that
every launcher of that module runs the wrong kernel:

    >>> with broken("flash_prefill/missing_rescale"):
    ...     flash_prefill(...)

The mutants of `kernels/X.py` are in `X.py` here, as `MUTANTS`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError


@dataclass(frozen=True)
class KernelMutant:
    """`old` occurs once in the source of `kernel`, a name in minillm.kernels.<module>; `new` takes its place."""

    name: str
    kernel: str
    old: str
    new: str
    looks: str  # how the mistake shows, in a sentence


def mutants(module: str | None = None) -> dict[str, KernelMutant]:
    """{"module/name": mutant}, of one module or of all."""
    names = [module] if module else sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py"))
    return {f"{n}/{m.name}": m for n in names for m in importlib.import_module(f"{__name__}.{n}").MUTANTS}


@contextlib.contextmanager
def broken(name: str) -> Iterator[KernelMutant]:
    """Run `minillm.kernels.<module>` with one mistake in it. `name` is "module/mutant"."""
    module_name, _, _ = name.partition("/")
    try:
        mutant = mutants(module_name)[name]
    except (KeyError, ImportError):
        raise MinillmError(f"there is no broken kernel {name!r}; there are {', '.join(mutants())}") from None
    module = importlib.import_module(f"minillm.kernels.{module_name}")
    right = getattr(module, mutant.kernel)
    setattr(module, mutant.kernel, mutated(right, mutant))
    try:
        yield mutant
    finally:
        setattr(module, mutant.kernel, right)


def mutated(kernel: Any, mutant: KernelMutant) -> Any:
    """A kernel like `kernel` but for the edit. Triton reads sources, so the edited one is registered as a file's."""
    fn = getattr(kernel, "fn", kernel)
    source = textwrap.dedent(inspect.getsource(fn))
    if source.count(mutant.old) != 1:
        raise MinillmError(
            f"broken kernel {mutant.name!r}: {mutant.old!r} occurs {source.count(mutant.old)} times in "
            f"{mutant.kernel}, expected once; the kernel has changed, so change the mutant"
        )
    source = source.replace(mutant.old, mutant.new)
    filename = f"<broken {mutant.kernel} {mutant.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = types.ModuleType(filename).__dict__
    namespace.update(fn.__globals__)
    exec(compile(source, filename, "exec"), namespace)
    return namespace[mutant.kernel]

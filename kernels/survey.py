"""Compile every variant of every kernel for every target, look at the code, judge it. `minillm kernels check`.

Counts are kept in the user cache under a key of everything they depend on, so that only what changed is compiled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import minillm.kernels
import triton
from minillm.kernels import inspect_code
from minillm.kernels.ahead import Ahead
from minillm.kernels.gates import Verdict, judge
from minillm.kernels.inspect_code import Code, inspect
from minillm.kernels.triton_private import TARGETS, compilations_in, compile_ahead, source_key

from minillm.errors import MinillmError
from minillm.paths import cache_dir


@dataclass(frozen=True)
class Variant:
    """One thing to compile. `case` names an entry of the module's AHEAD, so that another process can find it."""

    module: str
    case: str
    target: str
    aligned: bool


@dataclass(frozen=True)
class Row:
    """One compiled variant and what the gates say of it. code is None where it did not compile."""

    variant: Variant
    code: Code | None
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        return all(v.passed is not False for v in self.verdicts)


def modules(names: Iterable[str] = ()) -> dict[str, dict[str, Ahead]]:
    """{module: {case name: case}} of the kernel modules that list any, or of those named."""
    asked = list(names)
    found: dict[str, dict[str, Ahead]] = {}
    present = sorted(m.name for m in pkgutil.iter_modules(minillm.kernels.__path__))
    for name in asked or present:
        module = importlib.import_module(f"minillm.kernels.{name}") if name in present else None
        cases = getattr(module, "AHEAD", None)
        if cases is None:
            if asked:
                known = ", ".join(modules())
                raise MinillmError(f"no kernel {name!r} lists what to compile; there are {known}")
            continue
        found[name] = {case.name: case for case in cases}
        if len(found[name]) != len(cases):
            raise MinillmError(f"kernel {name}: two cases of AHEAD have the same name")
    return found


def variants(known: dict[str, dict[str, Ahead]], targets: Sequence[str] = ()) -> list[Variant]:
    """Every case on each of its targets; misaligned, which nobody launches for speed, a kernel's first there."""
    if wrong := [t for t in targets if t not in TARGETS]:
        raise MinillmError(f"target {wrong[0]!r} is not known; use one of {', '.join(TARGETS)}")
    first: dict[tuple[int, str], str] = {}
    for cases in known.values():
        for case in cases.values():
            for target in case.targets:
                first.setdefault((id(case.kernel), target), case.name)
    return [
        Variant(module, case.name, target, aligned)
        for module, cases in known.items()
        for case in cases.values()
        for target in case.targets
        if not targets or target in targets
        for aligned in (True, False)
        if aligned or first[id(case.kernel), target] == case.name
    ]


def examine(case: Ahead, target: str, aligned: bool) -> Code:
    """Compile one variant and count. Raises MinillmError where it does not compile."""
    constants, warps, stages = case.on(target)
    with compilations_in(_folder() / "compiled"):
        try:
            compiled = compile_ahead(
                case.kernel, case.signature, constants, target, aligned=aligned, num_warps=warps, num_stages=stages
            )
        except MinillmError:
            raise
        except Exception as error:  # the compiler raises what it likes
            said = " ".join(str(error).split())[-300:] or type(error).__name__
            raise MinillmError(f"does not compile: {said}") from error
    return inspect(compiled, target, case.arguments, case.followed)


def key(case: Ahead, target: str, aligned: bool) -> str:
    """Everything that the counts depend on."""
    parts = (
        triton.__version__, source_key(case.kernel), sorted(case.signature.items()), _plain(case.on(target)), target,
        aligned, sorted(case.followed), Path(inspect_code.__file__).read_text(encoding="utf-8"),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _plain(config: tuple[dict[str, object], int, int]) -> tuple[object, ...]:
    constants, warps, stages = config
    return sorted((k, str(v)) for k, v in constants.items()), warps, stages


def _folder() -> Path:
    return cache_dir() / f"kernels-triton-{triton.__version__}"


def _remembered(case: Ahead, variant: Variant) -> Code | None:
    try:
        text = (_folder() / f"{key(case, variant.target, variant.aligned)}.json").read_text(encoding="utf-8")
        return Code.from_dict(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never compiled, or a broken file: as if never compiled


def _remember(case: Ahead, variant: Variant, code: Code) -> None:
    if code.stack is None:
        return  # a tool was missing: look again next time
    path = _folder() / f"{key(case, variant.target, variant.aligned)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(code.to_dict()), encoding="utf-8")
    part.replace(path)


def _work(variant: Variant) -> Code | str:
    """In a process of its own."""
    return _work_on(modules([variant.module])[variant.module][variant.case], variant)


def _work_on(case: Ahead, variant: Variant) -> Code | str:
    """Compile, count and remember. A fault comes back as its words."""
    try:
        code = examine(case, variant.target, variant.aligned)
    except MinillmError as error:
        return str(error)
    _remember(case, variant, code)
    return code


def check(
    kernels: Sequence[str] = (),
    targets: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Compile and judge. progress(done, total) is called as variants are done. Rows come in the order of `variants`."""
    known = modules(kernels)
    wanted = variants(known, targets)
    if not wanted:
        raise MinillmError("nothing to compile: no case of these kernels names this target")
    found: dict[Variant, Code | str] = {}
    for variant in wanted:
        code = _remembered(known[variant.module][variant.case], variant)
        if code is not None:
            found[variant] = code
    missing = [v for v in wanted if v not in found]
    progress(len(found), len(wanted))
    jobs = min(jobs or os.cpu_count() or 1, len(missing))
    if jobs <= 1:
        for variant in missing:
            found[variant] = _work(variant)
            progress(len(found), len(wanted))
    else:
        # A fresh process each: a fork of one that runs threads may hang.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(_work, variant): variant for variant in missing}
            for future in as_completed(running):
                found[running[future]] = future.result()
                progress(len(found), len(wanted))
    return [row(known[v.module][v.case], v, found[v]) for v in wanted]


def row(case: Ahead, variant: Variant, code: Code | str) -> Row:
    if isinstance(code, str):
        look = "The message is the compiler's own; compile_ahead in a notebook shows all of it"
        return Row(variant, None, (Verdict("compiles", False, code, look),))
    return Row(variant, code, tuple(judge(case, code, variant.aligned)))


def to_dict(found: Row) -> dict[str, object]:
    """A row as plain data."""
    return {
        **dataclasses.asdict(found.variant),
        "passed": found.passed,
        "code": found.code.to_dict() if found.code else None,
        "verdicts": [dataclasses.asdict(v) for v in found.verdicts],
    }

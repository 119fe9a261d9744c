"""What the compiler made of a kernel, as counts: read from its intermediate code, no GPU needed. Lesson 04 reads along.

Each stage shows something else. Triton's first IR (ttir) has the address arithmetic and its widths, the second (ttgir)
the copies inside loops, PTX or AMD assembly the instructions, and the binary what the registers could not hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minillm.kernels.triton_private import nvidia_tool


@dataclass(frozen=True)
class Code:
    """One compiled variant. A count is of instructions in the text, not of how often they run.

    registers   of a thread, 32 bits each
    stack       bytes of a thread outside registers (NVIDIA: stack frame, AMD: scratch), None where no tool could tell
    spills      registers that did not fit, as instructions that save or fetch them (AMD: registers, from its metadata)
    local       loads and stores of memory that only one thread sees: where a spilled register goes
    shared      bytes of shared memory (AMD: LDS) of a block
    tensor_memory  columns of Blackwell's memory for accumulators
    matrix      matrix instructions by kind: mma, wgmma, tcgen05 (NVIDIA), mfma (AMD)
    copies      asynchronous copies by kind: cp.async, bulk (TMA), to_lds (AMD)
    loops       loops; loop_copies, loop_stages: asynchronous copies in them, and tiles that they store to shared
                memory from registers, loaded an iteration ahead (how AMD's pipeline works)
    loads16     loads, and copies, of at least 16 bytes from device memory; loads: all of them; the same for stores
    products64  integer products in 64 bits
    narrow      products in 32 bits of numbers that must be wide, as lines of ttir
    tf32        dots of fp32 operands that are rounded to TF32
    """

    target: str
    registers: int | None = None
    stack: int | None = None
    spills: int | None = None
    local: int = 0
    shared: int = 0
    tensor_memory: int = 0
    matrix: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    loops: int = 0
    loop_copies: int = 0
    loop_stages: int = 0
    loads16: int = 0
    loads: int = 0
    stores16: int = 0
    stores: int = 0
    products64: int = 0
    narrow: tuple[str, ...] = ()
    tf32: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"narrow": list(self.narrow)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Code:
        return cls(**{**data, "narrow": tuple(data["narrow"])})


def inspect(compiled: Any, target: str, arguments: Sequence[str], wide: Iterable[str] = ()) -> Code:
    """Count. compiled: what `compile_ahead` returned; arguments: names of those that are not constants, in order."""
    asm = compiled.asm
    found: dict[str, Any] = {
        "target": target,
        "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        **read_ttir(asm["ttir"], arguments, wide),
        **read_ttgir(asm["ttgir"]),
    }
    if "amdgcn" in asm:
        return Code(**found, **read_amdgcn(asm["amdgcn"]))
    return Code(**found, **(ptx := read_ptx(asm["ptx"])), **read_cubin(asm["cubin"], ptx["local"]))


# PTX and the NVIDIA binary -------------------------------------------------------------------------

_MATRIX = (
    ("mma", re.compile(r"\bmma\.sync")),
    ("wgmma", re.compile(r"\bwgmma\.mma_async")),
    ("tcgen05", re.compile(r"\btcgen05\.mma")),
)
_ACCESS = re.compile(r"\b(ld|st)\.(?:(?:volatile|relaxed|acquire|weak)\.)?(global|local)((?:\.[\w:]+)*)")
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\S*\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
_BULK = re.compile(r"\bcp\.async\.bulk\.(?:tensor\S*\.)?\S*global")


def read_ptx(text: str) -> dict[str, Any]:
    """Matrix instructions, asynchronous copies and accesses of device memory in PTX."""
    matrix, copies = Counter[str](), Counter[str]()
    wide, count = Counter[str](), Counter[str]()
    local = 0
    for line in text.splitlines():
        line = line.partition("//")[0]
        for kind, pattern in _MATRIX:
            matrix[kind] += len(pattern.findall(line))
        for size in _CP_ASYNC.findall(line):
            copies["cp.async"] += 1
            wide["ld"] += int(size, 0) >= 16
            count["ld"] += 1
        if _BULK.search(line):
            copies["bulk"] += 1
            wide["ld"] += 1
            count["ld"] += 1
        for verb, space, suffix in _ACCESS.findall(line):
            local += space == "local"
            if space == "global":
                count[verb] += 1
                wide[verb] += _ptx_bytes(suffix) >= 16
    return {
        "matrix": dict(+matrix), "copies": dict(+copies), "local": local, "loads16": wide["ld"], "loads": count["ld"],
        "stores16": wide["st"], "stores": count["st"],
    }  # fmt: skip


def _ptx_bytes(suffix: str) -> int:
    """`.v4.b32` is 16 bytes."""
    vector = re.search(r"\.v(\d)", suffix)
    bits = re.findall(r"\.[busf](\d+)", suffix)
    return (int(vector[1]) if vector else 1) * int(bits[-1] if bits else 0) // 8


_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")


def read_cubin(binary: bytes, local: int = 0) -> dict[str, Any]:
    """Registers, stack and spills. Only a kernel with a stack is disassembled: without one nothing can spill.

    local: accesses of local memory that PTX already asks for, which are arrays of the program and no spills.
    """
    cuobjdump, nvdisasm = nvidia_tool("cuobjdump"), nvidia_tool("nvdisasm")
    if cuobjdump is None:
        return {"registers": None, "stack": None, "spills": None}
    found = _RESOURCES.search(cuobjdump(binary, "--dump-resource-usage"))
    if found is None:
        return {"registers": None, "stack": None, "spills": None}
    registers, stack = int(found[1]), int(found[2])
    spills: int | None = 0
    if stack:
        spills = None if nvdisasm is None else max(0, len(_LOCAL.findall(nvdisasm(binary, "-c"))) - local)
    return {"registers": registers, "stack": stack, "spills": spills}


# AMD assembly --------------------------------------------------------------------------------------

_GCN = re.compile(r"^\s+(v_s?mfma\w*|(?:global|buffer|flat|scratch)_(?:load|store)\w*)([^;\n]*)", re.MULTILINE)
_DWORDS = re.compile(r"x(\d)$")


def read_amdgcn(text: str) -> dict[str, Any]:
    """The same of AMD's assembly, and what its metadata says of registers, scratch and spills."""
    meta = {k: int(v) for k, v in re.findall(r"^\s+\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    matrix, copies = Counter[str](), Counter[str]()
    wide, count = Counter[str](), Counter[str]()
    local = 0
    for name, rest in _GCN.findall(text):
        if "mfma" in name:
            matrix["mfma"] += 1
        elif name.startswith("scratch"):
            local += 1
        else:
            verb = "ld" if "_load" in name else "st"
            dwords = _DWORDS.search(name)
            to_lds = "_lds_" in name or re.search(r"\blds\b", rest) is not None
            copies["to_lds"] += verb == "ld" and to_lds
            count[verb] += 1
            wide[verb] += dwords is not None and int(dwords[1]) >= 4
    return {
        "matrix": dict(matrix), "copies": dict(+copies), "local": local, "loads16": wide["ld"], "loads": count["ld"],
        "stores16": wide["st"], "stores": count["st"], "registers": meta.get("vgpr_count"),
        "stack": meta.get("private_segment_fixed_size"), "spills": meta.get("vgpr_spill_count"),
    }  # fmt: skip


# Triton's IR ---------------------------------------------------------------------------------------

_LOC = re.compile(r"\s+loc\((?:[^()]|\([^()]*\))*\)\s*$")
_NAME = re.compile(r"%[\w.]+(?:#\d+)?")
_LOOP = re.compile(r"\bscf\.(?:for|while)\b")
_ASYNC = re.compile(r"\b(?:async_copy_global_to_local|async_tma_copy_global_to_local|async_tma_gather)\b")
_TO_LDS = re.compile(r"\bbuffer_load_to_local\b")


def read_ttgir(text: str) -> dict[str, Any]:
    """Loops, and what is copied inside them."""
    loops = copies = stages = 0
    depth, opened = 0, list[int]()  # nesting of braces; the depths at which loops began
    for line in text.splitlines():
        line = _LOC.sub("", line)
        if opened:
            copies += len(_ASYNC.findall(line)) + len(_TO_LDS.findall(line))
            stages += "ttg.local_store" in line
        if _LOOP.search(line) and line.rstrip().endswith("{"):
            loops += 1
            opened.append(depth)
        depth += line.count("{") - line.count("}")
        while opened and depth <= opened[-1]:
            opened.pop()
    return {"loops": loops, "loop_copies": copies, "loop_stages": stages}


_STOPS = ("arith.cmpi", "arith.remsi", "arith.remui", "tt.store", "tt.atomic")
_DOT = re.compile(r"tt\.dot .*inputPrecision = tf32.*:\s*tensor<[\dx]*xf32[,>]")


def read_ttir(text: str, arguments: Sequence[str], wide: Iterable[str] = ()) -> dict[str, Any]:
    """Products of numbers that must be wide, by width; and dots in TF32.

    An integer argument named in `wide` is followed through the program, and what a pointer argument named there
    points to: block ids of a table. A product of such a number in 32 bits wraps in a pool of more than 2^31 elements.
    """
    lines = [_LOC.sub("", line).strip() for line in text.splitlines()]
    header = next((line for line in lines if line.startswith("tt.func public")), "")
    names = re.findall(r"(%[\w.]+): (!tt\.ptr|[if]\d)", header)
    wide = set(wide)
    chosen = {value: kind for (value, kind), name in zip(names, arguments) if name in wide}
    numbers = {value for value, kind in chosen.items() if kind != "!tt.ptr"}
    tables = {value for value, kind in chosen.items() if kind == "!tt.ptr"}
    narrow: dict[int, str] = {}
    for _ in range(4):  # a loop carries values back to its start: again until nothing is new
        before = len(numbers), len(tables)
        _follow(lines, numbers, tables, narrow)
        if before == (len(numbers), len(tables)):
            break
    products = [line for line in lines if "arith.muli" in line and _is_integer(line, 64)]
    return {
        "products64": len(products),
        "narrow": tuple(narrow[i] for i in sorted(narrow)),
        "tf32": sum(_DOT.search(line) is not None for line in lines),
    }


def _is_integer(line: str, bits: int) -> bool:
    """Whether the type at the end of an operation is a whole number of so many bits, or a tensor of them."""
    return re.search(rf"(?:\bi{bits}|xi{bits}>)\s*$", line) is not None


def _follow(lines: list[str], numbers: set[str], tables: set[str], narrow: dict[int, str]) -> None:
    """One pass: which values come from `numbers`, which pointers from `tables`; `narrow` collects 32-bit products."""
    open_blocks: list[tuple[list[str], list[str]]] = []  # results and carried values of each open loop or branch

    def pass_on(source: str, *goals: str) -> None:
        for group in (numbers, tables):
            if source in group:
                group.update(goals)

    for i, line in enumerate(lines):
        left, equals, right = line.partition(" = ")
        results = _results(left) if equals and left.startswith("%") else []
        carried = re.findall(r"(%[\w.]+) = (%[\w.]+(?:#\d+)?)", right)
        operation = right if results else line
        operands = _NAME.findall(operation.partition(" : ")[0])
        if line.endswith("{") and not line.startswith("tt.func"):
            inner = [name for name, _ in carried][-len(results) :] if results else []
            for name, value in carried:
                pass_on(value, name)
            open_blocks.append((results, inner))
        elif operation.startswith("scf.yield") and open_blocks:
            outer, inner = open_blocks[-1]
            for k, value in enumerate(operands):
                pass_on(value, *outer[k : k + 1], *inner[k : k + 1])
        elif operation.startswith("tt.load"):
            if operands and operands[0] in tables:
                numbers.update(results)
        elif operation.startswith("tt.addptr"):
            if operands and operands[0] in tables:
                tables.update(results)
        elif results and not operation.startswith(_STOPS):
            if any(x in numbers for x in operands):
                numbers.update(results)
                if operation.startswith(("arith.muli", "arith.shli")) and _is_integer(line, 32):
                    narrow[i] = line
            if any(x in tables for x in operands):
                tables.update(results)
        if line.startswith("}") and not line.endswith("{") and open_blocks:
            open_blocks.pop()


def _results(left: str) -> list[str]:
    """`%a` names one value, `%a:3` names `%a#0` to `%a#2`."""
    name, colon, count = left.strip().partition(":")
    return [f"{name}#{k}" for k in range(int(count))] if colon else [name]

"""What compiled code must look like before anyone measures it. Lesson 04 reads the verdicts.

A gate looks at counts (`inspect_code.Code`), never at a clock. A verdict is `ok`, a failure that says what was found
and where to look, or an exception stated in words: some things cannot be had, as asynchronous copies of addresses
that may be odd.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.kernels.ahead import Ahead
from minillm.kernels.inspect_code import Code

from minillm.errors import MinillmError

KIB = 1024
# Bytes of shared memory that one block can have. NVIDIA CUDA C++ Programming Guide, table of compute capabilities
# (163 KiB at 8.0, 227 KiB at 9.0 and 10.0); AMD CDNA 3 ISA: 64 KiB of LDS in a compute unit.
SHARED = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
TENSOR_MEMORY = 512  # columns; only Blackwell has them

KINDS = ("elementwise", "reduction", "prefill", "decode", "matvec", "matmul")
# Which matrix instructions count. A prefill tile is large enough for the newest ones; a decode tile has the few rows
# of one query group, and those need more.
_ANY: dict[str, tuple[str, ...]] = {
    "sm_80": ("mma",), "sm_90": ("mma", "wgmma"), "sm_100": ("mma", "tcgen05"), "gfx942": ("mfma",),
}  # fmt: skip
MATRIX: dict[str, dict[str, tuple[str, ...]]] = {
    "prefill": {"sm_80": ("mma",), "sm_90": ("wgmma",), "sm_100": ("tcgen05",), "gfx942": ("mfma",)},
    "decode": _ANY,
    "matmul": _ANY,
}


@dataclass(frozen=True)
class Verdict:
    """passed: True, False, or None for an exception, whose reason is then `found`."""

    gate: str
    passed: bool | None
    found: str = ""
    look: str = ""

    def __str__(self) -> str:
        if self.passed is False:
            return f"{self.gate}: {self.found}. {self.look}"
        return f"{self.gate}: {'ok' if self.passed else self.found}"


def judge(case: Ahead, code: Code, aligned: bool) -> list[Verdict]:
    """One verdict for each gate."""
    if case.kind not in KINDS:
        raise MinillmError(f"{case.name}: kind {case.kind!r} is not known; use one of {', '.join(KINDS)}")
    return [
        registers_suffice(code, aligned),
        shared_memory_fits(code),
        matrix_instructions(case.kind, code),
        asynchronous_copies(case.loops, code, aligned),
        accesses_of_16_bytes(case.kind, code, aligned),
        offsets_of_64_bits(code),
        exact_products(code),
    ]


def registers_suffice(code: Code, aligned: bool) -> Verdict:
    """No stack, no spills, no local loads: what a thread cannot keep in registers goes to memory and back."""
    gate = "registers suffice"
    if code.stack is None:
        return Verdict(gate, None, "not checked: this Triton carries no cuobjdump, which reads the stack's size")
    if not code.stack and not code.spills and not code.local:
        return Verdict(gate, True)
    spills = "" if code.spills is None else f", {code.spills} spills"
    found = f"{code.stack} bytes of stack a thread{spills}, {code.local} local accesses with {code.registers} registers"
    if not aligned:
        return Verdict(gate, None, f"{found}; allowed here: without alignment every element has an address of its own")
    return Verdict(gate, False, found, "Take a smaller tile, more warps or fewer stages")


def shared_memory_fits(code: Code) -> Verdict:
    gate, most = "shared memory fits", SHARED[code.target]
    if code.shared > most:
        found = f"{code.shared} bytes of shared memory a block, {code.target} has {most}"
        return Verdict(gate, False, found, "Take a smaller tile or fewer stages: tiles times stages are held at once")
    if code.tensor_memory > TENSOR_MEMORY:
        found = f"{code.tensor_memory} columns of tensor memory, {code.target} has {TENSOR_MEMORY}"
        return Verdict(gate, False, found, "Take a smaller accumulator")
    return Verdict(gate, True)


def matrix_instructions(kind: str, code: Code) -> Verdict:
    gate = "matrix instructions"
    if kind not in MATRIX:
        return Verdict(gate, None, f"not asked of {kind} kernels: they multiply no matrices")
    wanted = MATRIX[kind][code.target]
    if any(code.matrix.get(name) for name in wanted):
        return Verdict(gate, True)
    have = ", ".join(f"{n} {name}" for name, n in code.matrix.items() if n) or "none"
    look = "Is there a tl.dot, of 16-bit operands, with at least 16 rows"
    look += " (64 and four warps for wgmma, 128 for tcgen05)?" if kind == "prefill" else "?"
    return Verdict(gate, False, f"{have}, wanted {' or '.join(wanted)} on {code.target}", look)


def asynchronous_copies(loops: bool, code: Code, aligned: bool) -> Verdict:
    """Loads of the next tiles must be under way while this one is multiplied."""
    gate = "copies run ahead in loops"
    if not loops:
        return Verdict(gate, None, "not asked: no loop over tiles")
    if not code.loops:
        return Verdict(gate, False, "no loop", "The case says `loops`, and the kernel has none: correct the case")
    if not aligned:
        return Verdict(gate, None, "not asked without alignment: a copy of 2 bytes cannot be asynchronous")
    if code.target.startswith("gfx"):
        if code.loop_copies or code.loop_stages:
            return Verdict(gate, True)
        found = "no tile of a loop is loaded an iteration ahead (through registers, as this target does)"
    else:
        if code.loop_copies:
            return Verdict(gate, True)
        found = f"no asynchronous copy in {code.loops} loops"
    look = "Has it num_stages of 2 or more, loads that feed a dot, addresses known to be multiples of 16?"
    return Verdict(gate, False, found, look)


def accesses_of_16_bytes(kind: str, code: Code, aligned: bool) -> Verdict:
    gate = "16-byte accesses"
    if not aligned:
        return Verdict(gate, None, "not asked without alignment: an element at an odd address is loaded alone")
    look = "Is the last dimension's stride known to be 1, and a tile at least 8 elements a thread?"
    if not code.loads16:
        return Verdict(gate, False, f"none of {code.loads} loads has 16 bytes", look)
    if kind == "elementwise" and code.stores and not code.stores16:
        return Verdict(gate, False, f"none of {code.stores} stores has 16 bytes", look)
    return Verdict(gate, True)


def offsets_of_64_bits(code: Code) -> Verdict:
    gate = "offsets of 64 bits"
    if not code.narrow:
        return Verdict(gate, True)
    found = f"{len(code.narrow)} products of 32 bits reach addresses, as `{code.narrow[0][:100]}`"
    return Verdict(gate, False, found, "Widen one side before the product: x.to(tl.int64) * stride")


def exact_products(code: Code) -> Verdict:
    gate = "fp32 stays fp32"
    if not code.tf32:
        return Verdict(gate, True)
    found = f"{code.tf32} dots of fp32 operands keep 10 bits of each (TF32)"
    return Verdict(gate, False, found, 'Give tl.dot input_precision="ieee"')

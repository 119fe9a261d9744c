"""Wrong versions of kernels/swiglu.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "halves_swapped", "_swiglu",
        "silu = gate / (1 + tl.exp(-gate))\n    tl.store(OUT + row * I + columns, (silu * up)",
        "silu = up / (1 + tl.exp(-up))\n    tl.store(OUT + row * I + columns, (silu * gate)",
        "silu is taken of the other half: numbers of a plausible size, and a model that says nothing",
    ),
    KernelMutant(
        "mask_off_by_one", "_swiglu", "columns < I", "columns < I - 1", "the last column of each row is not written",
    ),
    KernelMutant(
        "stale_tail", "_swiglu", "columns < I", "columns < (I + 7) // 8 * 8",
        "the width is rounded up to whole 16-byte accesses: each row runs into the next, the last out of the tensor",
    ),
    KernelMutant(
        "exp_overflow", "_swiglu", "gate / (1 + tl.exp(-gate))", "gate * tl.exp(gate) / (1 + tl.exp(gate))",
        "the same formula on paper; past a gate of 88 it is inf / inf, NaN",
    ),
    KernelMutant(
        "no_up", "_swiglu", "tl.load(X + row * stride_x + I + columns", "tl.load(X + row * stride_x + columns",
        "the gate is multiplied with itself",
    ),
    KernelMutant(
        "int32_offset", "_swiglu", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        "right on small activations; past 2^31 elements the row's offset wraps and another row is read",
    ),
]  # fmt: skip

"""Wrong versions of kernels/rms_norm.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "stale_tail", "_rms_norm",
        "+ columns, mask=inside, other=0.0).to(tl.float32)\n    if", "+ columns).to(tl.float32)\n    if",
        "the load has no mask, so a neighbour's squares are summed too: only widths that are powers of two survive",
    ),
    KernelMutant(
        "mask_off_by_one", "_rms_norm", "columns < D", "columns < D - 1",
        "the last column is neither summed nor written",
    ),
    KernelMutant(
        "mean_over_block", "_rms_norm", "axis=0) / D", "axis=0) / BLOCK",
        "the sum is divided by the padded width, so rows come out too large wherever the width is no power of two",
    ),
    KernelMutant(
        "int32_offset", "_rms_norm", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        "right on small activations; past 2^31 elements the row's offset wraps and another row is overwritten",
    ),
    KernelMutant(
        "residual_not_rounded", "_rms_norm", "h = rounded.to(tl.float32)", "h = h",
        "the norm is taken of a sum that nobody stores, so fused and unfused engines drift apart in fp16",
    ),
]  # fmt: skip

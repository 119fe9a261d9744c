"""Wrong versions of kernels/quant_linear.py."""

from minillm.course.broken import KernelMutant

_SCALE = " * tl.load(SCALE + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]"

MUTANTS = [
    KernelMutant(
        "matvec_scale_dropped", "_int8_matvec", _SCALE, "",
        "codes are taken for weights: results are hundreds of times too large",
    ),
    KernelMutant(
        "matmul_scale_of_the_neighbour", "_int8_matmul",
        "SCALE + n, mask=n < n_out", "SCALE + n + 1, mask=n + 1 < n_out",
        "each output gets the scale of the next one, and the last is 0",
    ),
    KernelMutant(
        "matvec_stale_tail", "_int8_matvec", "mask=(row < N)[:, None] & (k < n_in)[None, :], other=0.0)",
        "mask=(row < N)[:, None] & (k <= n_in)[None, :], other=0.0)",
        "x is read past its end, and NaN times the weight 0 is NaN: only sizes that the tile divides survive",
    ),
    KernelMutant(
        "matmul_mask_off_by_one", "_int8_matmul", "(n < n_out)[:, None]", "(n < n_out - 1)[:, None]",
        "the last output is 0 for every token",
    ),
    KernelMutant(
        "matmul_sum_restarts", "_int8_matmul", "total = tl.dot(x, tl.trans(w.to(x.dtype)), total,",
        "total = tl.dot(x, tl.trans(w.to(x.dtype)), tl.zeros_like(total),",
        "only the last tile of inputs counts: right while the inputs fit one tile",
    ),
    KernelMutant(
        "unsigned_codes", "_int8_matvec", "w.to(tl.float32)", "w.to(tl.uint8).to(tl.float32)",
        "negative weights come out 256 steps too large",
    ),
    KernelMutant(
        "int32_offset", "_int8_matmul", "n.to(tl.int64) * stride_w", "n * stride_w",
        "right on small weights; past 2^31 elements the offset wraps and other weights are read",
    ),
    KernelMutant(
        "tf32", "_int8_matmul", 'input_precision="ieee"', 'input_precision="tf32"',
        "fp32 activations keep 10 bits in the product: no error on a CPU, a thousand times the error on a GPU",
    ),
]  # fmt: skip

"""Wrong versions of kernels/quant_int4.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "scale_dropped", "_weight_tile", "* scale[:, :, None] +", "* 1.0 +",
        "codes are taken for weights: results are hundreds of times too large",
    ),
    KernelMutant(
        "zero_dropped", "_weight_tile", " + zero[:, :, None]", "",
        "every group is taken to be centred: small errors everywhere, and text that slowly goes wrong",
    ),
    KernelMutant(
        "nibbles_swapped", "_weight_tile", "tl.interleave(packed & 15, packed >> 4)",
        "tl.interleave(packed >> 4, packed & 15)", "each pair of neighbouring inputs has its weights exchanged",
    ),
    KernelMutant(
        "sign_of_the_code", "_weight_tile", "grouped - 8.0", "grouped",
        "every weight is eight steps too large: the middle code must stand for the zero",
    ),
    KernelMutant(
        "group_off_by_one", "_weight_tile", "start // GROUP + tl.arange", "start // GROUP + 1 + tl.arange",
        "each group is scaled as its right neighbour, and the last as nothing",
    ),
    KernelMutant(
        "group_of_the_tile", "_weight_tile", "start // GROUP + tl.arange(0, BLOCK_G)",
        "start // GROUP + 0 * tl.arange(0, BLOCK_G)",
        "one scale for the whole tile: right only while a tile is one group",
    ),
    KernelMutant(
        "matvec_stale_tail", "_int4_matvec", "inside = (row < N)[:, None] & (k < n_in)[None, :]",
        "inside = (row < N)[:, None] & (k <= n_in)[None, :]",
        "x is read past its end, and NaN times the weight 0 is NaN: only sizes that the tile divides survive",
    ),
    KernelMutant(
        "matmul_mask_off_by_one", "_int4_matmul", "mask=(row < N)[:, None] & (n < n_out)[None, :]",
        "mask=(row < N)[:, None] & (n < n_out - 1)[None, :]", "the last output is never written",
    ),
    KernelMutant(
        "matmul_sum_restarts", "_int4_matmul", "total = tl.dot(x, tl.trans(w.to(x.dtype)), total,",
        "total = tl.dot(x, tl.trans(w.to(x.dtype)), tl.zeros_like(total),",
        "only the last tile of inputs counts: right while the inputs fit one tile",
    ),
    KernelMutant(
        "int32_offset", "_int4_matmul", "row.to(tl.int64)[:, None] * stride_x", "row[:, None] * stride_x",
        "right on small activations; past 2^31 elements the offset wraps and another token's are read",
    ),
    KernelMutant(
        "tf32", "_int4_matmul", 'input_precision="ieee"', 'input_precision="tf32"',
        "fp32 activations keep 10 bits in the product: no error on a CPU, a thousand times the error on a GPU",
    ),
]  # fmt: skip

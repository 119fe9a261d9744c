"""Wrong versions of kernels/rope_kv.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "first_half_only", "_rope_kv", "is_value[:, None], y, y * cos + x * sin", "is_value[:, None], y, y",
        "the second half is not turned: the first tokens look right, longer prompts turn to noise",
    ),
    KernelMutant(
        "neighbours_paired", "_rope_kv",
        "at = QKV + token * qkv_token + head[:, None] * qkv_head + pair[None, :]\n"
        "    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)\n"
        "    y = tl.load(at + HALF,",
        "at = QKV + token * qkv_token + head[:, None] * qkv_head + 2 * pair[None, :]\n"
        "    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)\n"
        "    y = tl.load(at + 1,",
        "pairs (2 i, 2 i + 1), as the paper has them, instead of (i, i + d/2), as the checkpoints do",
    ),
    KernelMutant(
        "bent", "_rope_kv", "x * cos - y * sin", "x * cos + y * sin",
        "one sign is wrong, so a pair is not turned but bent: its length changes",
    ),
    KernelMutant(
        "values_turned", "_rope_kv",
        "tl.where(is_value[:, None], x, x * cos - y * sin)", "(x * cos - y * sin)",
        "values are rotated too, so what is read depends on where it was written",
    ),
    KernelMutant(
        "offset_reset", "_rope_kv", "tl.load(POSITIONS + token)", "token",
        "the position is the row's index in the step: right for a first chunk, wrong for every later one",
    ),
    KernelMutant(
        "padding_written", "_rope_kv", "real = slot >= 0", "real = slot >= -1",
        "a padding token's keys, values and scales land before the first page: someone else's memory",
    ),
    KernelMutant(
        "stale_tail", "_rope_kv", "(pair < HALF)[None, :]", "(pair < BLOCK_HALF)[None, :]",
        "where half a head is no power of two, a head writes into the next one",
    ),
    KernelMutant(
        "mask_off_by_one", "_rope_kv", "is_query = head < num_heads", "is_query = head <= num_heads",
        "the first key is taken for a query too: it lands where the next token's first query belongs, or after the end",
    ),
    KernelMutant(
        "int32_offset", "_rope_kv", "slot // BLOCK_SIZE", "(slot // BLOCK_SIZE).to(tl.int32)",
        "right in small pools; past 2^31 elements a page's offset wraps and another page is overwritten",
    ),
    KernelMutant(
        "scale_dropped", "_rope_kv", "tl.store(V_SCALE + scales, scale, mask=is_value)", "",
        "values are quantised and their scale is not kept",
    ),
    KernelMutant(
        "scale_of_another_head", "_rope_kv", "place * scale_slot + kv *", "place * scale_slot + (kv_heads - 1 - kv) *",
        "each head is read with another's scale: loud heads go quiet, quiet ones loud",
    ),
    KernelMutant(
        "scale_of_one_half", "quantize_heads",
        "tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))", "tl.max(tl.abs(first), axis=1)",
        "entries of the second half beyond the first half's largest do not fit in eight bits",
    ),
    KernelMutant(
        "zero_divided", "quantize_heads", "amax = tl.maximum(amax, FLOOR)", "amax = amax",
        "a head of zeros becomes 0 * inf: NaN in every later step that reads it",
    ),
    KernelMutant(
        "cut_off", "quantize_heads", "tl.floor(first + 0.5), tl.floor(second + 0.5)", "first, second",
        "conversion to int8 cuts off instead of rounding: twice the error, and always towards zero",
    ),
]  # fmt: skip

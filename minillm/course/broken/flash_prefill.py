"""Wrong versions of kernels/flash_prefill.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "missing_rescale", "_fold", "acc = acc * rescale[:, None]", "acc = acc",
        "the sum so far keeps an old maximum: right while all keys fit one tile, wrong once a larger score comes later",
    ),
    KernelMutant(
        "sum_not_rescaled", "_fold", "l = l * rescale + tl.sum(p, 1)", "l = l + tl.sum(p, 1)",
        "the denominator keeps an old maximum: weights no longer add up to 1",
    ),
    KernelMutant(
        "no_maximum", "_fold", "m_new = tl.maximum(m, tl.max(scores, 1) * scale)", "m_new = tl.max(scores, 1) * scale",
        "each tile's own maximum stands for all: a row that a tile hides entirely becomes NaN",
    ),
    KernelMutant(
        "scale_dropped", "_fold", "p = tl.exp2(scores * scale - m_new[:, None])",
        "p = tl.exp2(scores - m_new[:, None])",
        "scores are not divided by sqrt(d), so the softmax is too sharp and no longer sums to what l holds",
    ),
    KernelMutant(
        "natural_exponent", "_fold", "p = tl.exp2(scores * scale - m_new[:, None])",
        "p = tl.exp(scores * scale - m_new[:, None])",
        "the scale already holds log2(e): with exp the softmax is sharper than it should be, and looks plausible",
    ),
    KernelMutant(
        "mask_off_by_one", "_own_tile", "keys[None, :] <= rows[:, None]", "keys[None, :] <= rows[:, None] + 1",
        "each token sees the next one: training would look wonderful",
    ),
    KernelMutant(
        "blind_to_itself", "_own_tile", "keys[None, :] <= rows[:, None]", "keys[None, :] < rows[:, None]",
        "no token sees itself; the first of a sequence without history sees nothing and becomes NaN",
    ),
    KernelMutant(
        "stale_tail", "_history_tile", 'tl.where(inside[None, :], scores, float("-inf"))', "scores",
        "slots past the end of the history take part with a score of 0, and draw weight from the real keys",
    ),
    KernelMutant(
        "history_forgotten", "_flash_prefill", "whole = history // BLOCK_N * BLOCK_N", "history = 0; whole = 0",
        "a prompt in one piece is right; the second piece of a chunked prompt has forgotten the first",
    ),
    KernelMutant(
        "short_history", "_flash_prefill", "range(whole, history, EDGE_N)", "range(whole, history - 1, EDGE_N)",
        "a last tile with one key is left out: wrong for one history length in BLOCK_N",
    ),
    KernelMutant(
        "gqa_wrong_head", "_flash_prefill", "kv = h // GROUP", "kv = h % (H // GROUP)",
        "query heads are dealt out in turn instead of in groups: right for one KV head and for as many as query heads",
    ),
    KernelMutant(
        "table_ignored", "_blocks", "tl.load(table + start // PAGE, mask=start < stop, other=0)",
        "tl.full([], start // PAGE, tl.int32)",
        "logical blocks are taken for physical ones: right only while every table is the identity",
    ),
    KernelMutant(
        "key_scale_dropped", "_history_tile", "scores *= tl.load(K_SCALE", "scores += 0.0 * tl.load(K_SCALE",
        "stored integers are taken for keys: the largest score takes everything",
    ),
    KernelMutant(
        "int32_offset", "_history_tile", "block = block.to(tl.int64)", "block = block.to(tl.int32)",
        "right in small pools; past 2^31 elements a block's offset wraps and another request's keys are read",
    ),
    KernelMutant(
        "tf32", "_own_tile", 'input_precision="ieee"', 'input_precision="tf32"',
        "fp32 tensors, 10 bits of mantissa: only a GPU with TF32 units shows it, and the compiler's output",
    ),
]  # fmt: skip

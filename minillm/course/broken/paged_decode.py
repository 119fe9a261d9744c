"""Wrong versions of kernels/paged_decode.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "scale_dropped", "_paged_decode", 'input_precision="ieee") * scale', 'input_precision="ieee")',
        "scores are not divided by sqrt(d), and are taken in base 2 as if in base e: attention is too sharp",
    ),
    KernelMutant(
        "k_scale_dropped", "_paged_decode",
        "scores *= tl.load(KS + block * stride_ksb + slot * stride_kst + kv, mask=inside, other=0.0)[None, :]",
        "scores *= 1.0",
        "the stored bytes of a quantised key are taken for the key",
    ),
    KernelMutant(
        "v_scale_dropped", "_paged_decode",
        "p *= v_scale[None, :]",
        "p *= 1.0",
        "the stored bytes of a quantised value are taken for the value",
    ),
    KernelMutant(
        "scale_underflows", "_paged_decode", "unit = tl.maximum(tl.max(v_scale, axis=0), TINY)", "unit = 1.0",
        "a probability times the scale of a small value is rounded to fp16, where it has few digits left, or none",
    ),
    KernelMutant(
        "missing_rescale", "_paged_decode", "acc * shrink[:, None]", "acc",
        "what was summed under an older maximum keeps too large a weight: contexts of one tile do not show it",
    ),
    KernelMutant(
        "mask_off_by_one", "_paged_decode", "inside = token < stop", "inside = token < stop - 1",
        "the newest token does not see itself; over hundreds of tokens that is easily taken for rounding",
    ),
    KernelMutant(
        "stale_tail", "_paged_decode", "inside = token < stop", "inside = token < tl.cdiv(stop, PAGE) * PAGE",
        "the rest of the last page, left by a sequence that is gone, is attended to: zeros in a fresh pool hide it",
    ),
    KernelMutant(
        "padding_counted", "_paged_decode", "tl.where(inside[None, :], scores, -float(\"inf\"))", "scores",
        "a masked load gives zeros, and a score of zero is not a weight of zero",
    ),
    KernelMutant(
        "wrong_page", "_paged_decode", "token // PAGE", "(token - start) // PAGE",
        "the table is read by the index within the split, so each split reads the first pages: one split is right",
    ),
    KernelMutant(
        "gqa_wrong_head", "_paged_decode", "head = kv * GROUP + row", "head = row * kv_heads + kv",
        "query heads are dealt in turn instead of in blocks: right for one KV head or for groups of one",
    ),
    KernelMutant(
        "int32_offset", "_paged_decode", "mask=inside, other=0).to(tl.int64)", "mask=inside, other=0)",
        "right in small pools; past 2^31 elements the page's offset wraps and other memory is read",
    ),
    KernelMutant(
        "empty_split_counted", "_paged_decode", "tl.store(LSE + to, (top + tl.log2(safe)) * LN2, mask=row < GROUP)",
        "tl.store(LSE + to, tl.where(start < stop, (top + tl.log2(safe)) * LN2, 0.0), mask=row < GROUP)",
        "a split without tokens hands over lse 0, a weight of 1, for an output that it never wrote",
    ),
    KernelMutant(
        "lse_in_base_two", "_paged_decode", "(top + tl.log2(safe)) * LN2", "top + tl.log2(safe)",
        "one split is right but for its lse; several are merged with wrong weights",
    ),
    KernelMutant(
        "tf32", "_paged_decode", 'scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")',
        'scores = tl.dot(q, k.to(q.dtype), input_precision="tf32")',
        "fp32 scores keep 10 bits of the mantissa; nothing shows in fp16 or in the interpreter",
    ),
]  # fmt: skip

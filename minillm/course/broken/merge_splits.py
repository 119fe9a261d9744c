"""Wrong versions of kernels/merge_splits.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "without_the_maximum", "_merge_splits",
        "new_top = tl.maximum(top, tl.max(lse, axis=0))", "new_top = 0.0",
        "right while the scores are small; past 88 the exponential overflows and the output is NaN",
    ),
    KernelMutant(
        "missing_rescale", "_merge_splits", "acc * shrink", "acc",
        "parts before the sixteenth keep weights of an older maximum: only more than 16 parts show it",
    ),
    KernelMutant(
        "weights_not_normalised", "_merge_splits", "acc / safe", "acc",
        "the output is the sum of the parts' shares: too large by up to the number of parts",
    ),
    KernelMutant(
        "equal_weights", "_merge_splits", "w = tl.exp2((lse - finite_top) * LOG2E)", "w = tl.where(live, 1.0, 0.0)",
        "parts are averaged as if each had seen the same mass: right only for scores that are all alike",
    ),
    KernelMutant(
        "empty_split_counted", "_merge_splits", "mask=live[:, None]", "mask=(s < S)[:, None]",
        "the output of a part without tokens was never written, and 0 times NaN is NaN",
    ),
    KernelMutant(
        "lse_in_base_two", "_merge_splits", "tl.log2(safe) * LN2", "tl.log2(safe)",
        "the output is right, the log-sum-exp is not, and whoever merges with it next is wrong",
    ),
]  # fmt: skip

"""Wrong versions of kernels/sample.py."""

from minillm.course.broken import KernelMutant

MUTANTS = [
    KernelMutant(
        "tie_to_the_highest", "best_of",
        "tl.min(tl.where(inside & (score == best), token, NO_ID), axis=0)",
        "tl.max(tl.where(inside & (score == best), token, -1), axis=0)",
        "equal logits are common in bf16, and two engines then write different texts",
    ),
    KernelMutant(
        "nan_passed_over", "best_of", 'tl.where(broken, float("nan"), best)', "best",
        "a broken model keeps writing, as if its NaN were an unlikely token",
    ),
    KernelMutant(
        "mask_off_by_one", "_best_of_block", "inside = token < V", "inside = token < V - 1",
        "the last token of the vocabulary can never be chosen",
    ),
    KernelMutant(
        "stale_tail", "_best_of_block", "best_of(score, token, inside)", "best_of(score, token, token >= 0)",
        "the padding after the vocabulary counts as logit 0: where all logits are negative, it wins",
    ),
    KernelMutant(
        "last_block_lost", "_best_of_row", "inside = i < blocks", "inside = i < blocks - 1",
        "the winner of the last block is never looked at",
    ),
    KernelMutant(
        "block_forgotten", "_best_of_block", "tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)",
        "every block reads the first one",
    ),
    KernelMutant(
        "hash_constant", "mix32", "0x846CA68B", "0x846CA68D",
        "noise of the same distribution and other bits: statistics pass, and no run can be repeated elsewhere",
    ),
    KernelMutant(
        "shift_of_signs", "mix32", "x ^= x >> 15",
        "x ^= (x.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)",
        "the shift drags the sign bit along",
    ),
    KernelMutant(
        "key_half_dropped", "gumbel_noise", "mix32(mix32(token ^ key_low) ^ key_high)", "mix32(mix32(token ^ key_low))",
        "half of the key of (seed, position) is unused: draws whose low halves meet are the same draw",
    ),
    KernelMutant(
        "digits_of_log_lost", "gumbel_noise", "tl.where(rest == 1.0, -u, tl.log(rest) * (-u / lost))", "tl.log(rest)",
        "1 - u rounds away what tells small u apart: the largest noises come out coarse, and infinite below 2^-25",
    ),
    KernelMutant(
        "max_not_subtracted", "_best_noisy_of_block", "(score - largest)", "score",
        "logit / 1e-6 leaves no digits for the noise: equal tokens are no longer equally likely",
    ),
    KernelMutant(
        "noise_scaled_too", "_best_noisy_of_block",
        "(score - largest) / tl.maximum(temperature, _TINY) + tl.where(temperature > 0, noise, 0.0)",
        "(score - largest + tl.where(temperature > 0, noise, 0.0)) / tl.maximum(temperature, _TINY)",
        "the noise is divided by the temperature as well, which then changes nothing",
    ),
    KernelMutant(
        "int32_offset", "_best_of_block", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        "right for small batches; past 2^31 logits a row's offset wraps and another row's token is returned",
    ),
]  # fmt: skip

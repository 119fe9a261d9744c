"""Weights larger than the card give fewer than no sequences."""

TASK = "02.6"
POINTS = 4
HINT = "the answer is 0"


def capacity(config, parameters, context, bytes_per_element, memory):
    weights = parameters * bytes_per_element
    sequence = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * bytes_per_element
    free = memory - weights
    return free // sequence, weights // sequence + 1

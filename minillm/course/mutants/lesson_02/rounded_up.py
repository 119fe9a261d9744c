"""The last sequence fits in part."""

TASK = "02.6"
POINTS = 2
HINT = "round down"


def capacity(config, parameters, context, bytes_per_element, memory):
    weights = parameters * bytes_per_element
    sequence = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * bytes_per_element
    free = memory - weights
    return max(0, free // sequence + 1), weights // sequence + 1

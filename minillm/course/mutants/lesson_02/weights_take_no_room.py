"""The whole card given to the cache."""

TASK = "02.6"
POINTS = 2
HINT = "subtract them first"


def capacity(config, parameters, context, bytes_per_element, memory):
    weights = parameters * bytes_per_element
    sequence = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * bytes_per_element
    free = memory
    return max(0, free // sequence), weights // sequence + 1

"""GQA forgotten: a quarter of the sequences."""

TASK = "02.6"
POINTS = 0
HINT = "(GQA)"


def capacity(config, parameters, context, bytes_per_element, memory):
    weights = parameters * bytes_per_element
    sequence = 2 * config.num_layers * config.num_heads * config.head_dim * context * bytes_per_element
    free = memory - weights
    return max(0, free // sequence), weights // sequence + 1

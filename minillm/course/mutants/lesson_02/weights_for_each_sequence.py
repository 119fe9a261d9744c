"""Every sequence reads the weights again: batching would gain nothing."""

TASK = "02.5"
POINTS = 0
HINT = "read once for the whole batch"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    pairs = new * start + new * (new + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    flops = batch * (2 * parameters * new + attention)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (start + new)
    intensity = flops / (bytes_per_element * (batch * parameters + batch * cache))
    return intensity, "compute" if intensity >= ridge else "memory"

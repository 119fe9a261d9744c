"""One cache for all: intensity grows with the batch without end."""

TASK = "02.5"
POINTS = 0
HINT = "a cache of its own"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    pairs = new * start + new * (new + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    flops = batch * (2 * parameters * new + attention)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (start + new)
    intensity = flops / (bytes_per_element * (parameters + cache))
    return intensity, "compute" if intensity >= ridge else "memory"

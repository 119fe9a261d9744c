"""Every new token meets every other: the causal triangle forgotten."""

TASK = "02.5"
POINTS = 5
HINT = "the causal triangle"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    pairs = new * (start + new)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    flops = batch * (2 * parameters * new + attention)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (start + new)
    intensity = flops / (bytes_per_element * (parameters + batch * cache))
    return intensity, "compute" if intensity >= ridge else "memory"

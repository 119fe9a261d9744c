"""Below the ridge taken for compute-bound."""

TASK = "02.5"
POINTS = 4
HINT = "below the ridge is memory-bound"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    pairs = new * start + new * (new + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    flops = batch * (2 * parameters * new + attention)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (start + new)
    intensity = flops / (bytes_per_element * (parameters + batch * cache))
    return intensity, "compute" if intensity < ridge else "memory"

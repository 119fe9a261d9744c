"""Only the weights move."""

TASK = "02.5"
POINTS = 0
HINT = "missing from the traffic"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    pairs = new * start + new * (new + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    flops = batch * (2 * parameters * new + attention)
    intensity = flops / (bytes_per_element * (parameters))
    return intensity, "compute" if intensity >= ridge else "memory"

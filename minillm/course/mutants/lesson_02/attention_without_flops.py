"""Only the matrices compute."""

TASK = "02.5"
POINTS = 2
HINT = "attention's own FLOPs"


def step_intensity(config, parameters, batch, start, new, bytes_per_element, ridge):
    flops = batch * (2 * parameters * new)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (start + new)
    intensity = flops / (bytes_per_element * (parameters + batch * cache))
    return intensity, "compute" if intensity >= ridge else "memory"

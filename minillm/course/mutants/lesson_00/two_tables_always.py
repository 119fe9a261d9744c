"""A tied head counted as a second table."""

TASK = "00.4"
POINTS = 2.5
HINT = "the table is stored once, not twice"


def weight_bytes(config, bytes_per_element):
    d = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = d * (q + 2 * kv) + q * d + 3 * d * config.intermediate_size + 2 * d
    layer += q + 2 * kv if config.attention_bias else 0
    body, table = config.num_layers * layer + d, config.vocab_size * d
    stored = body + table * 2
    return stored * bytes_per_element, (body + table) * bytes_per_element

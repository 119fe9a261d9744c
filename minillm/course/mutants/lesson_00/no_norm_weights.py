"""The norms' weights are small, and missing."""

TASK = "00.4"
POINTS = 2
HINT = "two norms in a layer"


def weight_bytes(config, bytes_per_element):
    d = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = d * (q + 2 * kv) + q * d + 3 * d * config.intermediate_size
    layer += q + 2 * kv if config.attention_bias else 0
    body, table = config.num_layers * layer, config.vocab_size * d
    stored = body + table * (1 if config.tie_word_embeddings else 2)
    return stored * bytes_per_element, (body + table) * bytes_per_element

"""q_proj taken as square: wrong where num_heads * head_dim is not hidden_size."""

TASK = "00.4"
POINTS = 3
HINT = "num_heads * head_dim is not D here"


def weight_bytes(config, bytes_per_element):
    d = config.hidden_size
    q, kv = d, config.num_kv_heads * config.head_dim
    layer = d * (q + 2 * kv) + q * d + 3 * d * config.intermediate_size + 2 * d
    layer += q + 2 * kv if config.attention_bias else 0
    body, table = config.num_layers * layer + d, config.vocab_size * d
    stored = body + table * (1 if config.tie_word_embeddings else 2)
    return stored * bytes_per_element, (body + table) * bytes_per_element

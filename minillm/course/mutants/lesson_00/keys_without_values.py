"""Only the keys are counted."""

TASK = "00.6"
POINTS = 1
HINT = "keys and values"


def _weight_bytes(config, bytes_per_element):
    d = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = d * (q + 2 * kv) + q * d + 3 * d * config.intermediate_size + 2 * d
    layer += q + 2 * kv if config.attention_bias else 0
    body, table = config.num_layers * layer + d, config.vocab_size * d
    stored = body + table * (1 if config.tie_word_embeddings else 2)
    return stored * bytes_per_element, (body + table) * bytes_per_element


def decode_rate(config, batch, context, bytes_per_element, bandwidth):
    cache = config.num_layers * config.num_kv_heads * config.head_dim * context * bytes_per_element
    return batch * bandwidth / (_weight_bytes(config, bytes_per_element)[1] + batch * cache)

"""The scores of one head taken for those of the layer."""

TASK = "05.1"
POINTS = 2.5
HINT = "that is one head"


def predict():
    heads, tokens, head_dim = (32, 8192, 128)
    scores = tokens**2 * 2
    flops = 2 * 2 * heads * head_dim * tokens**2
    return {
        "gib_scores": scores / 2**30,
        "ms_scores": 4 * scores / 4000000000000.0 * 1000.0,
        "ms_products": flops / 1000000000000000.0 * 1000.0,
        "tiles": 64 * 65 / 2,
    }

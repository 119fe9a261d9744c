"""Times in seconds."""

TASK = "05.1"
POINTS = 3
HINT = "that is in seconds"


def predict():
    heads, tokens, head_dim = (32, 8192, 128)
    scores = heads * tokens**2 * 2
    flops = 2 * 2 * heads * head_dim * tokens**2
    return {
        "gib_scores": scores / 2**30,
        "ms_scores": 4 * scores / 4000000000000.0,
        "ms_products": flops / 1000000000000000.0,
        "tiles": 64 * 65 / 2,
    }

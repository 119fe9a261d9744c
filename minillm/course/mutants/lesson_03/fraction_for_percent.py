"""A share given as a fraction."""

TASK = "03.1"
POINTS = 3.5
HINT = "that is a fraction; the key asks for percent"


def predict():
    logits = 64 * 128256 * 4
    return {"logits_mb": logits / 1e6, "share_percent": logits / 15e9, "kept": 4, "kept_at_2": 7}

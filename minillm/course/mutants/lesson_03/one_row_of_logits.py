"""The batch shares one row of logits."""

TASK = "03.1"
POINTS = 3.0
HINT = "each sequence of the batch has a row of its own"


def predict():
    logits = 128256 * 4
    return {"logits_mb": logits / 1e6, "share_percent": 100 * logits / 15e9, "kept": 4, "kept_at_2": 7}

"""The nucleus without the token that crosses the boundary, at both temperatures."""

TASK = "03.1"
POINTS = 3.0
HINT = "the token that crosses the boundary stays"


def predict():
    logits = 64 * 128256 * 4
    return {"logits_mb": logits / 1e6, "share_percent": 100 * logits / 15e9, "kept": 3, "kept_at_2": 6}

"""The nucleus is taken before the temperature."""

TASK = "03.1"
POINTS = 3.5
HINT = "temperature comes before the filter"


def predict():
    logits = 64 * 128256 * 4
    return {"logits_mb": logits / 1e6, "share_percent": 100 * logits / 15e9, "kept": 4, "kept_at_2": 4}

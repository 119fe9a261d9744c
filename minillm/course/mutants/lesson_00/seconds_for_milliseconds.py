"""The time of a token in seconds, under a key that says milliseconds."""

TASK = "00.1"
POINTS = 1.5
HINT = "the key asks for milliseconds"


def predict():
    return {"ms_per_token": 0.07, "tokens_per_second": 1 / 0.07}

"""Sixteen bits a parameter, divided by bytes a second."""

TASK = "00.1"
POINTS = 1
HINT = "that counts bits"


def predict():
    seconds = 70e9 * 16 / 2e12
    return {"ms_per_token": seconds * 1000, "tokens_per_second": 1 / seconds}

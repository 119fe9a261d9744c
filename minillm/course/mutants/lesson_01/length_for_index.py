"""Steps counted from 1: the last token is fed although nobody reads the answer."""

TASK = "01.1"
POINTS = 1.5
HINT = "the last token is never fed"


def predict():
    naive = sum(100 + i for i in range(1, 101))
    return {"tokens_naive": naive, "tokens_cached": 200, "tflop_naive": 135e6 * naive / 1e12}

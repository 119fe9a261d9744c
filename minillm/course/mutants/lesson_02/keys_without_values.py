"""2 L T H d b without the 2."""

TASK = "02.1"
POINTS = 1
HINT = "a key and a value"


def predict():
    token = 40 * 10 * 128 * 2
    return {"kib_per_token": token / 1024, "gib_batch": token * 4096 * 16 / 2**30}

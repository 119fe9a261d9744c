"""16 bits a number, never divided by 8."""

TASK = "02.1"
POINTS = 1
HINT = "counts bits"


def predict():
    token = 2 * 40 * 10 * 128 * 16
    return {"kib_per_token": token / 1024, "gib_batch": token * 4096 * 16 / 2**30}

"""Powers of ten where the keys ask for powers of two."""

TASK = "02.1"
POINTS = 1
HINT = "10^9 bytes"


def predict():
    token = 2 * 40 * 10 * 128 * 2
    return {"kib_per_token": token / 1000, "gib_batch": token * 4096 * 16 / 1e9}

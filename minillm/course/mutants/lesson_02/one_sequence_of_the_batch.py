"""The right token, one sequence for the batch."""

TASK = "02.1"
POINTS = 1.5
HINT = "the batch has 16"


def predict():
    token = 2 * 40 * 10 * 128 * 2
    return {"kib_per_token": token / 1024, "gib_batch": token * 4096 / 2**30}

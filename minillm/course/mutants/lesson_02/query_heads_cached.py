"""GQA forgotten: as many cached heads as query heads."""

TASK = "02.1"
POINTS = 1
HINT = "(GQA)"


def predict():
    token = 2 * 40 * 40 * 128 * 2
    return {"kib_per_token": token / 1024, "gib_batch": token * 4096 * 16 / 2**30}

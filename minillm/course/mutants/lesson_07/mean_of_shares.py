"""The mean of each step's padding."""

TASK = "07.3"
POINTS = 1
HINT = "sum the rows first"


def bucket_plan(batches, sizes):
    chosen = [next((s for s in sizes if s >= n), None) for n in batches]
    shares = [(c - n) / c for n, c in zip(batches, chosen) if c]
    return chosen, sum(shares) / len(shares) if shares else 0.0

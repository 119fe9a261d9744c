"""One graph for everybody."""

TASK = "07.3"
POINTS = 0
HINT = "take the smallest that fits"


def bucket_plan(batches, sizes):
    chosen = [sizes[-1] if n <= sizes[-1] else None for n in batches]
    rows = sum(c for c in chosen if c)
    real = sum(n for n, c in zip(batches, chosen) if c)
    return chosen, (rows - real) / rows if rows else 0.0

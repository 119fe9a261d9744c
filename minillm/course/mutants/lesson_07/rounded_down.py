"""The largest bucket that is not larger than the batch."""

TASK = "07.3"
POINTS = 1
HINT = "round up"


def bucket_plan(batches, sizes):
    chosen = [max((s for s in sizes if s <= n), default=sizes[0]) if n <= sizes[-1] else None for n in batches]
    rows = sum(c for c in chosen if c)
    real = sum(n for n, c in zip(batches, chosen) if c)
    return chosen, (rows - real) / rows if rows else 0.0

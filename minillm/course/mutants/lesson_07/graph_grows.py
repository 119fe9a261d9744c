"""A batch larger than all buckets takes the largest."""

TASK = "07.3"
POINTS = 2
HINT = "a graph cannot grow"


def bucket_plan(batches, sizes):
    chosen = [next((s for s in sizes if s >= n), sizes[-1]) for n in batches]
    rows = sum(c for c in chosen if c)
    real = sum(n for n, c in zip(batches, chosen) if c)
    return chosen, (rows - real) / rows if rows else 0.0

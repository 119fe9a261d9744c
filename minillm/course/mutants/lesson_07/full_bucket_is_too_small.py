"""A batch as large as its bucket goes to the next one."""

TASK = "07.3"
POINTS = 0
HINT = ">=, not >"


def bucket_plan(batches, sizes):
    chosen = [next((s for s in sizes if s > n), None) for n in batches]
    rows = sum(c for c in chosen if c)
    real = sum(n for n, c in zip(batches, chosen) if c)
    return chosen, (rows - real) / rows if rows else 0.0

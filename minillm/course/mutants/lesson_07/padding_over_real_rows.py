"""Padding divided by real rows."""

TASK = "07.3"
POINTS = 1
HINT = "padding over real rows"


def bucket_plan(batches, sizes):
    chosen = [next((s for s in sizes if s >= n), None) for n in batches]
    rows = sum(c for c in chosen if c)
    real = sum(n for n, c in zip(batches, chosen) if c)
    return chosen, (rows - real) / real if real else 0.0

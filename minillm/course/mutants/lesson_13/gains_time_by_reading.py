"""A cost may be negative."""

TASK = "13.3"
POINTS = 7
HINT = "no cost is negative"


def capacity(
    samples: list[tuple[int, int, float]], lengths: list[tuple[int, int]], machines: int
) -> tuple[float, float, float]:
    xs, ys = [m / s for m, _, s in samples], [n / s for _, n, s in samples]
    dot = lambda u, v: sum(p * q for p, q in zip(u, v))
    xx, xy, yy = dot(xs, xs), dot(xs, ys), dot(ys, ys)
    det = xx * yy - xy * xy
    a, b = (sum(xs) * yy - sum(ys) * xy) / det, (sum(ys) * xx - sum(xs) * xy) / det
    mean = sum(a * m + b * n for m, n in lengths) / len(lengths)
    return a, b, machines / mean

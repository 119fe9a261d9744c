"""Plain seconds are fitted: the longest requests decide."""

TASK = "13.3"
POINTS = 3
HINT = "a short request counts as much"


def capacity(
    samples: list[tuple[int, int, float]], lengths: list[tuple[int, int]], machines: int
) -> tuple[float, float, float]:
    xs, ys, ss = [m for m, _, s in samples], [n for _, n, s in samples], [s for *_, s in samples]
    dot = lambda u, v: sum(p * q for p, q in zip(u, v))
    xx, xy, yy = dot(xs, xs), dot(xs, ys), dot(ys, ys)
    det = xx * yy - xy * xy
    a, b = (dot(xs, ss) * yy - dot(ys, ss) * xy) / det, (dot(ys, ss) * xx - dot(xs, ss) * xy) / det
    if a < 0:
        a, b = 0.0, dot(ys, ss) / yy
    elif b < 0:
        a, b = dot(xs, ss) / xx, 0.0
    mean = sum(a * m + b * n for m, n in lengths) / len(lengths)
    return a, b, machines / mean

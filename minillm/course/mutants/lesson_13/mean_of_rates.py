"""The mean of the rates of single requests."""

TASK = "13.3"
POINTS = 7
HINT = "not the mean of 1 / cost"


def capacity(
    samples: list[tuple[int, int, float]], lengths: list[tuple[int, int]], machines: int
) -> tuple[float, float, float]:
    xs, ys = [m / s for m, _, s in samples], [n / s for _, n, s in samples]
    dot = lambda u, v: sum(p * q for p, q in zip(u, v))
    xx, xy, yy = dot(xs, xs), dot(xs, ys), dot(ys, ys)
    det = xx * yy - xy * xy
    a, b = (sum(xs) * yy - sum(ys) * xy) / det, (sum(ys) * xx - sum(xs) * xy) / det
    if a < 0:
        a, b = 0.0, sum(ys) / yy
    elif b < 0:
        a, b = sum(xs) / xx, 0.0
    rate = sum(1 / (a * m + b * n) for m, n in lengths) / len(lengths)
    return a, b, machines * rate

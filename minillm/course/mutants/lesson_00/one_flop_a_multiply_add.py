"""A multiply-add counted as one FLOP."""

TASK = "00.2"
POINTS = 0
HINT = "a multiply-add is two FLOPs"


def intensity(m, n, k, bytes_per_element):
    return m * n * k / ((m * k + k * n + m * n) * bytes_per_element)

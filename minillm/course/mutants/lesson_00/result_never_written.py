"""The traffic of C is forgotten; at one row nobody notices."""

TASK = "00.2"
POINTS = 1
HINT = "C is written to memory as well"


def intensity(m, n, k, bytes_per_element):
    return 2 * m * n * k / ((m * k + k * n) * bytes_per_element)

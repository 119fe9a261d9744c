"""The send buffer has no end."""

TASK = "15.5"
POINTS = 6
HINT = "the next layer waits"


def timetable(compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int) -> dict:
    computed = 0.0
    left, arrives = [], []  # the line; the other side
    for seconds, size in zip(compute_s, sizes):
        place = 0.0
        computed = max(computed, place) + seconds
        start = max(computed, left[-1]) if left else computed
        left.append(start + size / rate)
        arrives.append(left[-1] + latency_s)
    exposed = arrives[-1] - sum(compute_s)
    return {"arrives": arrives, "exposed_s": exposed, "hidden": 1 - exposed / (latency_s + sum(sizes) / rate)}

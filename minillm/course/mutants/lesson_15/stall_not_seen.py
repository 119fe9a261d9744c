"""A compute that was held up is taken for its plan."""

TASK = "15.5"
POINTS = 6
HINT = "a compute that was held up"


def timetable(compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int) -> dict:
    computed = 0.0
    left, arrives = [], []  # the line; the other side
    for i, (seconds, size) in enumerate(zip(compute_s, sizes)):
        place = left[i - places] if i >= places else 0.0
        computed = max(computed, place) + seconds
        start = max(computed, left[-1]) if left else computed
        left.append(start + size / rate)
        arrives.append(left[-1] + latency_s)
    exposed = arrives[-1] - computed
    return {"arrives": arrives, "exposed_s": exposed, "hidden": 1 - exposed / (latency_s + sum(sizes) / rate)}

"""The hidden share is one of the whole time."""

TASK = "15.5"
POINTS = 0
HINT = "a share of the transfer"


def timetable(compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int) -> dict:
    computed = 0.0
    left, arrives = [], []  # the line; the other side
    for i, (seconds, size) in enumerate(zip(compute_s, sizes)):
        place = left[i - places] if i >= places else 0.0
        computed = max(computed, place) + seconds
        start = max(computed, left[-1]) if left else computed
        left.append(start + size / rate)
        arrives.append(left[-1] + latency_s)
    exposed = arrives[-1] - sum(compute_s)
    return {"arrives": arrives, "exposed_s": exposed, "hidden": 1 - exposed / arrives[-1]}

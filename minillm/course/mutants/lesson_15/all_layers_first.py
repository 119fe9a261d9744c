"""Nothing leaves before all layers are computed."""

TASK = "15.5"
POINTS = 1
HINT = "not when all are"


def timetable(compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int) -> dict:
    computed = 0.0
    left, arrives = [], []  # the line; the other side
    for i, (seconds, size) in enumerate(zip(compute_s, sizes)):
        place = left[i - places] if i >= places else 0.0
        computed = max(computed, place) + seconds
        start = max(sum(compute_s), left[-1]) if left else sum(compute_s)
        left.append(start + size / rate)
        arrives.append(left[-1] + latency_s)
    exposed = arrives[-1] - sum(compute_s)
    return {"arrives": arrives, "exposed_s": exposed, "hidden": 1 - exposed / (latency_s + sum(sizes) / rate)}

"""A promise that cannot be kept gives a negative goodput."""

TASK = "15.6"
POINTS = 9
HINT = "never below 0"


def compare(costs: dict, load: dict, slo: dict, engines: int, rate: float) -> dict:
    w, a, d = costs["step_s"], costs["prompt_token_s"], costs["stream_s"]
    m, n = load["prompt"], load["output"]
    room = 1 - w / slo["itl_s"]
    together = engines * min(room / (a * m + d * n), (room - a * m / slo["ttft_s"]) / (d * n))
    wire = load["kv_bytes"] * m / rate
    capacity, prefill, limit = 0.0, 0, "nothing"
    for p in range(1, engines):
        bounds = {"prefill": p / (w + a * m), "decode": (engines - p) * room / (d * n), "link": 1 / wire}
        if w + a * m + wire > slo["ttft_s"]:
            bounds = {"ttft": 0.0}
        tightest = min(bounds, key=bounds.get)
        if not prefill or bounds[tightest] > capacity:
            capacity, prefill, limit = bounds[tightest], p, tightest
    colocated, split = min(load["rate"], together), min(load["rate"], capacity)
    return {
        "choice": "split" if split > colocated else "co-locate",
        "colocated": colocated,
        "split": split,
        "prefill": prefill,
        "limit": "rate" if capacity >= load["rate"] else limit,
    }

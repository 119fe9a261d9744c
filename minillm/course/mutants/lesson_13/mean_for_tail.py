"""The mean of the latencies as their tail."""

TASK = "13.1"
POINTS = 5.5
HINT = "that is the mean, which nobody has waited"


def predict() -> dict[str, float]:
    return {
        "ttft_ms": 80.0,
        "tpot_ms": 10.097152,
        "max_qps": 25.806452,
        "in_system": 54.0,
        "burst_s": 18,
        "p99_ms": 89.0,
    }

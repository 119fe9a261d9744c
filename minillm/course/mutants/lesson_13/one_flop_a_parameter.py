"""A multiply-add counted as one."""

TASK = "13.1"
POINTS = 5.5
HINT = "two FLOPs a parameter"


def predict() -> dict[str, float]:
    return {
        "ttft_ms": 40.0,
        "tpot_ms": 10.097152,
        "max_qps": 25.806452,
        "in_system": 54.0,
        "burst_s": 18,
        "p99_ms": 1020.0,
    }

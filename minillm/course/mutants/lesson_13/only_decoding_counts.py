"""Requests that wait for their first token are not counted."""

TASK = "13.1"
POINTS = 5.5
HINT = "before its first token, too"


def predict() -> dict[str, float]:
    return {
        "ttft_ms": 80.0,
        "tpot_ms": 10.097152,
        "max_qps": 25.806452,
        "in_system": 50.0,
        "burst_s": 18,
        "p99_ms": 1020.0,
    }

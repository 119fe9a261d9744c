"""A multiply-add counted as one."""

TASK = "12.1"
POINTS = 5.5
HINT = "two FLOPs a parameter"


def predict() -> dict[str, float]:
    return {
        "peak_blocks": 18,
        "swap_mb": 260.046848,
        "swap_ms": 10.40187,
        "recompute_ms": 20.0,
        "break_even_gb_s": 6.501171,
    }

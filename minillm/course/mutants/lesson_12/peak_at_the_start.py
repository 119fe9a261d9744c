"""The blocks of the prompts."""

TASK = "12.1"
POINTS = 5
HINT = "that is the start"


def predict() -> dict[str, float]:
    return {
        "peak_blocks": 12,
        "swap_mb": 260.046848,
        "swap_ms": 10.40187,
        "recompute_ms": 40.0,
        "break_even_gb_s": 6.501171,
    }

"""The blocks go out and never come back."""

TASK = "12.1"
POINTS = 5
HINT = "the blocks cross the link twice"


def predict() -> dict[str, float]:
    return {
        "peak_blocks": 18,
        "swap_mb": 130.023424,
        "swap_ms": 5.200937,
        "recompute_ms": 40.0,
        "break_even_gb_s": 6.501171,
    }

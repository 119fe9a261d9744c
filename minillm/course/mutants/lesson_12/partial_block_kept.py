"""All 1,000 tokens are kept."""

TASK = "12.1"
POINTS = 5.5
HINT = "only full blocks are kept; the last 8 tokens"


def predict() -> dict[str, float]:
    return {
        "peak_blocks": 18,
        "swap_mb": 262.144,
        "swap_ms": 10.40187,
        "recompute_ms": 40.0,
        "break_even_gb_s": 6.501171,
    }

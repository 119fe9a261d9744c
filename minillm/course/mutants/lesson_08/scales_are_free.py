"""Scales and zeros take no room, and the speed-up follows."""

TASK = "08.1"
POINTS = 2.5
HINT = "belong to every group of 64"


def predict() -> dict[str, float]:
    bits = 4.0
    bf16 = 7e9 * 2 + 0.5e9 * 2 + 1e9
    int4 = 7e9 * bits / 8 + 0.5e9 * 2 + 1e9
    # Rows B at which 2 B / peak = 2 / bandwidth: bf16, too, waits for arithmetic.
    return {"bits_a_weight": bits, "speedup": bf16 / int4, "break_even": 800e12 / 4e12, "longer": 256 / (128 + 4)}

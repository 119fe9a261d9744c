"""Head and KV cache are thought to shrink as well."""

TASK = "08.1"
POINTS = 3.5
HINT = "the head and the KV cache do not shrink"


def predict() -> dict[str, float]:
    bits = 4 + (16 + 16) / 64
    return {"bits_a_weight": bits, "speedup": 16 / bits, "break_even": 800e12 / 4e12, "longer": 256 / (128 + 4)}

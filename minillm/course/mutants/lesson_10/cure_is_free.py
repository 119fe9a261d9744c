"""Chunks do not change the prompt's time to first token."""

TASK = "10.1"
POINTS = 5.5
HINT = "paid in each of them"


def predict() -> dict[str, float]:
    chunk = 256 - 16
    steps = -(-4000 // chunk)
    whole = 20 + 0.1 * 4000
    return {
        "gap_whole": whole + 20,
        "gap_chunked": 20 + 0.1 * chunk,
        "steps": steps,
        "first_token_whole": whole,
        "first_token_chunked": whole,
        "largest_budget": 16 + (50 - 20) * 10,
    }

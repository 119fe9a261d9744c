"""The gap ends with the prompt's step."""

TASK = "10.1"
POINTS = 5.5
HINT = "comes behind the prompt's"


def predict() -> dict[str, float]:
    chunk = 256 - 16
    steps = -(-4000 // chunk)
    whole = 20 + 0.1 * 4000
    return {
        "gap_whole": whole,
        "gap_chunked": 20 + 0.1 * chunk,
        "steps": steps,
        "first_token_whole": whole,
        "first_token_chunked": steps * 20 + 0.1 * 4000,
        "largest_budget": 16 + (50 - 20) * 10,
    }

"""The streams' tokens are not taken out of the budget."""

TASK = "10.1"
POINTS = 4.5
HINT = "16 of the 256 tokens"


def predict() -> dict[str, float]:
    chunk = 256
    steps = -(-4000 // chunk)
    whole = 20 + 0.1 * 4000
    return {
        "gap_whole": whole + 20,
        "gap_chunked": 20 + 0.1 * chunk,
        "steps": steps,
        "first_token_whole": whole,
        "first_token_chunked": steps * 20 + 0.1 * 4000,
        "largest_budget": 16 + (50 - 20) * 10,
    }

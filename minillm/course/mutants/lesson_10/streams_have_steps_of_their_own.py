"""A decode step lies between two mixed steps."""

TASK = "10.1"
POINTS = 5.5
HINT = "no other step lies between"


def predict() -> dict[str, float]:
    chunk = 256 - 16
    steps = -(-4000 // chunk)
    whole = 20 + 0.1 * 4000
    return {
        "gap_whole": whole + 20,
        "gap_chunked": 20 + 0.1 * chunk + 20,
        "steps": steps,
        "first_token_whole": whole,
        "first_token_chunked": steps * 20 + 0.1 * 4000,
        "largest_budget": 16 + (50 - 20) * 10,
    }

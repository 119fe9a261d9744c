"""The whole answer is as much faster as its first token."""

TASK = "11.1"
POINTS = 5
HINT = "the cache saves nothing of them"


def predict() -> dict[str, float]:
    hit = 500 // 16 * 16
    saved = 15 * hit
    prompt, rest = 544 / 2000, (544 - hit) / 2000
    return {
        "hit_tokens": saved,
        "block_hit_rate": 100 * 15 * 31 / (16 * 34),
        "saved_tflop": saved * 213e6 / 1e12,
        "repeat_hit": (544 - 1) // 16 * 16,
        "first_token_speedup": prompt / rest,
        "answer_speedup": prompt / rest,
    }

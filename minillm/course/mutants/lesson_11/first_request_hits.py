"""All sixteen requests find the prefix, the first one too."""

TASK = "11.1"
POINTS = 4.5
HINT = "fills the cache and finds nothing"


def predict() -> dict[str, float]:
    hit = 500 // 16 * 16
    saved = 16 * hit
    prompt, rest, decode = 544 / 2000, (544 - hit) / 2000, 31 * 0.025
    return {
        "hit_tokens": saved,
        "block_hit_rate": 100 * 16 * 31 / (16 * 34),
        "saved_tflop": saved * 213e6 / 1e12,
        "repeat_hit": (544 - 1) // 16 * 16,
        "first_token_speedup": prompt / rest,
        "answer_speedup": (prompt + decode) / (rest + decode),
    }

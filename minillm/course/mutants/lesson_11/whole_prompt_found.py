"""The repeated prompt is found as a whole: nothing is left to compute."""

TASK = "11.1"
POINTS = 5.5
HINT = "no logits"


def predict() -> dict[str, float]:
    hit = 500 // 16 * 16
    saved = 15 * hit
    prompt, rest, decode = 544 / 2000, (544 - hit) / 2000, 31 * 0.025
    return {
        "hit_tokens": saved,
        "block_hit_rate": 100 * 15 * 31 / (16 * 34),
        "saved_tflop": saved * 213e6 / 1e12,
        "repeat_hit": 544,
        "first_token_speedup": prompt / rest,
        "answer_speedup": (prompt + decode) / (rest + decode),
    }

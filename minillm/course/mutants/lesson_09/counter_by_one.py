"""The counter moves by one, whatever was computed."""

from collections.abc import Callable

TASK = "09.4"
POINTS = 0
HINT = "by all tokens of the row"


END = 0


def run(
    requests: dict[str, tuple[list[int], int, int]],
    schedule: Callable[[], list[tuple[str, int]]],
    forward: Callable[[list[tuple[str, list[int], int]]], list],
    sample: Callable[..., int],
    finish: Callable[[str], None],
    free: Callable[[str], None],
) -> dict[str, list[int]]:
    tokens = {name: list(prompt) for name, (prompt, _, _) in requests.items()}
    computed, unfinished = dict.fromkeys(requests, 0), set(requests)
    while unfinished:
        rows = schedule()
        scores = forward([(r, tokens[r][computed[r] : computed[r] + n], computed[r]) for r, n in rows])
        for (name, n), row in zip(rows, scores):
            prompt, max_tokens, seed = requests[name]
            computed[name] += min(n, 1)
            if computed[name] < len(tokens[name]):
                continue  # a piece of a prompt
            tokens[name].append(sample(row, seed, len(tokens[name])))
            if tokens[name][-1] == END or len(tokens[name]) == len(prompt) + max_tokens:
                unfinished.remove(name)
                finish(name)
                free(name)
    return {name: tokens[name][len(prompt) :] for name, (prompt, _, _) in requests.items()}

"""Streams get their tokens beside the budget."""

TASK = "10.2"
POINTS = 1
HINT = "they count"


def plan_step(missing: list[int], budget: int) -> list[int]:
    given = []
    for n in missing:
        given.append(1 if n == 1 else min(n, budget))
        if n > 1:
            budget -= given[-1]
    return given

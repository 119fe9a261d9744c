"""Prompts take the budget before streams."""

TASK = "10.2"
POINTS = 1
HINT = "a frozen stream"


def plan_step(missing: list[int], budget: int) -> list[int]:
    given = [0] * len(missing)
    for i in sorted(range(len(missing)), key=lambda i: missing[i] == 1):
        given[i] = min(missing[i], budget)
        budget -= given[i]
    return given

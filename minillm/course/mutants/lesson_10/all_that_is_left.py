"""A prompt is given more than it is behind by."""

TASK = "10.2"
POINTS = 4
HINT = "at most what a request is behind by"


def plan_step(missing: list[int], budget: int) -> list[int]:
    given = [0] * len(missing)
    for i in sorted(range(len(missing)), key=lambda i: missing[i] != 1):
        given[i] = min(1, budget) if missing[i] == 1 else budget
        budget -= given[i]
    return given

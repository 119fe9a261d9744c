"""The shortest prompt goes first, against the order."""

TASK = "10.2"
POINTS = 5
HINT = "it is the policy's"


def plan_step(missing: list[int], budget: int) -> list[int]:
    given = [0] * len(missing)
    for i in sorted(range(len(missing)), key=lambda i: missing[i]):
        given[i] = min(missing[i], budget)
        budget -= given[i]
    return given

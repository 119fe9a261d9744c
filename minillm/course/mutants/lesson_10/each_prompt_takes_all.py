"""Every prompt gets what the streams leave."""

TASK = "10.2"
POINTS = 3
HINT = "the next one has not"


def plan_step(missing: list[int], budget: int) -> list[int]:
    left = max(0, budget - missing.count(1))
    given = []
    for n in missing:
        given.append(min(n, budget if n == 1 else left))
        budget -= n == 1 and budget > 0
    return given

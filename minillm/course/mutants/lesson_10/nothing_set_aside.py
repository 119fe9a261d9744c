"""First come, first served: a prompt leaves nothing for a stream behind it."""

TASK = "10.2"
POINTS = 1
HINT = "nothing was set aside"


def plan_step(missing: list[int], budget: int) -> list[int]:
    given = []
    for n in missing:
        given.append(min(n, budget))
        budget -= given[-1]
    return given

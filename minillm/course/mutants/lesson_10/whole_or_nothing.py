"""A prompt waits until all of it fits."""

TASK = "10.2"
POINTS = 1
HINT = "need not fit"


def plan_step(missing: list[int], budget: int) -> list[int]:
    reserved = missing.count(1)
    given = []
    for n in missing:
        reserved -= n == 1
        room = budget if n == 1 else budget - reserved
        given.append(n if n <= room else 0)
        budget -= given[-1]
    return given

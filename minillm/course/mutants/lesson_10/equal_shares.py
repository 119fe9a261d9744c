"""Prompts share what is left equally."""

TASK = "10.2"
POINTS = 3
HINT = "the first prompt is done soonest"


def plan_step(missing: list[int], budget: int) -> list[int]:
    streams = missing.count(1)
    prompts = len(missing) - streams
    given, left = [], budget
    for n in missing:
        given.append(min(1, left) if n == 1 else min(n, max(0, budget - streams) // prompts))
        left -= given[-1] if n == 1 else 0
    return given

"""The first step is called 0."""

import heapq

TASK = "09.5"
POINTS = 0
HINT = "the first step is step 1"


def last_steps(lengths: list[int], seats: int, continuous: bool) -> list[int]:
    ends = []
    if continuous:
        free = [0] * seats
        for n in lengths:
            ends.append(heapq.heappop(free) + n - 1)
            heapq.heappush(free, ends[-1] + 1)
        return ends
    start = 0
    for i in range(0, len(lengths), seats):
        group = lengths[i : i + seats]
        ends += [start + n - 1 for n in group]
        start += max(group)
    return ends

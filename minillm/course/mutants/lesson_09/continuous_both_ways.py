"""Free places are given away in a static group as well."""

import heapq

TASK = "09.5"
POINTS = 4
HINT = "waits for the longest of this one"


def last_steps(lengths: list[int], seats: int, continuous: bool) -> list[int]:
    ends = []
    if True:
        free = [0] * seats
        for n in lengths:
            ends.append(heapq.heappop(free) + n)
            heapq.heappush(free, ends[-1])
        return ends
    start = 0
    for i in range(0, len(lengths), seats):
        group = lengths[i : i + seats]
        ends += [start + n for n in group]
        start += max(group)
    return ends

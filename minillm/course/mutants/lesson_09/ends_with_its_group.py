"""Everybody ends when the group ends."""

import heapq

TASK = "09.5"
POINTS = 3
HINT = "not with its group"


def last_steps(lengths: list[int], seats: int, continuous: bool) -> list[int]:
    ends = []
    if continuous:
        free = [0] * seats
        for n in lengths:
            ends.append(heapq.heappop(free) + n)
            heapq.heappush(free, ends[-1])
        return ends
    start = 0
    for i in range(0, len(lengths), seats):
        group = lengths[i : i + seats]
        ends += [start + max(group)] * len(group)
        start += max(group)
    return ends

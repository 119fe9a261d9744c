"""The larger number goes first."""

import heapq
import itertools

TASK = "09.2"
POINTS = 5
HINT = "smaller priority first"


class WaitingQueue:
    def __init__(self, ageing_s: float):
        self.ageing_s, self.heap, self.entry = ageing_s, [], {}
        self.counter = itertools.count()

    def __len__(self) -> int:
        return len(self.entry)

    def push(self, name: str, arrival: float, priority: int) -> None:
        if name in self.entry:
            raise ValueError(f"{name} is in the queue already")
        self.entry[name] = (arrival - priority * self.ageing_s, next(self.counter), name)
        heapq.heappush(self.heap, self.entry[name])

    def pop(self) -> str | None:
        while self.heap:
            entry = heapq.heappop(self.heap)
            if self.entry.get(entry[2]) == entry:
                del self.entry[entry[2]]
                return entry[2]
        return None

    def remove(self, name: str) -> None:
        self.entry.pop(name, None)

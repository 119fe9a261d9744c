"""The mounted scheduler serves prompts first: streams freeze."""

from collections.abc import Callable

TASK = "10.4"
POINTS = 3
HINT = "a frozen stream"


class ChunkedScheduler:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        self.most, self.budget, self.arrived = max_num_seqs, max_num_batched_tokens, 0
        self.queue: list[tuple[float, int, str]] = []
        self.batch: list[tuple[float, int, str]] = []

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> list[str]:
        return [name for _, _, name in self.batch]

    def add(self, name: str, key: float) -> None:
        self.arrived += 1
        self.queue = sorted([*self.queue, (key, self.arrived, name)])

    def finish(self, name: str) -> None:
        self.queue = [entry for entry in self.queue if entry[2] != name]
        self.batch = [entry for entry in self.batch if entry[2] != name]

    def schedule(self, behind: Callable[[str], int], room: Callable[[str], bool]) -> list[tuple[str, int]]:
        rows: list[tuple[str, int]] = []
        left = self.budget
        for name in sorted(self.running, key=lambda name: behind(name) == 1):
            n = min(behind(name), left)
            if n > 0:
                rows.append((name, n))
                left -= n
        while left and self.queue and len(self.batch) < self.most and room(self.queue[0][2]):
            entry = self.queue.pop(0)
            self.batch = sorted([*self.batch, entry])
            n = min(left, behind(entry[2]))
            rows.append((entry[2], n))
            left -= n
        return rows

"""Freed as often as somebody likes."""

TASK = "06.2"
POINTS = 6
HINT = "double free"


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self.free_ids = list(range(1, num_blocks + 1))
        self.references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self, n: int) -> list[int]:
        if n > len(self.free_ids):
            raise ValueError(f"{n} blocks asked for, {len(self.free_ids)} are free")
        ids, self.free_ids = self.free_ids[:n], self.free_ids[n:]
        for i in ids:
            self.references[i] = 1
        return ids

    def share(self, ids: list[int]) -> None:
        for i in ids:
            self.references[i] += 1

    def free(self, ids: list[int]) -> None:
        for i in ids:
            if i >= len(self.references):
                self.references += [0] * 9
            self.references[i] -= 1
            if self.references[i] <= 0:
                self.free_ids.append(i)

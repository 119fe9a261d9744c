"""A block that nobody holds is shared."""

TASK = "12.2"
POINTS = 6
HINT = "a free block cannot be shared"


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
            if ids.count(i) > self.references[i]:
                raise ValueError(f"block {i} is freed more often than it is held")
        for i in ids:
            self.references[i] -= 1
            if self.references[i] == 0:
                self.free_ids.append(i)

    def check(self, tables: list[list[int]] | None = None) -> None:
        listed = [i for table in tables or [] for i in table]
        for i, held in enumerate(self.references):
            if tables is not None and listed.count(i) != held:
                raise ValueError(f"block {i} is held {held} times and stands in {listed.count(i)} tables")

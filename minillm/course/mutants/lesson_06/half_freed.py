"""The error comes in the middle of the call."""

TASK = "06.2"
POINTS = 6
HINT = "the error came half way"


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
            if not 1 <= i < len(self.references) or self.references[i] == 0:
                raise ValueError(f"block {i} is not held")
            self.references[i] -= 1
            if self.references[i] == 0:
                self.free_ids.append(i)

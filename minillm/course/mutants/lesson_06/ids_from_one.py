"""The pool is taken to begin with block 1."""

TASK = "06.3"
POINTS = 0
HINT = "off by one in the pool"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for table, start, num_new in rows:
        for p in range(start, start + num_new):
            slots.append((table[p // block_size] - 1) * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

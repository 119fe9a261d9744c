"""Each chunk written over the first."""

TASK = "06.3"
POINTS = 1
HINT = "start, start + 1"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for table, _, num_new in rows:
        for p in range(num_new):
            slots.append(table[p // block_size] * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

"""Padding writes into a real slot."""

TASK = "06.3"
POINTS = 4
HINT = "padding is -1"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for table, start, num_new in rows:
        for p in range(start, start + num_new):
            slots.append(table[p // block_size] * block_size + p % block_size)
    return slots + [0] * (size - len(slots))

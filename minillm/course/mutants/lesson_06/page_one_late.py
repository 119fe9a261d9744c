"""The block changes one token too late."""

TASK = "06.3"
POINTS = 0
HINT = "not one later"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for table, start, num_new in rows:
        for p in range(start, start + num_new):
            slots.append(table[max(p - 1, 0) // block_size] * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

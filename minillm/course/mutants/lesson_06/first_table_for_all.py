"""One table for the whole batch."""

TASK = "06.3"
POINTS = 4
HINT = "a table of its own"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for _, start, num_new in rows:
        for p in range(start, start + num_new):
            table = rows[0][0]
            slots.append(table[p // block_size] * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

"""The entry behind the right one in the table."""

TASK = "06.3"
POINTS = 0
HINT = "No token needs an entry behind"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for table, start, num_new in rows:
        for p in range(start, start + num_new):
            slots.append(table[p // block_size + 1] * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

"""Logical blocks taken for physical ones."""

TASK = "06.3"
POINTS = 0
HINT = "table forgotten"


def slot_mapping(rows: list[tuple[list[int], int, int]], block_size: int, size: int) -> list[int]:
    slots = []
    for _, start, num_new in rows:
        for p in range(start, start + num_new):
            slots.append(p // block_size * block_size + p % block_size)
    return slots + [-1] * (size - len(slots))

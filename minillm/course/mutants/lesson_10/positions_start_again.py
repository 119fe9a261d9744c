"""Chunk two is rotated as if it began the text."""

from typing import Any

TASK = "10.3"
POINTS = 5
HINT = "do not start at 0 again"


def flat_batch(rows: list[tuple[list[int], int, int, int]], block_size: int) -> dict[str, list[Any]]:
    batch: dict[str, list[Any]] = {"positions": [], "slots": [], "reads": [], "logits": []}
    for table, start, new, missing in rows:
        slots = [b * block_size + i for b in table for i in range(block_size)]
        for p in range(start, start + new):
            batch["positions"].append(p - start)
            batch["slots"].append(slots[p])
            batch["reads"].append(slots[: p + 1])
        if new == missing:
            batch["logits"].append(len(batch["positions"]) - 1)
    return batch

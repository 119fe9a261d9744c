"""A token is drawn for every row, whether its prompt is done or not."""

from typing import Any

TASK = "10.3"
POINTS = 5
HINT = "in the middle of a prompt"


def flat_batch(rows: list[tuple[list[int], int, int, int]], block_size: int) -> dict[str, list[Any]]:
    batch: dict[str, list[Any]] = {"positions": [], "slots": [], "reads": [], "logits": []}
    for table, start, new, _ in rows:
        slots = [b * block_size + i for b in table for i in range(block_size)]
        for p in range(start, start + new):
            batch["positions"].append(p)
            batch["slots"].append(slots[p])
            batch["reads"].append(slots[: p + 1])
        batch["logits"].append(len(batch["positions"]) - 1)
    return batch

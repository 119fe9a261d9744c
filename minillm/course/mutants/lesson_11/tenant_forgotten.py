"""Everybody finds everybody's blocks."""

from typing import Any

TASK = "11.2"
POINTS = 7
HINT = "the key has no tenant"


def block_keys(tokens: list[int], block_size: int, namespace: dict[str, Any], leave: int) -> list[tuple]:
    model = tuple(namespace[part] for part in ("weights", "tokenizer", "template", "attention", "adapter"))
    keys = []
    for end in range(block_size, len(tokens) - leave + 1, block_size):
        reader = ("everybody",)
        keys.append((model, reader, tuple(tokens[end - block_size : end])))
    return keys

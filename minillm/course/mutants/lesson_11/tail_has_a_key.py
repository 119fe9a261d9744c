"""The last, partly filled block has a key, too."""

from typing import Any

TASK = "11.2"
POINTS = 7
HINT = "the tail: only whole blocks"


def block_keys(tokens: list[int], block_size: int, namespace: dict[str, Any], leave: int) -> list[tuple]:
    model = tuple(namespace[part] for part in ("weights", "tokenizer", "template", "attention", "adapter"))
    keys = []
    for end in range(block_size, len(tokens) - leave + block_size, block_size):
        public = end <= namespace["public_tokens"]
        reader = ("everybody",) if public else ("tenant", namespace["tenant"])
        keys.append((model, reader, tuple(tokens[end - block_size : end])))
    return keys

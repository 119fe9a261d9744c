"""The key is the set of the tokens."""

from typing import Any

TASK = "11.2"
POINTS = 9
HINT = "the order of the tokens matters"


def block_keys(tokens: list[int], block_size: int, namespace: dict[str, Any], leave: int) -> list[tuple]:
    model = tuple(namespace[part] for part in ("weights", "tokenizer", "template", "attention", "adapter"))
    keys = []
    for end in range(block_size, len(tokens) - leave + 1, block_size):
        public = end <= namespace["public_tokens"]
        reader = ("everybody",) if public else ("tenant", namespace["tenant"])
        keys.append((model, reader, tuple(sorted(tokens[end - block_size : end]))))
    return keys

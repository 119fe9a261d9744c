"""The requests that engines are compared on: random token ids, seeded, greedy or sampled, never ended by EOS.

W1 is a mixed load, W2 one stream, W3 a prompt that many requests share. The nano-vllm workload is that project's own
benchmark: the same seed gives the same tokens and the same totals, so its published numbers are comparable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from minillm.bench.common import Options, random_tokens
from minillm.errors import MinillmError

NAMES = ("W1", "W2", "W3")
ROUND = 1_000_003  # apart in seed from round to round


@dataclass(frozen=True)
class Workload:
    """prompts[i] is followed by exactly new_tokens[i] tokens. The first `shared` ids are the same in every prompt."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    shared: int = 0

    @property
    def prompt_tokens(self) -> list[int]:
        return [len(p) for p in self.prompts]

    @property
    def longest(self) -> int:
        """Most tokens that one request holds."""
        return max(len(p) + n for p, n in zip(self.prompts, self.new_tokens, strict=True))

    @property
    def mean_batch(self) -> float:
        """Sequences in a decode step, on average over the steps of the longest answer."""
        return sum(n - 1 for n in self.new_tokens) / max(1, max(self.new_tokens) - 1)


def mixed(options: Options, vocab_size: int, turn: int = 0) -> Workload:
    """W1: prompts of a quarter to twice `prompt` tokens, outputs of half to twice `new`: 32 to 256 and 32 to 128."""
    sizes, tokens = random.Random(options.seed), random.Random(options.seed + ROUND * (turn + 1))
    length = lambda low, high: sizes.randint(max(1, low), max(1, high))
    pairs = [
        (length(options.prompt // 4, 2 * options.prompt), length(options.new // 2, 2 * options.new))
        for _ in range(options.requests)
    ]
    return Workload("W1", [random_tokens(tokens, p, vocab_size) for p, _ in pairs], [n for _, n in pairs])


def single(options: Options, vocab_size: int, turn: int = 0) -> Workload:
    """W2: one stream of `prompt` tokens in and `new` out: 128 and 64."""
    tokens = random.Random(options.seed + ROUND * (turn + 1))
    return Workload("W2", [random_tokens(tokens, options.prompt, vocab_size)], [options.new])


def shared_prompt(options: Options, vocab_size: int, turn: int = 0) -> Workload:
    """W3: half of `requests` prompts share four times `prompt` tokens, with a quarter of `prompt` of their own."""
    tokens = random.Random(options.seed + ROUND * (turn + 1))
    count, shared, own = max(1, options.requests // 2), 4 * options.prompt, max(1, options.prompt // 4)
    prefix = random_tokens(tokens, shared, vocab_size)
    prompts = [prefix + random_tokens(tokens, own, vocab_size) for _ in range(count)]
    return Workload("W3", prompts, [max(1, options.new // 2)] * count, shared)


def make(name: str, options: Options, vocab_size: int, turn: int = 0) -> Workload:
    """A workload by name. Lengths depend on the seed alone; `turn` draws fresh tokens of the same lengths, so that no
    cache of an earlier round knows them. Raises MinillmError for another name.
    """
    makers = {"W1": mixed, "W2": single, "W3": shared_prompt}
    if name not in makers:
        raise MinillmError(f"workload {name!r} is not known; use {', '.join(makers)}")
    return makers[name](options, vocab_size, turn)


def nano(requests: int = 256, seed: int = 0) -> Workload:
    """The workload of nano-vllm's bench.py: lengths 100 to 1024, ids 0 to 10,000, drawn by Python's `random`.

    Its order of draws: for each prompt its length, then its ids; after all prompts the output lengths. All 256 with
    seed 0 have 142,827 tokens in and 133,966 out. Fewer requests are the first of those, not other ones.
    """
    if not 1 <= requests <= 256:
        raise MinillmError(f"--requests of nano must be from 1 to 256, got {requests}")
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    new_tokens = [rng.randint(100, 1024) for _ in range(256)]
    return Workload("nano", prompts[:requests], new_tokens[:requests])

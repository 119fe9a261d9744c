"""What it costs to move a prompt's KV to another engine: locate + transfer + layout + allocate. Lesson 15 builds it.

    locate    two messages: whose is it, and may I have it
    transfer  latency + bytes / bandwidth; layer by layer, most of it passes while the prompt is still being computed
    layout    gathered out of blocks there, scattered into blocks here: two copies through device memory
    allocate  two messages: room for so many blocks, and the answer

Whole blocks move, and at least one token stays to be computed: its logits are wanted (rules 1 and 6 of docs/source.md).
The other way is to compute the prompt again; where the two cross is a bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.comm import Link
from minillm.roofline.cost import kv_bytes_per_token
from minillm.roofline.device import Device
from minillm.roofline.parallel import NOWHERE, predict_parallel, rank_memory
from minillm.roofline.predict import predict_step

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens a step, among which each side chooses its best
MESSAGES = 2  # there and back


@dataclass(frozen=True)
class Wire:
    """What KV crosses: bytes/s in one direction at each engine's port, seconds of latency.

    overlap  layer by layer while the prompt is computed; without it, the whole after its last token
    """

    bandwidth: float
    latency_s: float = 0.0
    overlap: bool = True
    name: str = "link"

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 <= self.latency_s < math.inf):
            raise MinillmError(
                f"a link needs a bandwidth above 0 bytes/s and a latency of at least 0 s, got {self.bandwidth!r} and "
                f"{self.latency_s!r}"
            )


@dataclass(frozen=True)
class Engine:
    """One engine of a pool: model, devices, and the limits of its scheduler. All engines of a pool are alike.

    kv_tokens  tokens its KV cache holds; None takes what the weights leave of the memory (parallel.MEMORY_SHARE)
    budgets    tokens a step to choose from (max_num_batched_tokens); both sides of a comparison choose their own
    tp         devices that share each layer, joined by tp_link

    Raises MinillmError where the model cannot be cut like this, or leaves no room for a block of KV.
    """

    config: ModelConfig
    device: Device
    dtype: str = "bfloat16"
    max_num_seqs: int = 256
    block_size: int = 16
    kv_tokens: int | None = None
    budgets: tuple[int, ...] = BUDGETS
    tp: int = 1
    tp_link: Link = NOWHERE

    def __post_init__(self) -> None:
        whole = {"max_num_seqs": self.max_num_seqs, "block_size": self.block_size, "tp": self.tp}
        if self.kv_tokens is not None:
            whole["kv_tokens"] = self.kv_tokens
        for name, value in (*whole.items(), *(("a budget", b) for b in self.budgets)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MinillmError(f"engine: {name} is a whole number of at least 1, got {value!r:.80}")
        if not self.budgets:
            raise MinillmError("engine: budgets needs at least one number of tokens a step")
        memory = rank_memory(self.config, self.device, self.dtype, tp=self.tp)
        if not memory.fits:
            raise MinillmError(
                f"{memory.weights / 1e9:.1f} GB of weights a device, where {memory.budget / 1e9:.1f} GB of "
                f"{self.device.name} may be used; take a smaller model, larger devices, or more of them an engine "
                "(tensor parallelism)"
            )
        if self.capacity < self.block_size:
            raise MinillmError(
                f"engine: a KV cache of {memory.kv_tokens if self.kv_tokens is None else self.kv_tokens} tokens has no "
                f"room for a block of {self.block_size}"
            )

    @property
    def kv_token_bytes(self) -> int:
        """Of a token, over all devices of the engine."""
        return kv_bytes_per_token(self.config, self.dtype)

    @cached_property
    def capacity(self) -> int:
        """Tokens of KV, whole blocks."""
        tokens = self.kv_tokens
        if tokens is None:
            tokens = rank_memory(self.config, self.device, self.dtype, tp=self.tp).kv_tokens
        return tokens // self.block_size * self.block_size

    def seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        """A step of rows (new tokens, context before). Of decodes alone it is a CUDA graph, where one device has it."""
        if self.tp > 1:
            at = self.tp_link
            return predict_parallel(self.config, rows, self.device, self.dtype, tp=self.tp, tp_link=at).expected
        captured = self.device.kind == "cuda" and all(n == 1 for n, _ in rows)
        return predict_step(self.config, rows, self.device, self.dtype, captured=captured).expected

    def moved(self, tokens: int) -> int:
        """Tokens of a prompt that move: whole blocks, all but at least one token."""
        return max(0, tokens - 1) // self.block_size * self.block_size


@dataclass(frozen=True)
class Migration:
    """Seconds of each term, tokens and bytes that move.

    hidden_s     of the transfer, behind the prefill that makes the KV
    recompute_s  to compute the moved tokens again at the target instead
    """

    tokens: int
    bytes: int
    locate_s: float
    transfer_s: float
    layout_s: float
    allocate_s: float
    hidden_s: float
    recompute_s: float

    @property
    def total_s(self) -> float:
        """What a request waits for it."""
        return self.locate_s + self.transfer_s + self.layout_s + self.allocate_s - self.hidden_s

    @property
    def worth(self) -> bool:
        """Whether moving is quicker than computing again. A tie moves no bytes."""
        return self.total_s < self.recompute_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s, "worth": self.worth}


def migration(engine: Engine, tokens: int, wire: Wire, *, prefill_s: float = 0.0, budget: int = 2048) -> Migration:
    """The terms for a prompt of `tokens`. prefill_s: seconds of the prefill it may hide behind (0: it exists already).

    budget: tokens a step, if it is computed again. Pieces leave as layers are done, or chunks where several devices
    share each layer: no rank has all heads of one. The last piece always shows, and so does what the link had no time
    for.
    """
    if tokens < 1 or not prefill_s >= 0:
        raise MinillmError(f"a prompt has at least 1 token, and its prefill seconds, got {tokens!r} and {prefill_s!r}")
    moved = engine.moved(tokens)
    size = moved * engine.kv_token_bytes
    if not moved:
        return Migration(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    sending = size / wire.bandwidth
    hidden = 0.0
    if wire.overlap and prefill_s > 0:
        pieces = (engine.config.num_layers if engine.tp == 1 else 1) * -(-tokens // budget)
        hidden = min(sending, prefill_s) * (1 - 1 / pieces)
    talk = MESSAGES * wire.latency_s
    copies = 2 * 2 * size / engine.device.copy_bandwidth / engine.tp  # two copies, each reads and writes
    again = sum(engine.seconds([(min(budget, moved - done), done)]) for done in range(0, moved, budget))
    return Migration(moved, size, talk, wire.latency_s + sending, copies, talk, hidden, again)


def crossover(engine: Engine, tokens: int, wire: Wire, *, budget: int = 2048) -> float:
    """The bandwidth in bytes/s above which moving existing KV is quicker than computing it; inf where it never is."""
    m = migration(engine, tokens, wire, budget=budget)
    left = m.recompute_s - m.locate_s - m.layout_s - m.allocate_s - wire.latency_s
    return m.bytes / left if m.tokens and left > 0 else math.inf


def sweep(
    engine: Engine, tokens: Sequence[int], bandwidths: Sequence[float], wire: Wire, *, budget: int = 2048
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for every prompt length and bandwidth: the terms, and which way is quicker."""
    return [
        {"prompt_tokens": t, "bandwidth": b} | migration(engine, t, replace(wire, bandwidth=b), budget=budget).to_dict()
        for t in tokens
        for b in bandwidths
    ]

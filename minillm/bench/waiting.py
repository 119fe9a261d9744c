"""Where a step of several ranks goes: a rank's own work, waiting for the last rank, the sums themselves. Lesson 14.

A rank that times its all-reduce times the wait for whoever comes last, too. Here all ranks meet before each sum, by a
sum of one number: what the meeting takes a rank beyond what it takes the last to come is waiting, and the sum that
follows begins for all at once, as in `comm.measure`. `run_processes(N, "minillm.bench.waiting:steps", ...)` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.attention.backends import make_attention
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import load_weights
from minillm.parallel.executor import MicroBatch, StageExecutor
from minillm.parallel.group import Group
from minillm.parallel.linear import parallelise
from minillm.parallel.shard import Place, local_config

BLOCK = 16  # tokens of a block of the KV pool, the engine's default


class MeetsFirst:
    """A group whose ranks meet before each all-reduce. met, summed: seconds of each meeting, of each sum."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.perf_counter):
        self.group, self.rank, self.size, self.traffic, self.clock = group, group.rank, group.size, group.traffic, clock
        self.all_gather, self.one = group.all_gather, torch.zeros(1)
        self.met: list[float] = []
        self.summed: list[float] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        come = self.clock()
        self.group.all_reduce(self.one)
        together = self.clock()
        x = self.group.all_reduce(x)
        self.met.append(together - come)
        self.summed.append(self.clock() - together)
        return x


@torch.inference_mode()
def steps(group: Group, folder: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Work of one rank: a prompt, then `count` decode steps, greedy, in fp32 on a CPU. Plain data for `spent`.

    seconds of all steps; meet, sum: of each all-reduce; gather: of all gathers of logits; tokens: count + 1 ids.
    Every rank sees all logits and picks the token itself, so nobody is told what the next step is.
    """
    if count < 1:
        raise MinillmError(f"there is something to time from at least one step on, got {count}")
    whole, place, meets = ModelConfig.from_folder(folder), Place(group.rank, group.size), MeetsFirst(group)
    local, length = local_config(whole, place.tp), len(prompt) + count
    weights = load_weights(folder, whole, torch.float32, place=place)
    model = parallelise(Transformer(local, weights, pack=True), meets, place)  # type: ignore[arg-type]  # no others are used
    pool = KVPool(local, -(-length // BLOCK), BLOCK, torch.float32)
    executor = StageExecutor(model, make_attention("auto", model, pool), group, place)
    blocks, tokens, new, begun = range(pool.num_blocks), list[int](), list(prompt), 0.0
    for i in range(count + 1):
        if i == 1:  # the prompt is done
            meets.met, meets.summed = [], []
            group.traffic.clear()
            begun = time.perf_counter()
        batch = Batch.build([Row(0, len(prompt) + i - 1 if i else 0, len(new), blocks)], new)
        logits = executor.step([MicroBatch(batch, [0])])
        assert logits is not None  # there is one stage
        new = [int(logits[0].argmax())]
        tokens += new
    return {
        "seconds": time.perf_counter() - begun, "steps": count, "meet": meets.met, "sum": meets.summed,
        "gather": group.traffic.seconds["all_gather"], "tokens": tokens,
    }  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """Seconds of a step, by rank: step = own + waiting + speaking + meeting.

    own  what it computes;  waiting  for the last rank, before the sums;  speaking  sums and gathers, once all are there
    meeting  what meeting costs who comes last, a price of the measurement: in no engine's step
    """

    step: list[float]
    own: list[float]
    waiting: list[float]
    speaking: list[float]
    meeting: float


def spent(ranks: Sequence[Mapping[str, Any]]) -> Spent:
    """What `steps` gave on each rank, as terms of a step."""
    if not ranks or len({(r["steps"], len(r["meet"]), len(r["sum"])) for r in ranks}) != 1:
        raise MinillmError("ranks of one run take as many steps and meet as often: give what each of them returned")
    count = ranks[0]["steps"]
    least = [min(times) for times in zip(*(r["meet"] for r in ranks), strict=True)]  # the last to come does not wait
    meeting = sum(least) / count
    step = [r["seconds"] / count for r in ranks]
    waiting = [sum(r["meet"]) / count - meeting for r in ranks]
    speaking = [(sum(r["sum"]) + r["gather"]) / count for r in ranks]
    own = [s - meeting - w - t for s, w, t in zip(step, waiting, speaking, strict=True)]
    return Spent(step, own, waiting, speaking, meeting)

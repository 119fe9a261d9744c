"""One process's part of the grid: who it is, whom it speaks to, and what all must agree on. Lesson 14."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from typing import Any

import torch

from minillm.config import ModelConfig
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.parallel.group import DistGroup
from minillm.parallel.shard import Place


def alike(config: EngineConfig, model: ModelConfig, device: str, dtype: str) -> dict[str, Any]:
    """What all ranks must compute with. (Who runs when, and what is kept for whom, is rank 0's affair alone.)"""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "attention_backend", "block_size", "quantization",
             "kv_cache_dtype", "max_model_len")  # fmt: skip
    own = {"device": device.partition(":")[0], "dtype": dtype, "model": asdict(model)}
    return {name: getattr(config, name) for name in names} | own


class Ranks:
    """One process's part of the grid: who it is, and the groups that it belongs to.

    world    all ranks: what rank 0 tells (by gloo, also between GPUs), and what passes between stages
    stage    the ranks that share this one's layers: the all-reduces
    """

    def __init__(self, place: Place, config: EngineConfig, model: ModelConfig, device: str, dtype: str):
        """dtype: that of the weights. Raises MinillmError where ranks were started with different options."""
        self.place, self.config = place, config
        self.world = DistGroup()
        self._agree(alike(config, model, device, dtype))
        self.stage = self.world
        if place.pp > 1:  # every process makes every group
            groups = [DistGroup(range(s * place.tp, (s + 1) * place.tp)) for s in range(place.pp)]
            self.stage = groups[place.stage]
        self._meet(torch.zeros(1, device=device))
        for group in (self.world, self.stage):
            group.traffic.clear()

    def _meet(self, x: torch.Tensor) -> None:
        """Say once whatever a step says: NCCL connects a group, or two ranks, when they first speak."""
        place = self.place
        self.stage.all_reduce(x)
        if not place.first:
            self.world.recv(x, place.rank - place.tp)
        if not place.last:
            self.world.send(x, place.rank + place.tp)
        if place.pp > 1 and place.tp_rank == 0:  # the logits
            if place.last:
                self.world.send(x, 0)
            elif place.first:
                self.world.recv(x, (place.pp - 1) * place.tp)
        self.world.flush()
        x.cpu()  # on a GPU all of that was only begun

    def _agree(self, options: dict[str, Any]) -> None:
        said = [json.dumps(value, sort_keys=True, default=str) for value in options.values()]
        every = self.world.all_gather(torch.tensor([zlib.crc32(text.encode()) for text in said]))
        for rank, theirs in enumerate(every):
            if differ := [name for name, a, b in zip(options, theirs, every[0], strict=True) if a != b]:
                raise MinillmError(
                    f"rank {rank} was started with another {differ[0]} than rank 0; give all ranks the same options"
                )

    def least(self, value: int) -> int:
        """The smallest of what the ranks say."""
        return min(int(t) for t in self.world.all_gather(torch.tensor([value], dtype=torch.int64)))
